"""Checks of a state_dict's form: a list of its faults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commhooks import __version__
from commhooks.errors import CheckpointError, SettingsError
from commhooks.language.entries import Entry, blocks_served

LAYOUT = 4
"""The version of the layout; a state of another one is refused."""
VERSION = __version__

TYPES: dict[str, type] = {
    "commhooks": str,
    "step": int,
    "world_size": int,
    "policy": str,
    "grad_scale": float,
    "settings": dict,
    "shapes": dict,
    "orders": dict,
    "bucket_plan": dict,
    "kinds": dict,
    "replicated": dict,
    "local": dict,
}


def refuse_other_layouts(what: str, state: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for anything saved in another layout than this version of commhooks writes."""
    if state.get("layout") != LAYOUT:
        by = f"commhooks {state['commhooks']}" if "commhooks" in state else "an earlier commhooks"
        raise CheckpointError(
            f"{what} was saved in layout {state.get('layout', state.get('format_version'))!r} by {by}; this one "
            f"({VERSION}) reads layout {LAYOUT}. Resume it with the version that saved it."
        )


def faults_of(state: Mapping[str, Any]) -> list[str]:
    """List every fault in the format of a state_dict."""
    faults = [
        f"{name}: expected {kind.__name__}, got {kind_of(state.get(name))}"
        for name, kind in TYPES.items()
        if not isinstance(state.get(name), kind) or isinstance(state.get(name), bool)
    ]
    return faults or _faults_of_fields(state) or _faults_of_entries(state)


def entry_of(described: Mapping[str, Any]) -> Entry:
    """Return the `Entry` of a description; its shape is None if it is element-wise or in blocks, else empty."""
    settings = dict(described)
    by_element = settings.pop("by_element", not settings.get("block"))
    return Entry(**settings, shape=None if by_element or settings.get("block") else ())


def description_of(entry: Entry) -> dict[str, Any]:
    """Return a description of an entry as plain data: its kind, and the fields that differ from their defaults."""
    described: dict[str, Any] = {"kind": entry.kind}
    if entry.power != 1:
        described["units"] = entry.power
    if entry.block:
        described["block"] = entry.block
    elif not entry.by_element:
        described["by_element"] = False
    if entry.holders > 1:
        described["holders"] = entry.holders
    return described


def _faults_of_fields(state: Mapping[str, Any]) -> list[str]:
    faults = [
        f"shapes[{name!r}]: expected a list of integers" for name, s in state["shapes"].items() if not _is_shape(s)
    ]
    faults += [
        f"orders[{name!r}]: expected a list of integers" for name, o in state["orders"].items() if not _is_shape(o)
    ]
    faults += [
        f"settings[{name!r}]: expected a text" for name, v in state["settings"].items() if not isinstance(v, str)
    ]
    if not _is_plan(state["bucket_plan"].get("handed_in", [])):
        faults.append("bucket_plan['handed_in']: expected lists of names")
    if unknown := state["bucket_plan"].keys() - {"handed_in", "ddp_core"}:
        faults.append(
            f"bucket_plan: expected handed_in and ddp_core alone, found {', '.join(sorted(map(repr, unknown)))}"
        )
    if "ddp_core" in state["bucket_plan"] and not _is_ddp_core_plan(state["bucket_plan"]["ddp_core"]):
        faults.append("bucket_plan['ddp_core']: expected what ddp_core's bucket_plan() returns")
    for where, described in _descriptions(state):
        try:
            entry_of(described)
        except (TypeError, ValueError, SettingsError) as error:
            faults.append(f"{where}: {error}")
    if state["step"] < 0 or state["world_size"] < 1 or not 0 < state["grad_scale"] < math.inf:
        faults.append("step, world_size and grad_scale: expected numbers of at least 0, of at least 1, and above 0")
    return faults


