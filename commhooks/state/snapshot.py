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

Each rank saves only its own part of `local`; `merge_state_dicts` combines the parts of several ranks. A state of any
other layout is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from torch import Tensor

from commhooks.errors import CheckpointError, SettingsError
from commhooks.language.compressor import Compressor
from commhooks.language.entries import RESIDUAL, Declared, Entry
from commhooks.state.formats import (
    LAYOUT,
    TYPES,
    VERSION,
    description_of,
    entry_of,
    faults_of,
    kind_of,
    refuse_other_layouts,
)
from commhooks.state.settings import settings_that_differ
from commhooks.state.spread import deal_again, spread
from commhooks.state.table import Entries, Kinds, fault_of_order
from commhooks.tensors import bytes_of

_LINES_TO_LIST = 12


class LoadOptions(TypedDict, total=False):
    """The fields of `LoadRules`, as keyword arguments of functions that load."""

    world_size: str
    settings: str
    missing: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadRules:
    """The allowed differences between a checkpoint and the run that loads it."""

    world_size: str = "refuse"
    """The rule for a different world size: "refuse"; "spread", which keeps the sum of the residuals over the ranks,
    appropriate if the learning rate is scaled with their number; "spread-mean", which keeps their mean, appropriate if
    it is not; "keep", with which each rank continues with the state of the rank of its number, a rank that has joined
    starts from zero, and a warning gives the norm of the residuals lost with ranks that have left; or "reset", which
    starts residuals from zero (also if this rank's are not in the checkpoint). Per-rank state of served blocks is
    redistributed; under "spread" it is multiplied by the old number of ranks over the new, and under "keep" it starts
    from zero."""
    settings: str = "refuse"
    """The rule for a compressor with different settings: "refuse", or "change"."""
    missing: str = "refuse"
    """The rule for parameters that only the checkpoint or only the model has, and for local state that the compressor
    does not keep: "refuse", or "reset", which initialises the model's and drops the rest."""

    def __post_init__(self) -> None:
        allowed = {
            "world_size": ("refuse", "spread", "spread-mean", "keep", "reset"),
            "settings": ("refuse", "change"),
            "missing": ("refuse", "reset"),
        }
        for name, values in allowed.items():
            value = getattr(self, name)
            if value not in values:
                raise SettingsError(f"{name}={value!r}: {name} must be one of {', '.join(values)}.")

    @property
    def spreads(self) -> bool:
        """True if, with a different world size, each rank needs the residuals of all ranks and must read them."""
        return self.world_size in ("spread", "spread-mean")

    def ranks_to_read(self, rank: int, saved_size: int, world_size: int) -> Sequence[int]:
        """Return the ranks whose own state one of `world_size` ranks reads from a checkpoint of `saved_size` ranks.

        With "keep", rank 0 also reads the state of ranks that have left, to report the loss.
        """
        if saved_size == world_size:
            return [rank]
        if self.world_size == "keep":
            left = range(world_size, saved_size) if rank == 0 else []
            return [*range(rank, min(rank + 1, saved_size)), *left]
        return range(saved_size if self.spreads else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a hook at one step, on one or several ranks; the module's docstring describes the fields."""

    step: int
    world_size: int
    policy: str
    grad_scale: float
    settings: dict[str, str]
    shapes: dict[str, list[int]]
    bucket_plan: dict[str, Any]
    kinds: Kinds
    """The kinds of per-rank entries."""
    replicated: Entries
    local: dict[int, Entries]
    orders: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    commhooks: str = VERSION

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        fields = {name: getattr(self, name) for name in TYPES}
        local = {f"rank{rank}": entries for rank, entries in self.local.items()}
        kinds = {name: _described(entries) for name, entries in self.kinds.items()}
        return {"layout": LAYOUT} | fields | {"kinds": kinds, "local": local}

    @classmethod
    def from_dict(cls, state: object) -> Snapshot:
        """Read the result of `as_dict`; raise `CheckpointError`, listing every fault, if it is damaged."""
        if not isinstance(state, Mapping) or not {"layout", "format_version"} & state.keys():
            raise CheckpointError(f"expected the state_dict() of a hook's state (got {kind_of(state)}).")
        refuse_other_layouts("the hook's state", state)
        faults = faults_of(state)
        if faults:
            raise CheckpointError(f"the hook's state is damaged. {_listed(faults)}")
        fields: dict[str, Any] = {name: state[name] for name in TYPES}
        fields["kinds"] = {name: _entries_of(described) for name, described in state["kinds"].items()}
        fields["local"] = {int(rank.removeprefix("rank")): entries for rank, entries in state["local"].items()}
        return cls(**fields)

    def shared_part(self) -> dict[str, Any]:
        """Return the state that is the same on every rank, as plain data."""
        return self.as_dict() | {"local": {}}

    def own_part(self) -> dict[str, Any]:
        """Return the ranks' own state, as plain data."""
        return {"local": self.as_dict()["local"]}

    def cloned(self) -> Snapshot:
        """Return a snapshot whose tensors are copies."""
        local = {rank: _cloned(entries) for rank, entries in self.local.items()}
        return dataclasses.replace(self, replicated=_cloned(self.replicated), local=local)

    def differences(
        self,
        compressor: Compressor,
        named: Mapping[str, Tensor],
        declared: Mapping[str, Declared],
        world_size: int,
        rank: int,
        rules: LoadRules,
    ) -> list[str]:
        """List every difference from a run that `rules` do not allow.

        `named` are the run's known parameters; `declared` are the compressor's entries for them.
        """
        found = []
        if rules.settings == "refuse":
            found += settings_that_differ(self.settings, compressor)
        for name, parameter in named.items():
            saved, shape = self.shapes.get(name), parameter.shape
            if saved is None and rules.missing == "refuse":
                found.append(
                    f"checkpoint has no parameter {name!r} (saved with {self.settings.get('compressor')}); pass "
                    "missing='reset' to initialise it"
                )
            elif saved is not None and list(saved) != list(shape):
                found.append(f"parameter {name!r}: saved with shape {tuple(saved)}, now {tuple(shape)}")
            elif saved is not None and (fault := fault_of_order(self.orders, name, parameter)):
                found.append(fault)
        if named and rules.missing == "refuse":
            found += [
                f"checkpoint has parameter {name!r}, which the model does not have; pass missing='reset' to drop it"
                for name in self.shapes
                if name not in named
            ]
        found += self._entries_that_do_not_fit(declared, world_size, rules)
        return found + self._ranks_missing(world_size, rank, rules)

    def entries_for(self, rank: int, world_size: int, rules: LoadRules) -> Entries:
        """Return the per-rank state of `rank` among `world_size` ranks; call it only if `differences` found none."""
        if world_size == self.world_size and rank in self.local:
            return self.local[rank]
        if rules.world_size == "keep":
            return self._apart_from_shares(rank)
        if not rules.spreads:
            return {}
        kept = 1.0 if rules.world_size == "spread" else world_size / self.world_size
        sizes = self.world_size, rank, world_size
        sums = spread(self.local, *sizes, self.kinds, times=kept)
        dealt = deal_again(self.local, *sizes, self.kinds, times=kept * self.world_size / world_size)
        return {name: sums.get(name, {}) | dealt.get(name, {}) for name in {**sums, **dealt}}

    def lost_with(self, world_size: int) -> dict[int, float]:
        """Return the norm of the residuals of each rank from `world_size` on whose state is in this snapshot."""
        residuals = {
            rank: [kept[RESIDUAL].double() for kept in self.local[rank].values() if RESIDUAL in kept]
            for rank in range(world_size, self.world_size)
            if rank in self.local
        }
        return {rank: float(sum(float(r.square().sum()) for r in own) ** 0.5) for rank, own in residuals.items()}

    def _apart_from_shares(self, rank: int) -> Entries:
        """Return a rank's state without entries that depend on the blocks it serves or the ranks of its machine."""
        return {
            name: {e: t for e, t in kept.items() if (of := self.kinds[name][e]).kind != "share" and of.holders == 1}
            for name, kept in self.local.get(rank, {}).items()
        }

    def without_entries_not_in(self, declared: Mapping[str, Declared], world_size: int) -> Snapshot:
        """Return a copy without per-rank entries that cannot be used as `declared` by `world_size` ranks."""
        local = {
            rank: {
                name: {e: kept[e] for e in kept if not self._misfit(name, e, declared.get(name, {}), world_size)}
                for name, kept in entries.items()
            }
            for rank, entries in self.local.items()
        }
        kept = {name: {e for entries in local.values() for e in entries.get(name, {})} for name in self.kinds}
        kinds = {name: {e: what for e, what in own.items() if e in kept[name]} for name, own in self.kinds.items()}
        return dataclasses.replace(self, local=local, kinds=kinds)

    def buckets_handed_in(self) -> list[list[str]]:
        """Return the names of the parameters in each bucket of the last step; empty if not known."""
        plan: list[list[str]] = self.bucket_plan.get("handed_in", [])
        return plan

    def digest(self) -> str:
        """Return a short string that is the same on every rank that loads the same state."""
        common = (self.step, self.world_size, self.grad_scale, sorted(self.settings.items()), self.bucket_plan)
        digest = hashlib.blake2b(repr(common).encode(), digest_size=16)
        for name, entries in sorted(self.replicated.items()):
            for entry, tensor in sorted(entries.items()):
                digest.update(f"{name}\x1f{entry}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}".encode())
                digest.update(bytes_of(tensor.cpu()).numpy().tobytes())
        return digest.hexdigest()

    def _entries_that_do_not_fit(
        self, declared: Mapping[str, Declared], world_size: int, rules: LoadRules
    ) -> list[str]:
        """List per-rank state that would otherwise be lost silently."""
        found: dict[tuple[str, str], list[str]] = {}
        for name, entry in sorted({(n, e) for own in self.local.values() for n, kept in own.items() for e in kept}):
            if name in declared:
                reason = self._misfit(name, entry, declared.get(name, {}), world_size)
                found.setdefault((entry, reason), []).append(name)
        return [
            f"checkpoint has local state {entry!r}, {reason}; pass missing='reset' to drop it (parameter "
            f"{', '.join(map(repr, names[:4]))}{f' and {len(names) - 4} more' * (len(names) > 4)})"
            for (entry, reason), names in found.items()
            if reason and rules.missing == "refuse"
        ]

    def _misfit(self, name: str, entry: str, declared: Declared, world_size: int) -> str:
        """Return the reason why a parameter's entry cannot be used as the declared one; empty if it can.

        A residual that this compressor does not keep waits for one that does. A share is added to the residual; if
        there is none, a warning names it.
        """
        saved, now = self.kinds.get(name, {}).get(entry), declared.get(entry)
        assert saved is not None, "from_dict takes no entry without its kind"
        if now is None:
            is_taken = entry == RESIDUAL or (saved.kind == "share" and world_size % saved.holders == 0)
            return "" if is_taken else "which this compressor does not keep"
        then, as_declared = description_of(saved), description_of(now)
        return f"saved as {then}, which this compressor keeps as {as_declared}" if then != as_declared else ""

    def _ranks_missing(self, world_size: int, rank: int, rules: LoadRules) -> list[str]:
        here = ", ".join(map(str, sorted(self.local))) or "no rank"
        if world_size != self.world_size and rules.world_size == "refuse":
            return [
                f"saved by {self.world_size} ranks, loaded by {world_size}; pass world_size='spread' to keep the sum "
                "of the residuals, 'spread-mean' to keep their mean, 'keep' to let each rank keep its own, or 'reset' "
                "to start them from zero"
            ]
        if world_size == self.world_size and rank not in self.local and rules.world_size not in ("keep", "reset"):
            return [
                f"it holds the residuals of rank {here} and this is rank {rank}; save on every rank and load each "
                "rank's own (save_checkpoint does), or pass world_size='reset' to start them from zero"
            ]
        if world_size != self.world_size and rules.spreads:
            wanted = [old for old in range(self.world_size) if old not in self.local]
            if wanted:
                return [
                    f"it holds the residuals of rank {here}, but spreading them also needs those of rank "
                    f"{', '.join(map(str, wanted))} (merge_state_dicts combines several)"
                ]
        return []


def merge_state_dicts(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the state_dict()s of several ranks, taken at the same step, into one.

    Raises `CheckpointError` if they are not from the same step of one run, or if a rank occurs twice.
    """
    if not states:
        raise CheckpointError("merge_state_dicts: expected at least one state_dict().")
    snapshots = [Snapshot.from_dict(state) for state in states]
    first = snapshots[0]
    local: dict[int, Entries] = {}
    for snapshot in snapshots:
        if snapshot.digest() != first.digest():
            raise CheckpointError(
                f"merge_state_dicts: the states are not from the same step of one run (rank {_ranks(first)} has step "
                f"{first.step}, rank {_ranks(snapshot)} step {snapshot.step}, or settings or replicated state differ)."
            )
        twice = local.keys() & snapshot.local.keys()
        if twice:
            raise CheckpointError(f"merge_state_dicts: rank {', '.join(map(str, sorted(twice)))} occurs twice.")
        local |= snapshot.local
    return dataclasses.replace(first, local=local).as_dict()


def _described(entries: Mapping[str, Entry]) -> dict[str, Any]:
    return {name: description_of(entry) for name, entry in entries.items()}


def _entries_of(described: Mapping[str, Mapping[str, Any]]) -> dict[str, Entry]:
    return {name: entry_of(one) for name, one in described.items()}


def refuse(what: str, faults: Sequence[str]) -> CheckpointError:
    """Return the error that lists why something cannot be loaded."""
    return CheckpointError(f"{what}; nothing was loaded. {_listed(faults)}")


def _listed(faults: Sequence[str]) -> str:
    more = f"; and {len(faults) - _LINES_TO_LIST} more" if len(faults) > _LINES_TO_LIST else ""
    return "; ".join(faults[:_LINES_TO_LIST]) + more + "."


def _cloned(entries: Entries) -> Entries:
    return {name: {entry: tensor.clone() for entry, tensor in kept.items()} for name, kept in entries.items()}


def _ranks(snapshot: Snapshot) -> str:
    return ", ".join(map(str, sorted(snapshot.local)))
