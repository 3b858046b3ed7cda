"""Handover of unsent state from one compressor to the next: in a schedule, by `replace`, or after loading.

Two kinds of entries hold unsent state: residuals, and the errors that a rank keeps for the blocks that it serves
("share"). If the next compressor does not use such an entry, its content is added to the residual that it does use.

A mean is the sum of the ranks' residuals divided by their number, and a share is in units of the mean. So, with W
ranks, W times a share is added to the residual of the rank that serves the blocks. If the h ranks of a machine hold the
share together, W/h times the share is added to the residual of each.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.devices import wait_for_copies
from commhooks.language.bucket import Slot
from commhooks.language.compressor import Compressor
from commhooks.language.entries import RESIDUAL, Entry, blocks_served
from commhooks.state.table import StateTable


class _Unsent(NamedTuple):
    """The content of a parameter's entry that will not be sent."""

    entry: str
    units: str
    fate: str
    norm: float


def hand_over(table: StateTable, compressor: Compressor, phase: int, step: int) -> None:
    """Hand over the content of entries that `compressor` does not use in `step`; warn if some will not be sent.

    Call it between two steps, after the compressor or its phase has changed or state was loaded. `phase` is the first
    step of the phase.
    """
    # What waits for its parameter's name is looked at later.
    table.in_phase = None if table.is_waiting else (compressor, phase)
    unsent: dict[tuple[str, str, str], dict[str, float]] = {}
    for slot in table.slots():
        for entry, units, fate, norm in _hand_over(table, slot, compressor, step):
            unsent.setdefault((entry, units, fate), {})[slot.name] = norm
    for (entry, units, fate), norms in unsent.items():
        names = ", ".join(list(norms)[:8]) + (f" and {len(norms) - 8} more" if len(norms) > 8 else "")
        norm = sum(one**2 for one in norms.values()) ** 0.5
        warnings.warn(
            f"commhooks: {entry!r} of {names} holds what was not sent yet (norm {norm:.3g} on rank {table.rank}, in "
            f"units of the {units}), and from step {step} on no residual in use can take it; it is {fate}.",
            stacklevel=2,
        )


def _hand_over(table: StateTable, slot: Slot, compressor: Compressor, step: int) -> list[_Unsent]:
    """Hand over the content of one parameter's entries; return the content that will not be sent."""
    state = slot.remembered
    owed = {name: e for name, e in state.entries.items() if e.kind in ("residual", "share") and name in state.tensors}
    if not owed:
        return []
    place = table.place(slot.name, slot.parameter)
    declared = compressor.state(place)
    in_use = dict(compressor.state(table.place(slot.name, slot.parameter, step=step)))
    taker = _residual_among(in_use)
    waits = taker is None and RESIDUAL in owed and _are_alike(owed[RESIDUAL], declared.get(RESIDUAL, owed[RESIDUAL]))
    if waits:  # for a later compressor: nobody sends it now, and nobody forgets it
        taker, in_use[RESIDUAL] = RESIDUAL, owed[RESIDUAL]
    left = {name: state.tensors[name] for name in owed if not _are_alike(owed[name], in_use.get(name))}
    for name in left:
        if not _are_alike(owed[name], declared.get(name)):
            del state.tensors[name], state.entries[name]
    wait_for_copies(left.values())
    unsent = []
    for name, kept in left.items():
        if not kept.any():
            continue
        norm = float(torch.linalg.vector_norm(kept, dtype=torch.float64))
        fate = "kept, but not sent" if name in state.tensors else "lost"
        takes = in_use[taker] if taker is not None else None
        # All ranks that share the residual must hold the same of what is owed, in the same units.
        if taker and takes and owed[name].holders % takes.holders == 0 and owed[name].power == takes.power:
            table.lay_out_entries(slot, {taker: takes})
            _add(state.tensors[taker], kept, owed[name], slot.name, table)
            kept.zero_()
            fate = "kept in the residual until a compressor with error feedback takes over" if waits else ""
        if fate and not (waits and any(_residual_among(one.state(place)) for one in table.successors)):
            unsent.append(_Unsent(name, "mean" if owed[name].block else "gradient", fate, norm))
    return unsent


def _add(residual: Tensor, kept: Tensor, entry: Entry, name: str, table: StateTable) -> None:
    """Add the content of a parameter's entry to a residual."""
    wait_for_copies([residual])
    kept = kept.to(residual.device)
    if not entry.block:
        residual.add_(kept.view_as(residual))
        return
    server, servers = table.rank // entry.holders, table.world_size // entry.holders
    blocks = residual.numel() // entry.block
    served = blocks_served(name, blocks, server, servers)
    whole = residual[: blocks * entry.block].view(blocks, entry.block)
    whole[served.start :: served.step].add_(kept, alpha=servers)


def _residual_among(entries: Mapping[str, Entry]) -> str | None:
    """Return the name of the residual, which a schedule may have renamed; None if there is none."""
    names = [name for name, entry in entries.items() if entry.kind == "residual"]
    return RESIDUAL if RESIDUAL in names else next(iter(names), None)


def _are_alike(one: Entry, other: Entry | None) -> bool:
    """Return whether two entries hold the same thing for the same ranks; other fields are not known of loaded state."""
    return other is not None and (one.kind, one.block, one.holders) == (other.kind, other.block, other.holders)
