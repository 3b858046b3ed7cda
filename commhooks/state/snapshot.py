"""The contents of `state_dict()`: plain tensors, numbers, strings, and lists and dictionaries of those.

    format_version  2
    step            steps synchronised before it was taken
    world_size      ranks that trained
    policy          the order of collectives, for the record
    grad_scale      the loss scale that residuals are multiplied by
    settings        of the compressor, each as text
    shapes          of every parameter, by name
    bucket_plan     how parameters were cut into buckets: as handed in, and as ddp_core's DDP takes it up again
    kinds           how each rank's own entries behave, by entry's name: see `Entry`
    replicated      by parameter's name and entry's name: the same on every rank
    local           by "rank<r>", parameter's name and entry's name: each rank's own
    inventory       by "rank<r>", the name of everything in that rank's state, so that what reads it part by part, as
                    torch.distributed.checkpoint does, cannot leave something out unnoticed

Each rank saves only its own part of `local`; `merge_state_dicts` combines the parts of several ranks.

Format 1 had no `kinds`, as residuals were the only per-rank state, and error feedback was a setting of PowerSGD; it is
converted to format 2 when read.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commhooks.errors import CheckpointError, SettingsError
from commhooks.language.compressor import Compressor
from commhooks.language.entries import RESIDUAL, Declared, Entry
from commhooks.state.formats import FORMAT_VERSION, TYPES, entry_of, faults_of, from_format_1, kind_of
from commhooks.state.spread import deal_again, spread
from commhooks.state.table import Entries

_LINES_TO_LIST = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadRules:
    """Which differences between a checkpoint and the run that loads it are allowed."""

    world_size: str = "refuse"
    """For a different world size: "refuse"; "spread", which keeps the sum of the residuals over the ranks, appropriate
    if the learning rate is scaled with their number; "spread-mean", which keeps their mean, appropriate if it is not;
    or "reset", which starts residuals from zero (also if this rank's are not in the checkpoint). Per-rank state of
    served blocks is redistributed; under "spread" it is multiplied by the old number of ranks over the new."""
    settings: str = "refuse"
    """For a compressor with different settings: "refuse", or "change"."""
    missing: str = "refuse"
    """For parameters that only the checkpoint or only the model has, and for local state that the compressor does not
    keep: "refuse", or "reset", which initialises the model's and drops the rest."""

    def __post_init__(self) -> None:
        allowed = {
            "world_size": ("refuse", "spread", "spread-mean", "reset"),
            "settings": ("refuse", "change"),
            "missing": ("refuse", "reset"),
        }
        for name, values in allowed.items():
            value = getattr(self, name)
            if value not in values:
                raise SettingsError(f"{name}={value!r}: {name} must be one of {', '.join(values)}.")

    @property
    def spreads(self) -> bool:
        """Whether a different world size uses the residuals of all ranks, so that each rank must read all of them."""
        return self.world_size in ("spread", "spread-mean")


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
    kinds: dict[str, Entry]
    """The kinds of per-rank entries."""
    replicated: Entries
    local: dict[int, Entries]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        local = {f"rank{rank}": entries for rank, entries in self.local.items()}
        kinds = {name: _described(e) for name, e in self.kinds.items()}
        return {"format_version": FORMAT_VERSION} | fields | {"kinds": kinds, "local": local}

    @classmethod
    def from_dict(cls, state: object) -> Snapshot:
        """Read the result of `as_dict`; raise `CheckpointError`, listing every fault, for anything else."""
        if not isinstance(state, Mapping) or "format_version" not in state:
            raise CheckpointError(f"expected the state_dict() of a hook's state (got {kind_of(state)}).")
        version = state["format_version"]
        if version not in (1, FORMAT_VERSION):
            raise CheckpointError(
                f"the hook's state was saved in format {version!r}; this version of commhooks reads formats 1 to "
                f"{FORMAT_VERSION}."
            )
        if version == 1:
            state = from_format_1(state)
        faults = faults_of(state)
        if faults:
            raise CheckpointError(f"the hook's state is damaged. {_listed(faults)}")
        fields: dict[str, Any] = {name: state[name] for name in TYPES}
        fields["kinds"] = {name: entry_of(described) for name, described in state["kinds"].items()}
        fields["local"] = {int(rank.removeprefix("rank")): entries for rank, entries in state["local"].items()}
        return cls(**fields)

    def cloned(self) -> Snapshot:
        """Return a snapshot whose tensors are copies."""
        local = {rank: _cloned(entries) for rank, entries in self.local.items()}
        return dataclasses.replace(self, replicated=_cloned(self.replicated), local=local)

    def differences(
        self,
        compressor: Compressor,
        shapes: Mapping[str, Sequence[int]],
        declared: Mapping[str, Declared],
        world_size: int,
        rank: int,
        rules: LoadRules,
    ) -> list[str]:
        """List every difference from a run that `rules` do not allow.

        `shapes` are those of the run's parameters by name, as far as they are known; `declared` is what the compressor
        remembers for them.
        """
        found = []
        if rules.settings == "refuse":
            found += _settings_that_differ(self.settings, compressor)
        for name, shape in shapes.items():
            saved = self.shapes.get(name)
            if saved is None and rules.missing == "refuse":
                found.append(
                    f"checkpoint has no parameter {name!r} (saved with {self.settings.get('compressor')}); pass "
                    "missing='reset' to initialise it"
                )
            elif saved is not None and list(saved) != list(shape):
                found.append(f"parameter {name!r}: saved with shape {tuple(saved)}, now {tuple(shape)}")
        if shapes and rules.missing == "refuse":
            found += [
                f"checkpoint has parameter {name!r}, which the model does not have; pass missing='reset' to drop it"
                for name in self.shapes
                if name not in shapes
            ]
        found += self._entries_that_do_not_fit(compressor, declared, rules)
        return found + self._ranks_missing(world_size, rank, rules)

    def entries_for(self, rank: int, world_size: int, rules: LoadRules) -> Entries:
        """Return the per-rank state of `rank` among `world_size` ranks; call it only if `differences` found none."""
        if world_size == self.world_size and rank in self.local:
            return self.local[rank]
        if not rules.spreads:
            return {}
        kept = 1.0 if rules.world_size == "spread" else world_size / self.world_size
        shares = {name: entry for name, entry in self.kinds.items() if entry.kind == "share"}
        sums = spread(self.local, self.world_size, rank, world_size, times=kept, but=shares)
        dealt = deal_again(
            self.local, self.world_size, rank, world_size, shares, times=kept * self.world_size / world_size
        )
        return {name: sums.get(name, {}) | dealt.get(name, {}) for name in {**sums, **dealt}}

    def without_entries_unknown_to(
        self, compressor: Compressor, named: Mapping[str, Tensor], world_size: int
    ) -> Snapshot:
        """Return a copy without per-rank state that a compressor does not keep; residuals wait for one that does."""
        known = {e for name, p in named.items() for e in compressor.state(name, p, world_size)} | {RESIDUAL}
        local = {
            rank: {name: {e: kept[e] for e in kept if e in known} for name, kept in entries.items()}
            for rank, entries in self.local.items()
        }
        return dataclasses.replace(self, local=local)

    def buckets_handed_in(self) -> list[list[str]]:
        """Return the parameter names in the buckets of the last step; empty if they are not known."""
        plan: list[list[str]] = self.bucket_plan.get("handed_in", [])
        return plan

    def digest(self) -> str:
        """Return a short string that is the same on every rank that loads the same state."""
        common = (self.step, self.world_size, self.grad_scale, sorted(self.settings.items()), self.bucket_plan)
        digest = hashlib.blake2b(repr(common).encode(), digest_size=16)
        for name, entries in sorted(self.replicated.items()):
            for entry, tensor in sorted(entries.items()):
                digest.update(f"{name}\x1f{entry}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _entries_that_do_not_fit(
        self, compressor: Compressor, declared: Mapping[str, Declared], rules: LoadRules
    ) -> list[str]:
        """List per-rank state that would otherwise be lost silently."""
        if not declared or rules.missing != "refuse":
            return []
        held = {e for entries in self.local.values() for kept in entries.values() for e in kept}
        known = {e for entries in declared.values() for e in entries} | {RESIDUAL}
        return [
            f"checkpoint has local state {entry!r}, which {type(compressor).__name__} does not keep; pass "
            "missing='reset' to drop it"
            for entry in sorted(held - known)
        ]

    def _ranks_missing(self, world_size: int, rank: int, rules: LoadRules) -> list[str]:
        here = ", ".join(map(str, sorted(self.local))) or "no rank"
        if world_size != self.world_size and rules.world_size == "refuse":
            return [
                f"saved by {self.world_size} ranks, loaded by {world_size}; pass world_size='spread' to keep the sum "
                "of the residuals, 'spread-mean' to keep their mean, or 'reset' to start them from zero"
            ]
        if world_size == self.world_size and rank not in self.local and rules.world_size != "reset":
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


def settings_of(compressor: Compressor, *, only_defaults: bool = False) -> dict[str, str]:
    """Return a compressor's settings as strings, those of what it wraps under "inner.rank" and the like."""
    settings = {} if only_defaults else {"compressor": type(compressor).__name__}
    for field in dataclasses.fields(compressor):  # type: ignore[arg-type]  # every compressor is a dataclass
        value = getattr(compressor, field.name)
        if isinstance(value, Compressor):
            inner = settings_of(value, only_defaults=only_defaults)
            settings |= {f"{field.name}.{name}": text for name, text in inner.items()}
        elif field.compare and not only_defaults:
            settings[field.name] = repr(value)
        elif field.compare and field.default is not dataclasses.MISSING:
            settings[field.name] = repr(field.default)
    return settings


def _described(entry: Entry) -> dict[str, Any]:
    holders = {"holders": entry.holders} if entry.holders > 1 else {}  # not known to files of earlier versions
    return {"kind": entry.kind, "units": entry.power, "block": entry.block, "by_element": entry.by_element} | holders


def _settings_that_differ(saved: Mapping[str, str], compressor: Compressor) -> list[str]:
    """List the settings that differ from the saved ones; a setting that an older file lacks had its default."""
    now = settings_of(compressor)
    then = {**settings_of(compressor, only_defaults=True), **saved}
    found = [
        f"setting {name}: saved with {then.get(name, 'nothing')}, now {now.get(name, 'nothing')}"
        for name in sorted({*saved, *now})
        if then.get(name) != now.get(name)
    ]
    return [*found[:-1], f"{found[-1]}; pass settings='change' to continue with the new ones"] if found else []


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
