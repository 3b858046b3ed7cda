"""The one check of a saved state against the run that loads it: `misfits`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commhooks.language.compressor import Compressor
from commhooks.language.entries import CHOICE, RESIDUAL, Declared, Entry
from commhooks.saving.form import description_of
from commhooks.saving.rules import LoadRules
from commhooks.saving.run import Stateful, optimizer_class
from commhooks.saving.saved import SavedChannel
from commhooks.saving.settings import settings_that_differ
from commhooks.state.table import Entries, fault_of_order
from commhooks.tensors import all_finite


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a run keeps on one of its ranks, as its compressors declare it."""

    compressor: Compressor
    named: Mapping[str, Tensor]
    """The parameters whose names are known."""
    rank: int
    world_size: int
    now: Mapping[str, Sequence[Declared]]
    """By parameter, the entries of each compressor that may be in use, the current one's first."""
    then: Mapping[str, Sequence[Declared]]
    """The same with the number of ranks that saved the state."""

    def known(self, name: str, entry: str) -> list[Entry]:
        """Return what each compressor declares under a parameter's and an entry's name."""
        return [entries[entry] for entries in self.now.get(name, ()) if entry in entries]

    def kept(self, saved: SavedChannel) -> dict[str, dict[str, Entry]]:
        """Return the entries of each parameter, of the compressor and of those that may take over from it.

        If several use one name for different entries, the current compressor's counts or, if it has none, the saved
        one.
        """
        return {name: self._kept(name, saved.kinds.get(name, {})) for name in self.named}

    def _kept(self, name: str, saved: Declared) -> dict[str, Entry]:
        own: dict[str, Entry] = {}
        each = [then | now for then, now in zip(map(dict, self.then[name]), map(dict, self.now[name]), strict=True)]
        for entries in each[1:]:
            own |= {e: what for e, what in entries.items() if e not in own or _are_alike(saved.get(e), what)}
        return own | each[0]


def misfits(saved: SavedChannel, declared: Declaration, rules: LoadRules) -> list[str]:
    """List, in words, everything in a saved state that the rules do not allow to differ, or that is damaged.

    Nothing that does not match may be loaded: it would silently be set to zero, start from scratch, or spoil every
    parameter. The state has the right form: `SavedChannel.from_dict` has looked at that.
    """
    found = [
        *(settings_that_differ(saved.settings, declared.compressor) if rules.settings == "refuse" else ()),
        *_other_parameters(saved, declared.named, rules),
        *(_other_entries(saved, declared) if rules.missing == "refuse" else ()),
        *_missing_ranks(saved, declared, rules),
    ]
    return found or list(_misfitting_tensors(usable(saved, declared, rules), declared, rules))


def usable(saved: SavedChannel, declared: Declaration, rules: LoadRules) -> SavedChannel:
    """Return the state without per-rank entries that the rules drop, since nobody keeps them as they were saved."""
    if rules.missing == "refuse":
        return saved
    kept = declared.kept(saved)
    return saved.without(lambda name, entry: _misfit(saved, name, entry, kept.get(name, {}), declared.world_size))


def begun_again(saved: SavedChannel, declared: Declaration) -> list[str]:
    """Name all replicated state whose size differs from the first compressor's: it starts from its first value."""
    found = []
    for name, (entries, *_) in declared.now.items():
        for entry, tensor in saved.replicated.get(name, {}).items():
            if entry in entries and not _has_shape(tensor, entries[entry], declared.named[name]):
                now = _shape_of(entries[entry], declared.named[name])
                found.append(f"{entry!r} of {name!r} (saved with shape {tuple(tensor.shape)}, now {now})")
    return found


