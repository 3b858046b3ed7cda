"""Ranks' parts of a saved state: taken apart when it is saved, and read again from wherever they lie.

A state is the part that all ranks share and each rank's own, which has `local` and `inventory` alone. The parts lie in
memory (`merge_state_dicts`), in a folder of files (`contents`, `rank_files`) or in a checkpoint of
torch.distributed.checkpoint (`distributed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from commhooks.errors import CheckpointError
from commhooks.saving.rules import LoadRules
from commhooks.saving.saved import Saved, untitled

Part = Mapping[str, Any]
OWN = ("local", "inventory")


class Source(Protocol):
    """A place where ranks' parts of one state lie."""

    def shared(self) -> Part:
        """Return the part that all ranks share."""
        ...

    def own(self, rank: int) -> Part:
        """Return a rank's own part; raise `CheckpointError` if it is missing, damaged or of another state."""
        ...


def shared_part(state: Part) -> dict[str, Any]:
    """Return what all ranks share of a state, of one channel or several."""
    if "groups" not in state:
        return {**state, **{name: {} for name in OWN}}
    return {**state, "groups": {label: shared_part(one) for label, one in state["groups"].items()}}


def own_part(state: Part) -> dict[str, Any]:
    """Return the ranks' own in a state, of one channel or several."""
    if "groups" not in state:
        return {name: state.get(name, {}) for name in OWN}
    return {"groups": {label: own_part(one) for label, one in state["groups"].items()}}


def joined(shared: Part, own: Iterable[Part]) -> dict[str, Any]:
    """Put a shared part and some ranks' own together."""
    parts = list(own)
    if "groups" not in shared:
        return {**shared, **{name: {k: held for one in parts for k, held in one[name].items()} for name in OWN}}
    groups = {
        label: joined(one, [part["groups"][label] for part in parts if label in part["groups"]])
        for label, one in shared["groups"].items()
    }
    return {**shared, "groups": groups}


def read_parts(source: Source, rank: int, world_size: int, rules: LoadRules) -> tuple[Part, dict[int, Part]]:
    """Return what one of `world_size` ranks needs: the part that all share, and by rank those of the ranks it reads."""
    shared = source.shared()
    first = next(iter(shared.get("groups", {}).values()), shared)
    size = first.get("world_size")
    if type(size) is not int or size < 1:
        raise CheckpointError(f"expected the state of a hook, found one without a number of ranks (got {size!r}).")
    return shared, {number: source.own(number) for number in rules.ranks_to_read(rank, size, world_size)}


def merge_state_dicts(states: Sequence[Part]) -> dict[str, Any]:
    """Combine the state_dict()s of several ranks, taken at the same step, into one.

    Raises `CheckpointError` if they are not from the same step of one run, or if a rank occurs twice.
    """
    if not states:
        raise CheckpointError("merge_state_dicts: expected at least one state_dict().")
    saved = [Saved.from_dict(state) for state in states]
    first, seen = saved[0], dict[str, set[int]]()
    known = first.channels  # ranks that keep other experts have channels of their own, which differ in a number
    for one in saved:
        known = {**one.channels, **known}
        alike = Saved(channels={name: known[name] for name in one.channels}, shared=first.shared)
        names = [sorted(map(untitled, state.channels)) for state in (one, first)]
        if names[0] != names[1] or one.digest() != alike.digest():
            raise CheckpointError(
                f"merge_state_dicts: the states are not from the same step of one run (rank {_ranks(first.ranks)} has "
                f"step {first.step}, rank {_ranks(one.ranks)} step {one.step}, or settings or replicated state differ)."
            )
        for name, channel in one.channels.items():
            if twice := seen.setdefault(name, set()) & channel.local.keys():
                raise CheckpointError(f"merge_state_dicts: rank {_ranks(twice)} occurs twice.")
            seen[name] |= channel.local.keys()
    shared = shared_part(states[0])
    if "groups" in shared:
        groups = {name: of for state in reversed(states) for name, of in shared_part(state)["groups"].items()}
        shared["groups"] = {name: groups[name] for name in known}
    return joined(shared, map(own_part, states))


def _ranks(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
