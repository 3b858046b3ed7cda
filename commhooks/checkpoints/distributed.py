"""Reading a hook's state from a checkpoint of `torch.distributed.checkpoint` (DCP), whichever run saved it.

DCP reads only into tensors that the caller provides. A fresh `state_dict()` provides the right ones if nothing has
changed; here they are created from the checkpoint's own table of contents. Every rank reads on its own, without a
collective, so a rank that cannot read does not block the others.

DCP is imported inside functions because importing it takes 0.8 s, compared with 1.1 s for torch and 0.1 s for
commhooks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

import torch

from commhooks.checkpoints.run import HookState
from commhooks.errors import CheckpointError
from commhooks.state.snapshot import LoadOptions, LoadRules

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import StorageReader

PRIVATE_NAMES = (
    "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.set_up_planner",
    "torch.distributed.checkpoint.filesystem:FileSystemReader",
    "torch.distributed.checkpoint.metadata:BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata:Metadata.planner_data",
    "torch.distributed.checkpoint.metadata:Metadata.state_dict_metadata",
    "torch.distributed.checkpoint.metadata:TensorStorageMetadata.properties",
    "torch.distributed.checkpoint.metadata:TensorStorageMetadata.size",
)
"""No underscore marks what DCP keeps in a checkpoint's table of contents, but no page of PyTorch's describes it."""

KeyPath = tuple[str | int, ...]


def load_distributed(
    checkpoint_id: str | os.PathLike[str],
    hooks: HookState,
    *,
    key: str = "hooks",
    storage_reader: StorageReader | None = None,
    **rules: Unpack[LoadOptions],
) -> None:
    """Restore the state that `torch.distributed.checkpoint.save({key: hooks, ...})` saved.

    Call it on every rank, between the same two steps. Unlike `torch.distributed.checkpoint.load`, it does not need an
    existing state with the same layout: the run may have different buckets, and also a different number of ranks or a
    different compressor if `world_size`, `settings` and `missing` allow it (see `LoadRules`). Each rank reads its own
    residuals, or those of all ranks with world_size="spread". A `key` with dots is a path: "app.hooks" for {"app":
    {"hooks": ...}}.

    Pass a `storage_reader` for checkpoints that are not in a folder.

    Raises `CheckpointError` on every rank, and changes nothing, if any rank cannot read the checkpoint or finds that it
    does not match the run; a `PowerSGDState` that has taken no step informs the other ranks at their first bucket. DCP
    unpickles the checkpoint's table of contents, which can execute code: load only checkpoints that you trust.
    """
    allowed = LoadRules(**rules)
    read: dict[str, Any] | CheckpointError
    try:
        read = _read_state(checkpoint_id, storage_reader, key, hooks, allowed)
    except CheckpointError as error:
        read = error
    except Exception as error:  # whatever a damaged file causes in DCP
        read = CheckpointError(f"{checkpoint_id} cannot be read ({type(error).__name__}: {error}).")
        read.__cause__ = error
    hooks.load_state_dict(read, **rules)


def _read_state(
    checkpoint_id: str | os.PathLike[str],
    reader: StorageReader | None,
    key: str,
    hooks: HookState,
    rules: LoadRules,
) -> dict[str, Any]:
    """Return a state_dict, also of several engines, with the per-rank parts that this rank needs."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if reader is None:
        reader = FileSystemReader(checkpoint_id)
    else:
        reader.reset(checkpoint_id)
    metadata = reader.read_metadata()
    paths = _paths_under(key, metadata)
    rank, world_size = hooks.rank_and_world_size
    labels = list(dict.fromkeys(str(path[1]) for path in paths.values() if path[:1] == ("groups",)))
    is_own = getattr(hooks, "is_own", None)
    if is_own is not None:  # others are those of ranks that keep other shards
        labels = list(filter(is_own, labels)) or labels
    if not labels:
        return _read_one(str(checkpoint_id), reader, metadata, key, rank, world_size, rules)
    groups = {
        label: _read_one(str(checkpoint_id), reader, metadata, f"{key}.groups.{label}", rank, world_size, rules)
        for label in labels
    }
    shared = _read(reader, metadata, {name: path for name, path in paths.items() if path[0] != "groups"})
    return {"shared": {}} | shared | {"groups": groups}


def _read_one(
    checkpoint_id: str,
    reader: StorageReader,
    metadata: Metadata,
    key: str,
    rank: int,
    world_size: int,
    rules: LoadRules,
) -> dict[str, Any]:
    """Return the state_dict of one engine."""
    paths = _paths_under(key, metadata)
    sizes = [name for name, path in paths.items() if path == ("world_size",)]
    if not sizes:
        held = {str(path[0]) for path in _paths_under("", metadata).values()}
        raise CheckpointError(
            f"{checkpoint_id} has no hook's state under the key {key!r}; it has {', '.join(sorted(held)) or 'nothing'}."
        )
    saved_size = int(_read(reader, metadata, {sizes[0]: ("world_size",)})["world_size"])
    wanted = rules.ranks_to_read(rank, saved_size, world_size)
    parts = {f"rank{number}" for number in wanted}
    paths = {name: path for name, path in paths.items() if path[0] not in ("local", "inventory") or path[1] in parts}
    state = _read(reader, metadata, paths)
    # DCP saves nothing for an empty dictionary; the inventory lists every part, so a loss does not go unnoticed.
    for part in ("bucket_plan", "kinds", "replicated", "local"):
        state.setdefault(part, {})
    state["local"] = {part: {} for part in parts & state.get("inventory", {}).keys()} | state["local"]
    return state


def _paths_under(key: str, metadata: Metadata) -> dict[str, KeyPath]:
    """Return the path of each entry below `key`, by the name that DCP gives the entry."""
    found: dict[str, KeyPath] = {}
    for name in metadata.state_dict_metadata:
        path: KeyPath = (metadata.planner_data or {}).get(name, (name,))
        for depth in range(len(path)):
            if ".".join(map(str, path[:depth])) == key:
                found[name] = path[depth:]
                break
    return found


def _read(reader: StorageReader, metadata: Metadata, paths: Mapping[str, KeyPath]) -> dict[str, Any]:
    """Read entries, and return them nested according to their paths."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    flat: dict[str, Any] = {}
    for name in paths:
        entry = metadata.state_dict_metadata[name]
        if isinstance(entry, BytesStorageMetadata):
            flat[name] = None  # a number, a string, or a list of them
        else:
            flat[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(flat, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(reader.prepare_global_plan(plans)[0]), planner).wait()
    root: dict[str, Any] = {}
    for name, value in flat.items():
        *above, last = paths[name]
        inside: dict[Any, Any] = root
        for part in above:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return root
