"""What an engine and its DDP save, and take up again, together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from commhooks.engine.engine import Engine
from commhooks.errors import CheckpointError
from commhooks.state.snapshot import LoadRules, Snapshot


def saved_state(engine: Engine, model: Module | None) -> dict[str, Any]:
    """Return an engine's state_dict; all state that there will be is in it, also before the first step."""
    engine.lay_out(sparse_parameters(model) if model is not None else set())
    state = snapshot_of(engine, model).cloned().as_dict()
    return state | {"inventory": {rank: _inventory(state, rank) for rank in state["local"]}}


def snapshot_of(engine: Engine, model: Module | None) -> Snapshot:
    """Return the state as it is, not copied, and how ddp_core's DDP has cut its buckets."""
    plan: Any = getattr(model, "bucket_plan", None)
    return engine.snapshot({"ddp_core": plan()} if plan is not None else None)


def load_state(engine: Engine, state: object, rules: LoadRules, model: Module | None) -> None:
    """Load an engine's state_dict, and let ddp_core's DDP cut its buckets as they were.

    Instead of a state, a rank that could not read one hands in the `CheckpointError` that says why.
    """
    read: Snapshot | CheckpointError
    try:
        read = state if isinstance(state, CheckpointError) else _complete(state)
    except CheckpointError as error:
        read = error
    except Exception as error:  # whatever damaged data make of the reader: the other ranks wait for an answer
        read = CheckpointError(f"the hook's state is damaged ({type(error).__name__}: {error}).")
    engine.restore(read, rules)
    load_bucket_plan: Any = getattr(model, "load_bucket_plan", None)
    if load_bucket_plan is not None and isinstance(read, Snapshot) and "ddp_core" in read.bucket_plan:
        load_bucket_plan(read.bucket_plan["ddp_core"])


def sparse_parameters(model: Module) -> set[Tensor]:
    """Return the parameters whose gradients a DDP takes to be sparse."""
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
    }


def searches_for_unused(model: Module) -> bool:
    """Return whether a DDP leaves a gradient unchanged if no rank used its parameter."""
    return bool(getattr(model, "find_unused_parameters", False) or getattr(model, "static_graph", False))


def uncut_steps(model: Module) -> int:
    """Return how many steps a DDP begins with before it cuts its buckets: one more if it learns a static graph."""
    return 2 if getattr(model, "static_graph", False) else 1


def _inventory(state: Mapping[str, Any], rank: str) -> list[str]:
    """Name every part of a state_dict that one rank is to find in it again."""
    parts = {"replicated": state["replicated"], "local": state["local"][rank]}
    held = [f"{part}.{name}.{entry}" for part, entries in parts.items() for name in entries for entry in entries[name]]
    return sorted(held + [f"shapes.{name}" for name in state["shapes"]])


def _complete(state: object) -> Snapshot:
    """Read a state_dict; raise `CheckpointError` if it lacks something that was saved.

    `torch.distributed.checkpoint.load` reads into the places of another state_dict, and leaves out without a word what
    has no place there.
    """
    read = Snapshot.from_dict(state)
    assert isinstance(state, Mapping), "from_dict takes nothing else"
    inventory = state.get("inventory", {})
    for rank in state["local"].keys() & inventory.keys():
        lost = sorted(set(inventory[rank]) - set(_inventory(state, rank)))
        if lost:
            more = f" and {len(lost) - 8} more" if len(lost) > 8 else ""
            raise CheckpointError(
                f"the state was read without {', '.join(lost[:8])}{more}, which the checkpoint holds and which had no "
                "place in the state that it was read into; read it with commhooks.load_distributed."
            )
    return read
