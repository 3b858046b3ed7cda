"""The state of several engines on one line, by label, with the state that they share.

layout          4, as that of its states
commhooks       the version of commhooks that saved it
groups          by label: a state as `commhooks.state.snapshot` describes it
shared          plain data that is the same on every rank
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from commhooks.errors import CheckpointError
from commhooks.state.formats import LAYOUT, VERSION, kind_of, refuse_other_layouts
from commhooks.state.snapshot import Snapshot
from commhooks.tensors import bytes_of, cloned


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshots:
    """The state of several engines at one moment; the module's docstring describes the fields."""

    groups: dict[str, Snapshot]
    shared: dict[str, Any]

    @property
    def step(self) -> str:
        """The step of each group, as text."""
        return ", ".join(f"{one.step} of {label}" for label, one in self.groups.items())

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        groups = {label: one.as_dict() for label, one in self.groups.items()}
        return {"layout": LAYOUT, "commhooks": VERSION, "groups": groups, "shared": self.shared}

    @classmethod
    def from_dict(cls, state: object) -> Snapshots:
        """Read the result of `as_dict`; raise `CheckpointError` for anything else."""
        if not isinstance(state, Mapping) or not isinstance(state.get("groups"), Mapping):
            raise CheckpointError(f"expected the state_dict() of several exchangers (got {kind_of(state)}).")
        refuse_other_layouts("the state of several exchangers", state)
        if not isinstance(state.get("shared"), Mapping):
            raise CheckpointError(
                f"the state of several exchangers is damaged: shared is {kind_of(state.get('shared'))}."
            )
        groups = {}
        for label, saved in state["groups"].items():
            try:
                groups[label] = Snapshot.from_dict(saved)
            except CheckpointError as error:
                raise CheckpointError(f"{label}: {error}") from error
        return cls(groups=groups, shared=dict(state["shared"]))

    def cloned(self) -> Snapshots:
        """Return snapshots whose tensors are copies."""
        groups = {label: one.cloned() for label, one in self.groups.items()}
        return Snapshots(groups=groups, shared=cloned(self.shared))

    def shared_part(self) -> dict[str, Any]:
        """Return the state that is the same on every rank, as plain data."""
        return self.as_dict() | {"groups": {label: one.shared_part() for label, one in self.groups.items()}}

    def own_part(self) -> dict[str, Any]:
        """Return this rank's own state, as plain data."""
        return {"groups": {label: one.own_part() for label, one in self.groups.items()}}

    def digest(self) -> str:
        """Return a short string that is the same on every rank that loads the same state."""
        digest = hashlib.blake2b(digest_size=16)
        for label, one in self.groups.items():
            digest.update(f"{label}\x1f{one.digest()}".encode())
        _digest(digest, self.shared)
        return digest.hexdigest()


def joined(shared: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> Snapshot | Snapshots:
    """Join a `shared_part` and some ranks' `own_part` into a snapshot; raise `CheckpointError` if they are damaged."""
    if "groups" not in shared:
        local = [one.get("local", {}) for one in own]
        return Snapshot.from_dict({**shared, "local": {rank: held for one in local for rank, held in one.items()}})
    groups = {
        label: joined(one, [part.get("groups", {}).get(label, {}) for part in own]).as_dict()
        for label, one in shared["groups"].items()
    }
    return Snapshots.from_dict({**shared, "groups": groups})


def _digest(digest: Any, value: object) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}\x1f{tuple(value.shape)}".encode())
        digest.update(bytes_of(value.cpu()).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, held in value.items():
            digest.update(f"{key!r}\x1f".encode())
            _digest(digest, held)
    elif isinstance(value, (list, tuple)):
        for held in value:
            _digest(digest, held)
    else:
        digest.update(f"{value!r}\x1f".encode())
