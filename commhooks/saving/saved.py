"""The contents of `state_dict()`: plain tensors, numbers, strings, and lists and dictionaries of those.

    layout          4
    commhooks       the version of commhooks that saved it
    step            number of steps synchronised so far
    world_size      ranks that trained
    policy          the order of collectives, for the record
    grad_scale      the loss scale that residuals are multiplied by
    settings        the compressor's settings, each as text
    shapes          every parameter's shape, by name
    orders          every parameter's dimensions of more than one element, the outermost in memory first, by name
    bucket_plan     the division of parameters into buckets: as handed in, and in the form that ddp_core's DDP loads
    kinds           descriptions of each rank's own entries, by parameter's name and entry's name: see `Entry`
    replicated      by parameter's name and entry's name: the same on every rank
    local           by "rank<r>", parameter's name and entry's name: each rank's own
    inventory       by "rank<r>", the name of everything in that rank's state, and of every setting, so that what reads
                    it part by part, as torch.distributed.checkpoint does, cannot leave something out unnoticed

That is a channel's state, and the state of a handle that has one channel. That of several has `layout`, `commhooks`,
`groups`, which are such states by the channel's name, and `shared`, plain data that are the same on every rank. Each
rank saves only its own part of `local`; `parts` puts ranks' parts together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from commhooks.errors import CheckpointError
from commhooks.language.entries import RESIDUAL, Declared, Entry, blocks_served
from commhooks.saving.form import LAYOUT, STATE, check_layout, description_of, entry_of, faults_of, kind_of
from commhooks.saving.rules import LoadRules
from commhooks.state.spread import deal_again, spread
from commhooks.state.table import Entries, Kinds
from commhooks.tensors import bytes_of
from commhooks.version import VERSION

ONLY = "gradients"
"""The channel of a handle that has one; its state is saved without the name."""
_LINES_TO_LIST = 12


def titled(name: str, kind: str, number: int, of: int) -> str:
    """Return a channel's name in saved state, with the number of the ranks' part of the model if others have others."""
    return f"{name} ({kind} {number} of {of})" if of > 1 else name


def untitled(name: str) -> str:
    """Return the name without that number."""
    return re.sub(r" \((part|shard) \d+ of \d+\)$", "", name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedChannel:
    """The state of one channel at one step, on one or several ranks; the module's docstring describes the fields."""

    step: int
    world_size: int
    policy: str
    grad_scale: float
    settings: dict[str, str]
    shapes: dict[str, list[int]]
    orders: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    bucket_plan: dict[str, Any]
    kinds: Kinds
    """The kinds of per-rank entries."""
    replicated: Entries
    local: dict[int, Entries]
    commhooks: str = VERSION

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, with an inventory; tensors are not copied."""
        state = {"layout": LAYOUT} | vars(self)
        state["kinds"] = {
            name: {entry: description_of(what) for entry, what in entries.items()}
            for name, entries in self.kinds.items()
        }
        state["local"] = {f"rank{rank}": entries for rank, entries in self.local.items()}
        return state | {"inventory": {rank: _inventory(state, rank) for rank in state["local"]}}

    @classmethod
    def from_dict(cls, state: object) -> SavedChannel:
        """Read the result of `as_dict`; raise `CheckpointError`, listing every fault, if it is damaged."""
        state = _of_this_layout(state)
        faults = list(faults_of(state, STATE)) or list(_faults_of_entries(state))
        if faults:
            raise CheckpointError(f"the hook's state is damaged. {listed(faults)}")
        _check_inventory(state)
        fields = {field.name: state[field.name] for field in dataclasses.fields(cls)}
        fields["kinds"] = {
            name: {entry: entry_of(what) for entry, what in entries.items()} for name, entries in state["kinds"].items()
        }
        fields["local"] = {int(rank.removeprefix("rank")): entries for rank, entries in state["local"].items()}
        return cls(**fields)

    def entries_for(self, rank: int, world_size: int, rules: LoadRules) -> Entries:
        """Return the per-rank state of `rank` among `world_size` ranks; call it only if `misfits` found none."""
        if world_size == self.world_size and rank in self.local:
            return self.local[rank]
        if rules.world_size == "keep":  # without what depends on the blocks it serves or the ranks of its machine
            return {
                name: {e: t for e, t in kept.items() if (of := self.kinds[name][e]).kind != "share" and of.holders == 1}
                for name, kept in self.local.get(rank, {}).items()
            }
        if not rules.spreads:
            return {}
        kept = 1.0 if rules.world_size == "spread" else world_size / self.world_size
        sizes = self.world_size, rank, world_size
        sums = spread(self.local, *sizes, self.kinds, times=kept)
        dealt = deal_again(self.local, *sizes, self.kinds, times=kept * self.world_size / world_size)
        return {name: sums.get(name, {}) | dealt.get(name, {}) for name in {**sums, **dealt}}

    def lost_with(self, world_size: int) -> dict[int, float]:
        """Return the norm of the residuals of each rank from `world_size` on whose state is in this one."""
        residuals = {
            rank: [kept[RESIDUAL].double() for kept in self.local[rank].values() if RESIDUAL in kept]
            for rank in range(world_size, self.world_size)
            if rank in self.local
        }
        return {rank: float(sum(float(r.square().sum()) for r in own) ** 0.5) for rank, own in residuals.items()}

    def without(self, is_dropped: Callable[[str, str], object]) -> SavedChannel:
        """Return a copy without the per-rank entries for which a function of parameter's and entry's names is true."""
        kinds = {
            name: {entry: what for entry, what in entries.items() if not is_dropped(name, entry)}
            for name, entries in self.kinds.items()
        }
        local = {
            rank: {name: {entry: kept[entry] for entry in kept if entry in kinds[name]} for name, kept in own.items()}
            for rank, own in self.local.items()
        }
        return dataclasses.replace(self, local=local, kinds=kinds)

    def digest(self) -> str:
        """Return a short string that is the same on every rank that loads the same state."""
        common = (self.step, self.world_size, self.grad_scale, self.settings, self.bucket_plan, self.replicated)
        return _digest_of(common)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """The state of a handle: that of each channel, by name, and what they share."""

    channels: dict[str, SavedChannel]
    shared: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Plain data that are the same on every rank, such as DiLoCo's outer copies."""

    @property
    def step(self) -> str:
        """The step of each channel, as text."""
        return ", ".join(f"{one.step}{f' of {name}' * (name != ONLY)}" for name, one in self.channels.items())

    @property
    def ranks(self) -> set[int]:
        """The ranks whose own state it holds."""
        return {rank for one in self.channels.values() for rank in one.local}

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data; tensors are not copied."""
        groups = {name: one.as_dict() for name, one in self.channels.items()}
        if [*groups] == [ONLY]:
            return groups[ONLY]
        return {"layout": LAYOUT, "commhooks": VERSION, "groups": groups, "shared": self.shared}

    @classmethod
    def from_dict(cls, state: object) -> Saved:
        """Read the result of `as_dict`; raise `CheckpointError` for anything else."""
        state = _of_this_layout(state)
        if "groups" not in state:
            return cls(channels={ONLY: SavedChannel.from_dict(state)})
        faults = list(faults_of(state, {"groups": dict, "shared": dict, ...: Any}))
        if faults:
            raise CheckpointError(f"the hook's state is damaged. {listed(faults)}")
        channels = {}
        for name, saved in state["groups"].items():
            try:
                channels[name] = SavedChannel.from_dict(saved)
            except CheckpointError as error:
                raise CheckpointError(f"{name}: {error}") from error
        return cls(channels=channels, shared=dict(state["shared"]))

    def digest(self) -> str:
        """Return a short string that is the same on every rank that loads the same state."""
        return _digest_of([*((name, one.digest()) for name, one in self.channels.items()), self.shared])


Differences = Callable[[Saved, LoadRules], Sequence[str]]
"""Lists, in words, what the rules do not allow to differ between a state and the run that loads it."""


def read(state: object) -> Saved | CheckpointError:
    """Read a state_dict; return the error if it cannot be read, since the other ranks are waiting for an answer."""
    if isinstance(state, CheckpointError):
        return state
    try:
        return Saved.from_dict(state)
    except CheckpointError as error:
        return error
    except Exception as error:  # whatever damaged data cause
        return CheckpointError(f"the hook's state is damaged ({type(error).__name__}: {error}).")


def refuse(what: str, faults: Sequence[str]) -> CheckpointError:
    """Return the error that lists why something cannot be loaded."""
    return CheckpointError(f"{what}; nothing was loaded. {listed(faults)}")


def listed(faults: Sequence[str]) -> str:
    """Return faults as the end of a message."""
    more = f"; and {len(faults) - _LINES_TO_LIST} more" if len(faults) > _LINES_TO_LIST else ""
    return "; ".join(faults[:_LINES_TO_LIST]) + more + "."


def _of_this_layout(state: object) -> Mapping[str, Any]:
    """Return a hook's state; raise `CheckpointError` for anything else, and for one of another layout."""
    if not isinstance(state, Mapping) or not {"layout", "format_version"} & state.keys():
        raise CheckpointError(f"expected the state_dict() of a hook's state (got {kind_of(state)}).")
    check_layout("the hook's state", state)
    return state