def other_tensors(what: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names and shapes in which saved tensors differ from those of the run."""
    yield from (f"{what}: checkpoint has no {name!r}" for name in now if name not in saved)
    yield from (f"{what}: checkpoint has {name!r}, which the model does not have" for name in saved if name not in now)
    for name in (name for name in now if name in saved):
        theirs, ours = (tuple(t.shape) if isinstance(t, Tensor) else None for t in (saved[name], now[name]))
        if theirs != ours:
            yield f"{what}: {name!r} was saved with shape {theirs}, now {ours}"


def other_optimizer(
    what: str, saved_class: str | None, saved: Sequence[Mapping[str, Any]], optimizer: Stateful
) -> Iterator[str]:
    """Compare the optimizers' classes, then their parameter groups, whose options must all have been saved."""
    ours = optimizer_class(optimizer)
    if saved_class != ours:
        yield f"{what}: saved from {saved_class}, now {ours}"
        return
    now = getattr(optimizer, "param_groups", None)
    if now is None:  # not tried first: a ZeroRedundancyOptimizer's state_dict raises if nothing was consolidated
        now = optimizer.state_dict().get("param_groups", ())
    if len(saved) != len(now):
        yield f"{what}: saved with {len(saved)} groups of parameters, now {len(now)}"
        return
    for number, (before, here) in enumerate(zip(saved, now, strict=True)):
        options, wanted = (group.keys() - {"params"} for group in (before, here))
        if len(before["params"]) != len(here["params"]) or not wanted <= options:
            yield (
                f"{what}: group {number} was saved with {len(before['params'])} parameters and the options "
                f"{', '.join(sorted(options))}, now {len(here['params'])} and {', '.join(sorted(wanted))}"
            )


# --- parameters, entries and ranks ------------------------------------------------------------------------------------


def _other_parameters(saved: SavedChannel, named: Mapping[str, Tensor], rules: LoadRules) -> Iterator[str]:
    for name, parameter in named.items():
        shape = saved.shapes.get(name)
        if shape is None and rules.missing == "refuse":
            yield (
                f"checkpoint has no parameter {name!r} (saved with {saved.settings.get('compressor')}); pass "
                "missing='reset' to initialise it"
            )
        elif shape is not None and list(shape) != list(parameter.shape):
            yield f"parameter {name!r}: saved with shape {tuple(shape)}, now {tuple(parameter.shape)}"
        elif shape is not None and (fault := fault_of_order(saved.orders, name, parameter)):
            yield fault
    for name in saved.shapes.keys() - named.keys() if named and rules.missing == "refuse" else ():
        yield f"checkpoint has parameter {name!r}, which the model does not have; pass missing='reset' to drop it"


def _other_entries(saved: SavedChannel, declared: Declaration) -> Iterator[str]:
    """Yield per-rank state that would otherwise be lost silently."""
    found: dict[tuple[str, str], list[str]] = {}
    kept = declared.kept(saved)
    for name, entry in sorted({(n, e) for own in saved.local.values() for n, held in own.items() for e in held}):
        if name in kept and (reason := _misfit(saved, name, entry, kept[name], declared.world_size)):
            found.setdefault((entry, reason), []).append(name)
    for (entry, reason), names in found.items():
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        yield (
            f"checkpoint has local state {entry!r}, {reason}; pass missing='reset' to drop it (parameter "
            f"{', '.join(map(repr, names[:4]))}{more})"
        )


def _misfit(saved: SavedChannel, name: str, entry: str, kept: Declared, world_size: int) -> str:
    """Return the reason why a parameter's entry cannot be used as one of those kept; empty if it can.

    A residual that this compressor does not keep waits for one that does. A share is added to the residual; if there is
    none, a warning names it.
    """
    was, now = saved.kinds[name][entry], kept.get(entry)
    if now is None:
        is_taken = entry == RESIDUAL or (was.kind == "share" and world_size % was.holders == 0)
        return "" if is_taken else "which this compressor does not keep"
    if _are_alike(was, now):
        return ""
    return f"saved as {description_of(was)}, which this compressor keeps as {description_of(now)}"


def _are_alike(saved: Entry | None, now: Entry) -> bool:
    return saved is not None and description_of(saved) == description_of(now)


def _missing_ranks(saved: SavedChannel, declared: Declaration, rules: LoadRules) -> Iterator[str]:
    here = ", ".join(map(str, sorted(saved.local))) or "no rank"
    rank, is_same_size = declared.rank, declared.world_size == saved.world_size
    if not is_same_size and rules.world_size == "refuse":
        yield (
            f"saved by {saved.world_size} ranks, loaded by {declared.world_size}; pass world_size='spread' to keep the "
            "sum of the residuals, 'spread-mean' to keep their mean, 'keep' to let each rank keep its own, or 'reset' "
            "to start them from zero"
        )
    if is_same_size and rank not in saved.local and rules.world_size not in ("keep", "reset"):
        yield (
            f"it holds the residuals of rank {here} and this is rank {rank}; save on every rank and load each "
            "rank's own (save_checkpoint does), or pass world_size='reset' to start them from zero"
        )
    wanted = [] if is_same_size or not rules.spreads else [r for r in range(saved.world_size) if r not in saved.local]
    if wanted:
        yield (
            f"it holds the residuals of rank {here}, but spreading them also needs those of rank "
            f"{', '.join(map(str, wanted))} (merge_state_dicts combines several)"
        )


# --- tensors ----------------------------------------------------------------------------------------------------------


def _misfitting_tensors(saved: SavedChannel, declared: Declaration, rules: LoadRules) -> Iterator[str]:
    """Yield every tensor to load that no run can have saved for these parameters, with the expected form.

    Entries that no compressor declares are handed over or wait, and need only be finite.
    """
    if "compressor" not in saved.settings:
        yield "settings: expected the name of a 'compressor', found none"
    loaded = list(_tensors_to_load(saved, declared, rules))
    are_finite = all(bool(all_finite(on_device)) for on_device in _by_device(tensor for *_, tensor in loaded))
    for rank, name, entry, tensor in loaded:
        fault = _fault_of_form(entry, tensor, declared.known(name, entry), declared.named.get(name), rules)
        if not fault and not are_finite and not bool(all_finite([tensor])):
            odd = int((~torch.isfinite(tensor)).sum())
            fault = f"expected finite numbers, found inf or NaN in {odd} of {tensor.numel()} elements"
        if fault:
            yield f"parameter {name!r}, entry {entry!r}{'' if rank is None else f' of rank {rank}'}: {fault}"


def _tensors_to_load(
    saved: SavedChannel, declared: Declaration, rules: LoadRules
) -> Iterator[tuple[int | None, str, str, Tensor]]:
    """Yield owner (None: all ranks), parameter, entry and tensor of what would be loaded; the rules reset the rest."""
    parts: list[tuple[int | None, Entries]] = [(None, saved.replicated)]
    if declared.world_size == saved.world_size or rules.world_size not in ("refuse", "reset"):
        parts += saved.local.items()
    for rank, entries in parts:
        for name, held in entries.items():
            if name in declared.named or not declared.named:
                yield from ((rank, name, entry, tensor) for entry, tensor in held.items())


def _fault_of_form(
    entry: str, tensor: Tensor, known: Sequence[Entry], parameter: Tensor | None, rules: LoadRules
) -> str:
    """Return the fault in a tensor's shape or dtype, given its possible entries; empty if there is none."""
    shape = tuple(tensor.shape)
    if entry == CHOICE and (tensor.numel() != 1 or _is_number(tensor) or int(tensor) < 0):
        return f"expected one whole number of at least 0, found {tensor.dtype} of shape {shape}: {str(tensor)[:80]}"
    if not known:
        return ""
    complexes = [one.dtype is not None and one.dtype.is_complex for one in known]
    if tensor.layout != torch.strided or tensor.is_complex() not in complexes:
        return f"expected a dense tensor of real numbers, found {tensor.dtype}, {tensor.layout}"
    if _is_number(tensor) not in [one.dtype is None or one.dtype.is_floating_point for one in known]:
        return f"expected {'whole' if _is_number(tensor) else 'floating-point'} numbers, found {tensor.dtype}"
    by_element = any(one.by_element for one in known)
    # With other settings an entry has another size, and starts from its first value.
    if any(_has_shape(tensor, one, parameter) for one in known) or (rules.settings == "change" and not by_element):
        return ""
    expected = " or ".join(dict.fromkeys(str(_shape_of(one, parameter)) for one in known))
    remedy = "" if by_element else "; pass settings='change' to start it from scratch"
    return f"expected shape {expected}, found {shape}{remedy}"


def _is_number(tensor: Tensor) -> bool:
    """Return whether the elements are floating-point or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def _has_shape(tensor: Tensor, entry: Entry, parameter: Tensor | None) -> bool:
    if entry.block or (entry.by_element and parameter is None):
        return True  # `SavedChannel.from_dict` compares blocks; they depend on the ranks
    if not entry.by_element:
        return tuple(tensor.shape) == entry.shape
    assert parameter is not None
    sizes = (parameter.numel(), 2 * parameter.numel()) if parameter.is_complex() else (parameter.numel(),)
    return tensor.shape == parameter.shape or (tensor.dim() == 1 and tensor.numel() in sizes)


def _shape_of(entry: Entry, parameter: Tensor | None) -> tuple[int, ...]:
    return tuple(parameter.shape) if entry.shape is None and parameter is not None else entry.shape or ()


def _by_device(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found.values()
