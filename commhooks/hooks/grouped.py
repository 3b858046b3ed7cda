"""Several engines on one line as one handle: each with its own state, saved, loaded and replaced together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, Unpack

from commhooks.errors import CheckpointError, SettingsError
from commhooks.hooks.handle import Handle
from commhooks.language.compressor import Compressor
from commhooks.saving.resumption import agreed, restore
from commhooks.saving.rules import LoadOptions, LoadRules
from commhooks.saving.saved import SavedGroups, read, refuse
from commhooks.scheduling.ledger import ParameterTraffic, Statistics, total

One = TypeVar("One", bound=Handle)
"""The handle of one engine."""


class Grouped(Mapping[str, One]):
    """Handles of engines on one line, by label; no parameter's name is in two of them."""

    _handles: Mapping[str, One]
    keeps_own_model = False
    """Every rank has the same model, or a shard of it."""

    def __getitem__(self, label: str) -> One:
        """Return a group's handle."""
        return self._handles[label]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the labels, in the order in which the groups were given."""
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def __str__(self) -> str:
        """Return a summary of each group."""
        return "\n".join(f"{label}: {one}" for label, one in self.items())

    def statistics(self) -> Statistics:
        """Return this rank's totals over all groups; its steps are the rounds of all of them."""
        return total(one.statistics() for one in self.values())

    def by_parameter(self) -> dict[str, ParameterTraffic]:
        """Return each tensor's share of this rank's totals, by name."""
        return {name: share for one in self.values() for name, share in one.by_parameter().items()}

    def replace(self, compressor: Compressor | str | Mapping[str, Compressor | str]) -> None:
        """Switch to another compressor from the next rounds on, in all groups or in those named; see `Handle.replace`.

        If it does not suit one of the groups on any rank, no group switches.
        """
        given = dict(compressor) if isinstance(compressor, Mapping) else dict.fromkeys(self, compressor)
        if unknown := given.keys() - self.keys():
            raise SettingsError(
                f"replace: there is no group {', '.join(sorted(unknown))}; there are {', '.join(self)}."
            )
        for label, one in given.items():  # the first error is raised in the first group, where all ranks learn of it
            try:
                self[label].checked(one)
            except SettingsError:
                self[label].replace(one)
        for label, one in given.items():
            self[label].replace(one)

    def snapshot(self, shared: Mapping[str, Any] | None = None) -> SavedGroups:
        """Return the same as `state_dict`, with the tensors themselves; `shared` is added to it."""
        return SavedGroups(groups={label: one.snapshot() for label, one in self.items()}, shared=dict(shared or {}))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all groups as plain data, after the rounds under way; see `Handle.state_dict`."""
        groups = {label: one.state_dict() for label, one in self.items()}
        return SavedGroups(groups={}, shared={}).as_dict() | {"groups": groups}

    def differences(self, snapshots: SavedGroups, rules: LoadRules) -> list[str]:
        """List every difference between a state and this run that would cause an error on loading."""
        if snapshots.groups.keys() != self.keys():
            return [f"it has the groups {', '.join(snapshots.groups)}, and this run has {', '.join(self)}"]
        return [
            f"{label}: {fault}"
            for label, one in self.items()
            for fault in one.differences(snapshots.groups[label], rules)
        ]

    def load_state_dict(self, state: Mapping[str, Any] | CheckpointError, **rules: Unpack[LoadOptions]) -> None:
        """Restore a `state_dict` in all groups, or in none if it does not match one of them on any rank.

        See `Handle.load_state_dict`.
        """
        self.restore(read(SavedGroups.from_dict, state), LoadRules(**rules))

    def restore(self, loaded: SavedGroups | CheckpointError, rules: LoadRules) -> None:
        """Restore a state; if it does not match, or is an error, raise on every rank and change nothing."""
        first = next(iter(self.values()))
        if not isinstance(loaded, CheckpointError) and (faults := self.differences(loaded, rules)):
            loaded = refuse(f"rank {first.rank_and_world_size[0]}: the checkpoint does not fit", faults)
        agreed(first._made_engine(), loaded)
        if isinstance(loaded, CheckpointError):
            raise loaded
        for label, one in self.items():
            restore(one._made_engine(), loaded.groups[label], rules, 0)

    def is_own(self, label: str) -> bool:
        """Return whether this rank loads a group of a checkpoint; it skips those of ranks with another shard."""
        return True

    def close(self) -> None:
        """Close all lanes; the thread stops with the line's last one. Later rounds fail."""
        for one in self.values():
            one._made_engine().stop()
