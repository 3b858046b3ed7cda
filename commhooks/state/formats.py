"""Checks of what may be read as a state_dict: its faults, listed one by one, and formats of earlier versions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from commhooks.errors import SettingsError
from commhooks.language.entries import RESIDUAL, Entry, blocks_served

FORMAT_VERSION = 2

TYPES: dict[str, type] = {
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


def faults_of(state: Mapping[str, Any]) -> list[str]:
    """List every fault in what should be a state_dict in this version's format."""
    faults = [
        f"{name}: expected {kind.__name__}, got {kind_of(state.get(name))}"
        for name, kind in TYPES.items()
        if not isinstance(state.get(name), kind) or isinstance(state.get(name), bool)
    ]
    return faults or _faults_of_fields(state) or _faults_of_entries(state)


def entry_of(described: Mapping[str, Any]) -> Entry:
    """Return an entry from its description in `kinds`; if it is not element-wise, its shape is that of each tensor."""
    settings = dict(described)
    by_element = settings.pop("by_element", not settings.get("block"))
    return Entry(**settings, shape=None if by_element or settings.get("block") else ())


def from_format_1(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state_dict of format 1 in this version's format."""
    return dict(state) | {"kinds": {}, "settings": _settings_of_format_1(state.get("settings"))}


def _settings_of_format_1(settings: object) -> object:
    """Return settings as in format 2: PowerSGD with error feedback is `ErrorFeedback` around it."""
    if not isinstance(settings, dict):
        return settings
    feeding_back = {
        key.removesuffix("error_feedback")
        for key, text in settings.items()
        if key.endswith("error_feedback") and text == "True"
    }
    translated = {}
    for key, text in settings.items():
        owner, name = key[: key.rfind(".") + 1], key[key.rfind(".") + 1 :]
        if name != "error_feedback":
            translated[f"{owner}{'inner.' * (owner in feeding_back)}{name}"] = text
        if name == "compressor" and (owner in feeding_back or text == "ErrorFeedback"):
            translated[f"{owner}compressor"] = "ErrorFeedback"
    return translated


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
            entry_of(described)
        except (TypeError, SettingsError) as error:
            faults.append(f"kinds[{name!r}]: {error}")
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
        for name, kept in entries.items():
            fault = _fault_of_parameter(state, rank, name, kept)
            if fault:
                faults.append(f"{where}[{name!r}]: {fault}")
    return faults


def _fault_of_parameter(state: Mapping[str, Any], rank: str | None, name: str, kept: object) -> str:
    """Return the fault in one parameter's state, on one rank if it is that rank's own; empty if there is none."""
    if name not in state["shapes"]:
        return "no such parameter among its shapes"
    if not isinstance(kept, Mapping) or not all(isinstance(tensor, Tensor) for tensor in kept.values()):
        return "expected a dictionary of tensors"
    unknown = kept.keys() - {*state["kinds"], RESIDUAL}
    if rank is not None and unknown:
        return f"the kind of {', '.join(sorted(map(repr, unknown)))} is not given"
    sizes = _sizes_of_residual(state["shapes"][name])
    if RESIDUAL in kept and kept[RESIDUAL].numel() not in sizes:
        return f"a residual of shape {tuple(kept[RESIDUAL].shape)}"
    for entry, tensor in kept.items():
        declared = state["kinds"].get(entry, {})
        block, holders = declared.get("block", 0) if rank is not None else 0, declared.get("holders", 1)
        server, servers = int(rank or 0) // holders, max(1, state["world_size"] // holders)
        served = [blocks_served(name, size // block, server, servers) for size in sizes if block]
        if block and tuple(tensor.shape) not in [(len(blocks), block) for blocks in served]:
            return f"a share {entry!r} of shape {tuple(tensor.shape)}"
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
        and isinstance(plan.get("rebuilt"), bool)
        and isinstance(plan.get("limits"), list)
        and _is_plan(plan.get("buckets"))
    )


def _sizes_of_residual(shape: object) -> tuple[int, ...]:
    """Return the elements a residual may have: twice as many for complex ones, passed as pairs by PyTorch's DDP."""
    if not _is_shape(shape):
        return ()
    elements = torch.Size(shape).numel()  # type: ignore[arg-type]  # "object" is not Iterable: just looked at
    return elements, 2 * elements


def kind_of(value: object) -> str:
    """Describe the type of a value, for a message."""
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"[:80]
