"""Checks of the tensors to load against the state that this run's compressors keep.

`formats` has checked that the state is well-formed. Without these checks, a tensor that does not match would silently
be set to zero, start from scratch, or spoil every parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.language.entries import CHOICE, Declared, Entry
from commhooks.state.snapshot import LoadRules, Snapshot
from commhooks.state.table import Entries
from commhooks.tensors import all_finite


def misfits(
    snapshot: Snapshot,
    named: Mapping[str, Tensor],
    declared: Mapping[str, Sequence[Declared]],
    world_size: int,
    rules: LoadRules,
) -> list[str]:
    """List every tensor to load that no run can have saved for these parameters, with the expected form.

    `snapshot` must no longer hold the entries that the rules drop. `named` are this run's parameters that are known;
    `declared` are the entries that each compressor that may be in use keeps for them. Entries that none of them
    declares are handed over or wait, and need only be finite.
    """
    found = [] if "compressor" in snapshot.settings else ["settings: expected the name of a 'compressor', found none"]
    loaded = list(_loaded(snapshot, named, world_size, rules))
    are_finite = all(bool(all_finite(on_device)) for on_device in _by_device(part.tensor for part in loaded))
    for part in loaded:
        known = [entries[part.entry] for entries in declared.get(part.name, ()) if part.entry in entries]
        may_change = rules.settings == "change"
        fault = _fault_of_form(part, known, named.get(part.name), may_change=may_change)
        if not fault and not are_finite and not bool(all_finite([part.tensor])):
            odd = int((~torch.isfinite(part.tensor)).sum())
            fault = f"expected finite numbers, found inf or NaN in {odd} of {part.tensor.numel()} elements"
        if fault:
            found.append(f"{part.where}: {fault}")
    return found


def begun_again(
    snapshot: Snapshot, named: Mapping[str, Tensor], declared: Mapping[str, Sequence[Declared]]
) -> list[str]:
    """Name all replicated state whose size differs from the first compressor's: it starts from its first value."""
    found = []
    for name, (entries, *_) in declared.items():
        for entry, tensor in snapshot.replicated.get(name, {}).items():
            if entry in entries and not _has_shape(tensor, entries[entry], named[name]):
                now = _shape_of(entries[entry], named[name])
                found.append(f"{entry!r} of {name!r} (saved with shape {tuple(tensor.shape)}, now {now})")
    return found


class _Part(NamedTuple):
    """A tensor that would be loaded."""

    rank: int | None
    """The rank that owns it; None: all ranks."""
    name: str
    entry: str
    tensor: Tensor

    @property
    def where(self) -> str:
        """Its place in the state, in words."""
        owner = "" if self.rank is None else f" of rank {self.rank}"
        return f"parameter {self.name!r}, entry {self.entry!r}{owner}"


def _loaded(
    snapshot: Snapshot,
    named: Mapping[str, Tensor],
    world_size: int,
    rules: LoadRules,
) -> Iterator[_Part]:
    """Yield the tensors that would be loaded, without those that the rules reset."""
    parts: list[tuple[int | None, Entries]] = [(None, snapshot.replicated)]
    if world_size == snapshot.world_size or rules.world_size not in ("refuse", "reset"):
        parts += snapshot.local.items()
    for rank, entries in parts:
        for name, kept in entries.items():
            if named and name not in named:
                continue  # a difference of its own
            for entry, tensor in kept.items():
                yield _Part(rank, name, entry, tensor)


def _fault_of_form(part: _Part, known: Sequence[Entry], parameter: Tensor | None, *, may_change: bool) -> str:
    """Return the fault in a tensor's shape or dtype, given its possible entries; empty if there is none."""
    tensor, shape = part.tensor, tuple(part.tensor.shape)
    if part.entry == CHOICE and (tensor.numel() != 1 or _is_number(tensor) or int(tensor) < 0):
        return f"expected one whole number of at least 0, found {tensor.dtype} of shape {shape}: {str(tensor)[:80]}"
    if not known:
        return ""
    complexes = [entry.dtype is not None and entry.dtype.is_complex for entry in known]
    if tensor.layout != torch.strided or tensor.is_complex() not in complexes:
        return f"expected a dense tensor of real numbers, found {tensor.dtype}, {tensor.layout}"
    if _is_number(tensor) not in [entry.dtype is None or entry.dtype.is_floating_point for entry in known]:
        return f"expected {'whole' if _is_number(tensor) else 'floating-point'} numbers, found {tensor.dtype}"
    if any(_has_shape(tensor, entry, parameter) for entry in known):
        return ""
    if may_change and not any(entry.by_element for entry in known):
        return ""  # with other settings it has another size, and starts from its first value
    expected = " or ".join(dict.fromkeys(str(_shape_of(entry, parameter)) for entry in known))
    remedy = "" if any(entry.by_element for entry in known) else "; pass settings='change' to start it from scratch"
    return f"expected shape {expected}, found {shape}{remedy}"


def _is_number(tensor: Tensor) -> bool:
    """Return whether the elements are floating-point or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def _has_shape(tensor: Tensor, entry: Entry, parameter: Tensor | None) -> bool:
    if entry.block or (entry.by_element and parameter is None):
        return True  # `formats` compares blocks; they depend on the ranks
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