def _faults_of_entries(state: Mapping[str, Any]) -> list[str]:
    faults = []
    parts: dict[str, tuple[Any, str | None]] = {"replicated": (state["replicated"], None)}
    for rank, entries in state["local"].items():
        number = str(rank).removeprefix("rank")
        if str(rank) == number or not number.isdecimal() or int(number) >= state["world_size"]:
            faults.append(f"local[{rank!r}]: expected one of rank0 to rank{state['world_size'] - 1}")
            continue
        parts[f"local[{rank!r}]"] = entries, number
    for where, (entries, rank) in parts.items():
        if not isinstance(entries, Mapping):
            faults.append(f"{where}: expected a dictionary, got {kind_of(entries)}")
            continue
        kinds = state["kinds"] if rank is not None else {}
        for name in {**kinds, **entries}:
            fault = _fault_of_parameter(state, rank, name, entries.get(name, {}))
            if fault:
                faults.append(f"{where}[{name!r}]: {fault}")
    return faults


def _descriptions(state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the description of every entry, each with its place in the state."""
    return [
        (f"kinds[{name!r}][{entry!r}]", described)
        for name, entries in state["kinds"].items()
        for entry, described in (entries.items() if isinstance(entries, Mapping) else [("", entries)])
    ]


def _fault_of_parameter(state: Mapping[str, Any], rank: str | None, name: str, kept: object) -> str:
    """Return the fault in one parameter's state, on one rank if it is that rank's own; empty if there is none."""
    if name not in state["shapes"]:
        return "no such parameter among its shapes"
    if not isinstance(kept, Mapping) or not all(isinstance(tensor, Tensor) for tensor in kept.values()):
        return "expected a dictionary of tensors"
    if rank is None:
        return ""
    kinds = state["kinds"].get(name, {})
    unknown, lost = kept.keys() - kinds.keys(), kinds.keys() - kept.keys()
    if unknown:
        return f"the kind of {', '.join(sorted(map(repr, unknown)))} is not given"
    if lost:
        return f"{', '.join(sorted(map(repr, lost)))} is missing"
    shape, size = state["shapes"][name], state["world_size"]
    faults = (fault_of_own(name, shape, e, kept[e], entry_of(kinds[e]), int(rank), size) for e in kept)
    return next(filter(None, faults), "")


def fault_of_own(
    name: str, shape: Sequence[int], entry: str, kept: Tensor, what: Entry, rank: int, world_size: int
) -> str:
    """Return the fault in one of a rank's own entries for a parameter of this shape; empty if there is none."""
    if world_size % what.holders:
        return f"{entry!r} is held by {what.holders} ranks together, of {world_size}"
    sizes = _sizes_of_residual(shape)
    server, servers = rank // what.holders, world_size // what.holders
    served = [len(blocks_served(name, size // what.block, server, servers)) for size in sizes if what.block]
    if what.block and tuple(kept.shape) not in [(blocks, what.block) for blocks in served]:
        return f"a share {entry!r} of shape {tuple(kept.shape)}, expected {(served[0], what.block)}"
    if what.by_element and kept.numel() not in sizes:
        return f"a {entry} of shape {tuple(kept.shape)}, expected {tuple(shape)}"
    return ""


def _is_shape(shape: object) -> bool:
    return isinstance(shape, (list, tuple)) and all(isinstance(size, int) for size in shape)


def _is_plan(plan: object) -> bool:
    return isinstance(plan, list) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names) for names in plan
    )


def _is_ddp_core_plan(plan: object) -> bool:
    return (
        isinstance(plan, Mapping)
        and plan.keys() == {"rebuilt", "limits", "buckets"}
        and isinstance(plan["rebuilt"], bool)
        and isinstance(plan["limits"], list)
        and all(type(limit) is int for limit in plan["limits"])
        and _is_plan(plan.get("buckets"))
    )


def _sizes_of_residual(shape: object) -> tuple[int, ...]:
    """Return the possible sizes of a residual: PyTorch's DDP passes complex numbers as pairs, so twice the elements."""
    if not _is_shape(shape):
        return ()
    elements = torch.Size(shape).numel()  # type: ignore[arg-type]  # "object" is not Iterable: just looked at
    return elements, 2 * elements


def kind_of(value: object) -> str:
    """Describe the type of a value, for a message."""
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"[:80]
