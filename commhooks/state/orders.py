"""The saved form of bases whose last axis runs over several dimensions of a parameter: one axis for each of them.

In memory, that axis follows the parameter's memory format, which may differ in the next run. So r×(I·kh·kw) is saved as
r×I×kh×kw, whatever the format. Bases saved by earlier versions have one axis, and are loaded unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from commhooks.language.entries import Declared, Entry
from commhooks.state.snapshot import Snapshot
from commhooks.state.table import Entries


def with_an_axis_each(kept: Entries, named: Mapping[str, Tensor], declared: Mapping[str, Declared]) -> Entries:
    """Return replicated entries as they are saved."""
    return {
        name: {
            entry: declared[name][entry].cut(tensor, named[name].shape) if entry in declared.get(name, {}) else tensor
            for entry, tensor in tensors.items()
        }
        for name, tensors in kept.items()
    }


def in_memory_order(
    saved: Snapshot, named: Mapping[str, Tensor], declared: Mapping[str, Sequence[Declared]]
) -> Snapshot:
    """Return a snapshot whose replicated entries have, if possible, the shapes that this run's compressors keep."""
    replicated: Entries = {}
    for name, tensors in saved.replicated.items():
        for entry, tensor in tensors.items():
            known = [entries[entry] for entries in declared.get(name, ()) if entry in entries]
            joined = [each.joined(tensor, named[name].shape) for each in known]
            fitting = [one for one, each in zip(joined, known, strict=True) if tuple(one.shape) == each.shape]
            replicated.setdefault(name, {})[entry] = next(iter([*fitting, *joined]), tensor)
    return dataclasses.replace(saved, replicated=replicated)


def saved_shape(entry: Entry, parameter: Tensor) -> tuple[int, ...]:
    """Return the shape in which a replicated entry is saved."""
    shape = entry.shape or ()
    return (*shape[:-1], *(parameter.shape[d] for d in sorted(entry.along))) if len(entry.along) > 1 else shape


def in_other_formats(parameter: Tensor) -> list[Tensor]:
    """Return tensors like a parameter, without memory, in other memory formats in which it may have been saved."""
    plain = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(parameter.dim())
    return [plain] if channels_last is None else [plain, plain.to(memory_format=channels_last)]
