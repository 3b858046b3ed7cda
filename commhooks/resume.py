"""What an engine and its DDP save, and take up again, together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from commhooks.engine import Engine
from commhooks.errors import CheckpointError
from commhooks.snapshot import LoadRules, Snapshot


def saved_state(engine: Engine, model: Module | None) -> dict[str, Any]:
    """Return an engine's state_dict; all state that there will be is in it, also before the first step."""
    modules = model.modules() if model is not None else ()
    sparse: set[Tensor] = {
        module.weight
        for module in modules
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
    }
    engine.lay_out(sparse)
    return snapshot_of(engine, model).cloned().as_dict()


def snapshot_of(engine: Engine, model: Module | None) -> Snapshot:
    """Return the state as it is, not copied, and how ddp_core's DDP has cut its buckets."""
    plan: Any = getattr(model, "bucket_plan", None)
    return engine.snapshot(plan() if plan is not None else None)


def load_state(engine: Engine, state: object, rules: LoadRules, model: Module | None) -> None:
    """Load an engine's state_dict, and let ddp_core's DDP cut its buckets as they were."""
    read: Snapshot | CheckpointError
    try:
        read = Snapshot.from_dict(state)
    except CheckpointError as error:
        read = error
    engine.restore(read, rules)
    load_bucket_plan: Any = getattr(model, "load_bucket_plan", None)
    if load_bucket_plan is not None and isinstance(read, Snapshot) and read.bucket_plan:
        load_bucket_plan(read.bucket_plan)


def searches_for_unused(model: Module) -> bool:
    """Say whether a DDP leaves alone the gradients of parameters that no rank used."""
    return bool(getattr(model, "find_unused_parameters", False) or getattr(model, "static_graph", False))
