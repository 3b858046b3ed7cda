"""What `state_dict()` holds: plain tensors, numbers, texts, and lists and dictionaries of those.

    format_version  2
    step            steps synchronised before it was taken
    world_size      ranks that trained
    policy          the order of collectives, for the record
    grad_scale      the loss scale in whose units residuals are
    settings        of the compressor, each as text
    shapes          of every parameter, by name
    bucket_plan     how parameters were cut into buckets: as handed in, and as ddp_core's DDP takes it up again
    kinds           how each rank's own entries behave, by entry's name: see `Entry`
    replicated      by parameter's name and entry's name: the same on every rank
    local           by "rank<r>", parameter's name and entry's name: each rank's own
    inventory       by "rank<r>", the name of everything that belongs to that rank's state: what reads it part by
                    part, as torch.distributed.checkpoint does, is found out if it left something behind

One rank's has its own part of `local` only; `merge_state_dicts` puts several together.

Format 1 had no kinds, for residuals were all that a rank kept for itself, and PowerSGD's error feedback was a setting
of its own; it is read as format 2.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commhooks.errors import CheckpointError, SettingsError
from commhooks.language.compressor import Compressor
from commhooks.language.entries import RESIDUAL, Declared, Entry, blocks_served
from commhooks.state.table import Entries

FORMAT_VERSION = 2

_TYPES: dict[str, type] = {
    "step": int,
    "world_size": int,
    "policy": str,
    "grad_scale": float,
    "settings": dict,
    "shapes": dict,
    "bucket_plan": dict,
    "kinds": dict,
    "replicated": dict,
    "local": dict,
}
_LINES_TO_LIST = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadRules:
    """Which differences between a checkpoint and the run that loads it are allowed."""

    world_size: str = "refuse"
    """For another world size: "refuse"; "spread", which keeps the sum of the residuals over the ranks, right where the
    learning rate is scaled with their number; "spread-mean", which keeps their mean, right where it is not; or
    "reset", which starts residuals from zero (also where this rank's are not in the checkpoint). What ranks hold
    for the blocks that they serve is dealt out anew, and under "spread" times the old number of ranks over the new."""
    settings: str = "refuse"
    """For a compressor with other settings: "refuse", or "change"."""
    missing: str = "refuse"
    """For parameters that only the checkpoint has, or only the model, and for local state that the compressor does not
    keep: "refuse", or "reset", which starts what is the model's from nothing and drops the rest."""

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
        """Whether another world size takes over the residuals of all ranks, so that each rank must read all of them."""
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
    """Of ranks' own entries."""
    replicated: Entries
    local: dict[int, Entries]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        local = {f"rank{rank}": entries for rank, entries in self.local.items()}
        kinds = {name: {"kind": e.kind, "units": e.power, "block": e.block} for name, e in self.kinds.items()}
        return {"format_version": FORMAT_VERSION} | fields | {"kinds": kinds, "local": local}

    @classmethod
    def from_dict(cls, state: object) -> Snapshot:
        """Read what `as_dict` gave; raise `CheckpointError`, naming every fault, if it cannot have been that."""
        if not isinstance(state, Mapping) or "format_version" not in state:
            raise CheckpointError(f"expected the state_dict() of a hook's state (got {_kind_of(state)}).")
        version = state["format_version"]
        if version not in (1, FORMAT_VERSION):
            raise CheckpointError(
                f"the hook's state was saved in format {version!r}; this version of commhooks reads formats 1 to "
                f"{FORMAT_VERSION}."
            )
        if version == 1:
            state = dict(state) | {"kinds": {}, "settings": _settings_of_format_1(state.get("settings"))}
        faults = [
            f"{name}: expected {kind.__name__}, got {_kind_of(state.get(name))}"
            for name, kind in _TYPES.items()
            if not isinstance(state.get(name), kind) or isinstance(state.get(name), bool)
        ]
        if not faults:
            faults = _faults_within(state)
        if faults:
            raise CheckpointError(f"the hook's state is damaged. {_listed(faults)}")
        fields: dict[str, Any] = {name: state[name] for name in _TYPES}
        fields["kinds"] = {name: Entry(**described) for name, described in state["kinds"].items()}
        fields["local"] = {int(rank.removeprefix("rank")): entries for rank, entries in state["local"].items()}
        return cls(**fields)

    def cloned(self) -> Snapshot:
        """Return one whose tensors are copies."""
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

        shapes: of the run's parameters by name, as far as they are known; declared: what the compressor remembers for
        them.
        """
        found = []
        if rules.settings == "refuse":
            found += _settings_that_differ(self.settings, settings_of(compressor))
        for name, shape in shapes.items():
            saved = self.shapes.get(name)
            if saved is None and rules.missing == "refuse":
                found.append(
                    f"checkpoint has no parameter {name!r} (saved with {self.settings.get('compressor')}); pass "
                    "missing='reset' to start it from nothing"
                )
            elif saved is not None and list(saved) != list(shape):
                found.append(f"parameter {name!r}: saved with shape {tuple(saved)}, now {tuple(shape)}")
        if shapes and rules.missing == "refuse":
            found += [
                f"checkpoint has parameter {name!r}, which the model has not; pass missing='reset' to drop it"
                for name in self.shapes
                if name not in shapes
            ]
        found += self._entries_that_do_not_fit(compressor, declared, rules)
        return found + self._ranks_missing(world_size, rank, rules)

    def entries_for(self, rank: int, world_size: int, rules: LoadRules) -> Entries:
        """Return the own state of `rank` among `world_size` ranks; call it only if `differences` found none."""
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
        return {name: sums.get(name, {}) | dealt.get(name, {}) for name in {*sums, *dealt}}

    def without_entries_unknown_to(
        self, compressor: Compressor, named: Mapping[str, Tensor], world_size: int
    ) -> Snapshot:
        """Return one without own state that a compressor does not keep; residuals wait for one that does."""
        known = {e for name, p in named.items() for e in compressor.state(name, p, world_size)} | {RESIDUAL}
        local = {
            rank: {name: {e: kept[e] for e in kept if e in known} for name, kept in entries.items()}
            for rank, entries in self.local.items()
        }
        return dataclasses.replace(self, local=local)

    def buckets_handed_in(self) -> list[list[str]]:
        """Return the names in the buckets of the step before; empty where they are not known."""
        plan: list[list[str]] = self.bucket_plan.get("handed_in", [])
        return plan

    def digest(self) -> str:
        """Return a short text that is the same on every rank that loads the same state."""
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
        """Name own state that would be lost without a word."""
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
                    f"it holds the residuals of rank {here}, and to spread them takes those of rank "
                    f"{', '.join(map(str, wanted))} too (merge_state_dicts puts several together)"
                ]
        return []


def merge_state_dicts(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put the state_dict()s of several ranks, taken at the same step, into one.

    Raises `CheckpointError` if they are not of one step of one run, or one rank comes twice.
    """
    if not states:
        raise CheckpointError("merge_state_dicts: expected at least one state_dict().")
    snapshots = [Snapshot.from_dict(state) for state in states]
    first = snapshots[0]
    local: dict[int, Entries] = {}
    for snapshot in snapshots:
        if snapshot.digest() != first.digest():
            raise CheckpointError(
                f"merge_state_dicts: the states are not of one run's step (rank {_ranks(first)} has step "
                f"{first.step}, rank {_ranks(snapshot)} step {snapshot.step}, or other settings or replicated state)."
            )
        twice = local.keys() & snapshot.local.keys()
        if twice:
            raise CheckpointError(f"merge_state_dicts: rank {', '.join(map(str, sorted(twice)))} comes twice.")
        local |= snapshot.local
    return dataclasses.replace(first, local=local).as_dict()


def spread(
    local: Mapping[int, Entries],
    old_size: int,
    rank: int,
    new_size: int,
    *,
    times: float = 1.0,
    but: Container[str] = (),
) -> Entries:
    """Return the own state of one of `new_size` ranks, so that their sum is `times` that of the `old_size` before.

    Fewer ranks: new rank r takes that of old ranks r, r + new_size, and so on. More: an old rank's is divided among
    the new ranks that have its number modulo `old_size`. Entries named in `but` are left out.
    """
    takers = 1 if new_size <= old_size else len(range(rank % old_size, new_size, old_size))
    givers = range(rank, old_size, new_size) if new_size <= old_size else [rank % old_size]
    sums: Entries = {}
    dtypes: dict[tuple[str, str], torch.dtype] = {}
    for giver in givers:
        for name, entries in local[giver].items():
            own = sums.setdefault(name, {})
            for entry, kept in entries.items():
                if entry in but:
                    continue
                taken = kept.double() * times / takers
                own[entry] = own[entry] + taken if entry in own else taken
                dtypes[name, entry] = kept.dtype
    return {name: {e: total.to(dtypes[name, e]) for e, total in own.items()} for name, own in sums.items()}


def deal_again(
    local: Mapping[int, Entries], old_size: int, rank: int, new_size: int, shares: Container[str], *, times: float
) -> Entries:
    """Return the shares of one of `new_size` ranks: the blocks that it serves now, `times` what they were."""
    dealt: Entries = {}
    for name in {name for entries in local.values() for name in entries}:
        for entry in {e for entries in local.values() for e in entries.get(name, {}) if e in shares}:
            of_ranks = [local[old][name][entry] for old in range(old_size)]  # each [blocks served, block]
            blocks = sum(len(kept) for kept in of_ranks)
            whole = of_ranks[0].new_empty(blocks, of_ranks[0].shape[1])
            for old, kept in enumerate(of_ranks):
                whole[list(blocks_served(name, blocks, old, old_size))] = kept
            served = list(blocks_served(name, blocks, rank, new_size))
            dealt.setdefault(name, {})[entry] = (whole[served].double() * times).to(whole.dtype)
    return dealt


def settings_of(compressor: Compressor) -> dict[str, str]:
    """Return a compressor's settings as texts, those of what it wraps under "inner.rank" and the like."""
    settings = {"compressor": type(compressor).__name__}
    for field in dataclasses.fields(compressor):  # type: ignore[arg-type]  # every compressor is a dataclass
        value = getattr(compressor, field.name)
        if isinstance(value, Compressor):
            settings |= {f"{field.name}.{name}": text for name, text in settings_of(value).items()}
        elif field.compare:
            settings[field.name] = repr(value)
    return settings


def _settings_of_format_1(settings: object) -> object:
    """Return settings as format 2 has them: PowerSGD with error feedback is `ErrorFeedback` around it."""
    if not isinstance(settings, dict):
        return settings
    for key, value in settings.items():
        owner = key.removesuffix("compressor")
        if key.endswith("compressor") and value == "PowerSGD" and f"{owner}error_feedback" in settings:
            feeds_back = settings[f"{owner}error_feedback"] == "True"
            own = {k.removeprefix(owner): v for k, v in settings.items() if k.startswith(owner)}
            rest = {k: v for k, v in settings.items() if owner and not k.startswith(owner)}
            del own["error_feedback"]
            if feeds_back:
                own = {"compressor": "ErrorFeedback", "decay": "1.0"} | {f"inner.{k}": v for k, v in own.items()}
            return rest | {owner + k: v for k, v in own.items()}
    return settings


def _settings_that_differ(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"setting {name}: saved with {saved.get(name, 'nothing')}, now {now.get(name, 'nothing')}"
        for name in sorted({*saved, *now})
        if saved.get(name) != now.get(name)
    ]


def refuse(what: str, faults: Sequence[str]) -> CheckpointError:
    """Return the error that lists why something is not loaded."""
    return CheckpointError(f"{what}; nothing was loaded. {_listed(faults)}")


def _faults_within(state: Mapping[str, Any]) -> list[str]:
    return _faults_of_fields(state) + _faults_of_entries(state)


def _faults_of_fields(state: Mapping[str, Any]) -> list[str]:
    faults = [
        f"shapes[{name!r}]: expected a list of integers" for name, s in state["shapes"].items() if not _is_shape(s)
    ]
    faults += [
        f"settings[{name!r}]: expected a text" for name, v in state["settings"].items() if not isinstance(v, str)
    ]
    if not _is_plan(state["bucket_plan"].get("handed_in", [])):
        faults.append("bucket_plan['handed_in']: expected lists of names")
    if "ddp_core" in state["bucket_plan"] and not _is_ddp_core_plan(state["bucket_plan"]["ddp_core"]):
        faults.append("bucket_plan['ddp_core']: expected what ddp_core's bucket_plan() returns")
    for name, described in state["kinds"].items():
        try:
            Entry(**described)
        except (TypeError, SettingsError) as error:
            faults.append(f"kinds[{name!r}]: {error}")
    if state["step"] < 0 or state["world_size"] < 1 or not 0 < state["grad_scale"] < math.inf:
        faults.append("step, world_size and grad_scale: expected numbers of at least 0, of at least 1, and above 0")
    return faults


def _faults_of_entries(state: Mapping[str, Any]) -> list[str]:
    faults = []
    parts = {"replicated": state["replicated"]}
    for rank, entries in state["local"].items():
        number = str(rank).removeprefix("rank")
        if str(rank) == number or not number.isdecimal() or int(number) >= state["world_size"]:
            faults.append(f"local[{rank!r}]: expected one of rank0 to rank{state['world_size'] - 1}")
        parts[f"local[{rank!r}]"] = entries
    for where, entries in parts.items():
        if not isinstance(entries, Mapping):
            faults.append(f"{where}: expected a dictionary, got {_kind_of(entries)}")
            continue
        for name, kept in entries.items():
            if name not in state["shapes"]:
                faults.append(f"{where}[{name!r}]: no such parameter among its shapes")
            elif not isinstance(kept, Mapping) or not all(isinstance(tensor, Tensor) for tensor in kept.values()):
                faults.append(f"{where}[{name!r}]: expected a dictionary of tensors")
            elif RESIDUAL in kept and kept[RESIDUAL].numel() not in _sizes_of_residual(state["shapes"][name]):
                faults.append(f"{where}[{name!r}]: a residual of shape {tuple(kept[RESIDUAL].shape)}")
    return faults


def _is_shape(shape: object) -> bool:
    return isinstance(shape, (list, tuple)) and all(isinstance(size, int) for size in shape)


def _is_plan(plan: object) -> bool:
    return isinstance(plan, list) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in plan
    )


def _is_ddp_core_plan(plan: object) -> bool:
    return (
        isinstance(plan, Mapping)
        and isinstance(plan.get("rebuilt"), bool)
        and isinstance(plan.get("limits"), list)
        and _is_plan(plan.get("buckets"))
    )


def _sizes_of_residual(shape: object) -> tuple[int, ...]:
    """Return how many elements may be owed: twice the parameter's if those are complex, as PyTorch's DDP has them."""
    if not _is_shape(shape):
        return ()
    elements = torch.Size(shape).numel()  # type: ignore[arg-type]  # "object" is not Iterable: just looked at
    return elements, 2 * elements


def _kind_of(value: object) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"[:80]


def _listed(faults: Sequence[str]) -> str:
    more = f"; and {len(faults) - _LINES_TO_LIST} more" if len(faults) > _LINES_TO_LIST else ""
    return "; ".join(faults[:_LINES_TO_LIST]) + more + "."


def _cloned(entries: Entries) -> Entries:
    return {name: {entry: tensor.clone() for entry, tensor in kept.items()} for name, kept in entries.items()}


def _ranks(snapshot: Snapshot) -> str:
    return ", ".join(map(str, sorted(snapshot.local)))
