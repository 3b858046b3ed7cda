"""Reading a hook's state from a checkpoint of `torch.distributed.checkpoint` (DCP), whichever run saved it.

DCP reads only into tensors that the caller provides. A fresh `state_dict()` provides the right ones if nothing has
changed; here they are created from the checkpoint's own table of contents. Every rank reads on its own, without a
collective, so a rank that cannot read does not block the others.

DCP is imported inside functions because importing it takes 0.8 s, compared with 1.1 s for torch and 0.1 s for
commhooks.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import torch

from commhooks.errors import CheckpointError
from commhooks.saving.parts import OWN, joined, read_parts
from commhooks.saving.rules import LoadOptions, LoadRules
from commhooks.saving.run import HookState
from commhooks.saving.saved import Saved, read

if TYPE_CHECKING:
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
    saved: Saved | CheckpointError
    try:
        is_own = getattr(hooks, "is_own", lambda label: True)
        ranks_of = getattr(hooks, "ranks_of", lambda label: hooks.rank_and_world_size)
        source = DistributedCheckpoint(checkpoint_id, storage_reader, key, is_own)
        states = [
            joined(shared, own.values())
            for ranks, one in source.by(ranks_of).items()
            for shared, own in [read_parts(one, *ranks, allowed)]
        ]
        state = states[0]
        for other in states[1:]:
            state["groups"] |= other["groups"]
        saved = read(state)
    except CheckpointError as error:
        saved = error
    except Exception as error:  # whatever a damaged file causes in DCP
        saved = CheckpointError(f"{checkpoint_id} cannot be read ({type(error).__name__}: {error}).")
        saved.__cause__ = error
    hooks.restore(saved, allowed)


class DistributedCheckpoint:
    """A hook's state in a checkpoint of DCP, as a source of ranks' parts.

    `is_own` tells which of several engines' states this rank loads: others are those of ranks that keep other shards.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str],
        reader: StorageReader | None,
        key: str,
        is_own: Callable[[str], bool],
    ) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        if reader is None:
            reader = FileSystemReader(checkpoint_id)
        else:
            reader.reset(checkpoint_id)
        self._reader, self._metadata = reader, reader.read_metadata()
        paths = self._paths_under(key)
        labels = list(dict.fromkeys(str(path[1]) for path in paths.values() if path[0] == "groups"))
        self._labels = list(filter(is_own, labels)) or labels
        self._paths = {n: path for n, path in paths.items() if path[0] != "groups" or path[1] in self._labels}
        if not any(_in_engine(path) == ("world_size",) for path in self._paths.values()):
            held = {str(path[0]) for path in self._paths_under("").values()}
            raise CheckpointError(
                f"{checkpoint_id} has no hook's state under the key {key!r}; it has "
                f"{', '.join(sorted(held)) or 'nothing'}."
            )

    def by(self, ranks_of: Callable[[str], tuple[int, int]]) -> dict[tuple[int, int], DistributedCheckpoint]:
        """Return sources of the engines whose ranks are the same: this one's number among them, and how many."""
        labels: dict[tuple[int, int], list[str]] = {}
        for label in self._labels or [""]:
            labels.setdefault(ranks_of(label), []).append(label)
        if len(labels) == 1:
            return dict.fromkeys(labels, self)
        return {ranks: self._of(chosen) for ranks, chosen in labels.items()}

    def _of(self, labels: Sequence[str]) -> DistributedCheckpoint:
        part = copy.copy(self)
        part._labels = [*labels]
        part._paths = {n: path for n, path in self._paths.items() if path[0] != "groups" or path[1] in labels}
        return part

    def shared(self) -> dict[str, Any]:
        """Return the part that all ranks share."""
        state = self._read(lambda path: path[0] not in OWN)
        if self._labels:
            state.setdefault("shared", {})
        for one in self._engines_of(state):  # DCP saves nothing for an empty dictionary
            for name in ("bucket_plan", "kinds", "replicated"):
                one.setdefault(name, {})
        return state

    def own(self, rank: int) -> dict[str, Any]:
        """Return a rank's own part: the inventory lists everything in it, so a loss does not go unnoticed."""
        state = self._read(lambda path: path[0] in OWN and path[1] == f"rank{rank}")
        for one in self._engines_of(state):
            inventory = one.setdefault("inventory", {})
            one["local"] = {key: {} for key in inventory} | one.get("local", {})
        return state

    def _engines_of(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the state of each engine within one that was read."""
        if not self._labels:
            return [state]
        groups = state.setdefault("groups", {})
        return [groups.setdefault(label, {}) for label in self._labels]

    def _paths_under(self, key: str) -> dict[str, KeyPath]:
        """Return the path of each entry below `key`, by the name that DCP gives the entry."""
        found: dict[str, KeyPath] = {}
        for name in self._metadata.state_dict_metadata:
            path: KeyPath = (self._metadata.planner_data or {}).get(name, (name,))
            for depth in range(len(path)):
                if ".".join(map(str, path[:depth])) == key:
                    found[name] = path[depth:]
                    break
        return found

    def _read(self, is_wanted: Callable[[KeyPath], bool]) -> dict[str, Any]:
        """Read the entries whose paths in their engine's state are wanted, and return them nested by their paths."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata

        flat: dict[str, Any] = {}
        for name in (name for name, path in self._paths.items() if is_wanted(_in_engine(path))):
            entry = self._metadata.state_dict_metadata[name]
            if isinstance(entry, BytesStorageMetadata):
                flat[name] = None  # a number, a string, or a list of them
            else:
                flat[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(flat, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plans = planner.create_global_plan([self._reader.prepare_local_plan(planner.create_local_plan())])
        self._reader.read_data(planner.finish_plan(self._reader.prepare_global_plan(plans)[0]), planner).wait()
        return _nested({self._paths[name]: value for name, value in flat.items()})


def _in_engine(path: KeyPath) -> KeyPath:
    """Return a path within the state of its engine."""
    return path[2:] if path[0] == "groups" else path


def _nested(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Return values nested by their paths."""
    root: dict[str, Any] = {}
    for (*above, last), value in values.items():
        inside: dict[Any, Any] = root
        for part in above:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return root