def _faults_of_entries(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong between the parts of a state whose form is right."""
    unknown = "no such parameter among its shapes"
    yield from (f"replicated[{name!r}]: {unknown}" for name in state["replicated"] if name not in state["shapes"])
    kinds = {name: {e: entry_of(what) for e, what in entries.items()} for name, entries in state["kinds"].items()}
    for key, own in state["local"].items():
        number = key.removeprefix("rank")
        if key == number or not number.isdecimal() or int(number) >= state["world_size"]:
            yield f"local[{key!r}]: expected one of rank0 to rank{state['world_size'] - 1}"
            continue
        for name in {**kinds, **own}:
            fault = unknown
            if name in state["shapes"]:
                fault = _fault_of_own(name, kinds.get(name, {}), own.get(name, {}), state, int(number))
            if fault:
                yield f"local[{key!r}][{name!r}]: {fault}"


def _fault_of_own(name: str, kinds: Declared, kept: Mapping[str, Tensor], state: Mapping[str, Any], rank: int) -> str:
    """Return the fault in a rank's own entries for a parameter; empty if there is none."""
    if unknown := kept.keys() - kinds.keys():
        return f"the kind of {', '.join(sorted(map(repr, unknown)))} is not given"
    if lost := kinds.keys() - kept.keys():
        return f"{', '.join(sorted(map(repr, lost)))} is missing"
    faults = (
        _fault_of_size(name, e, kept[e], kinds[e], state["shapes"][name], state["world_size"], rank) for e in kept
    )
    return next(filter(None, faults), "")


def _fault_of_size(
    name: str, entry: str, kept: Tensor, what: Entry, shape: Sequence[int], world_size: int, rank: int
) -> str:
    """Return the fault in the size of a rank's own entry for a parameter of this shape; empty if there is none."""
    if world_size % what.holders:
        return f"{entry!r} is held by {what.holders} ranks together, of {world_size}"
    elements = math.prod(shape)
    sizes = elements, 2 * elements  # PyTorch's DDP passes complex numbers as pairs
    if what.block:
        server, servers = rank // what.holders, world_size // what.holders
        served = [len(blocks_served(name, size // what.block, server, servers)) for size in sizes]
        if tuple(kept.shape) not in [(blocks, what.block) for blocks in served]:
            return f"a share {entry!r} of shape {tuple(kept.shape)}, expected {(served[0], what.block)}"
    if what.by_element and kept.numel() not in sizes:
        return f"a {entry} of shape {tuple(kept.shape)}, expected {tuple(shape)}"
    return ""


def _inventory(state: Mapping[str, Any], rank: str) -> list[str]:
    """List the names of everything in a state_dict that belongs to one rank."""
    parts = {"replicated": state["replicated"], "local": state["local"][rank]}
    held = [f"{part}.{name}.{entry}" for part, entries in parts.items() for name in entries for entry in entries[name]]
    return sorted(held + [f"{part}.{name}" for part in ("settings", "shapes") for name in state[part]])


def _check_inventory(state: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if something that was saved is missing.

    `torch.distributed.checkpoint.load` reads into the tensors of another state_dict, and silently skips everything that
    has no place there.
    """
    inventory = state.get("inventory", {})
    for rank in state["local"].keys() & inventory.keys():
        lost = sorted(set(inventory[rank]) - set(_inventory(state, rank)))
        if lost:
            more = f" and {len(lost) - 8} more" if len(lost) > 8 else ""
            raise CheckpointError(
                f"the state was read without {', '.join(lost[:8])}{more}, which it held when it was saved: it was "
                "edited, or read into a state that had no place for this; read it with commhooks.load_distributed."
            )


def _digest_of(data: object) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in _bytes_in(data):
        digest.update(part)
    return digest.hexdigest()


def _bytes_in(data: object) -> Iterator[bytes]:
    """Yield bytes that are equal for equal plain data, whatever the order in dictionaries."""
    if isinstance(data, Tensor):
        yield f"{data.dtype}\x1f{tuple(data.shape)}".encode()
        yield bytes_of(data.cpu()).numpy().tobytes()
    elif isinstance(data, Mapping):
        for key in sorted(data, key=repr):
            yield f"{key!r}\x1f".encode()
            yield from _bytes_in(data[key])
    elif isinstance(data, (list, tuple)):
        for held in data:
            yield from _bytes_in(held)
    else:
        yield f"{data!r}\x1f".encode()
