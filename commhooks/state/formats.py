"""What may be read as a state_dict: its faults, named one by one, and formats of earlier versions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from commhooks.errors import SettingsError
from commhooks.language.entries import RESIDUAL, Entry

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
    """Name every fault in what should be a state_dict of this version's format."""
    faults = [
        f"{name}: expected {kind.__name__}, got {kind_of(state.get(name))}"
        for name, kind in TYPES.items()
        if not isinstance(state.get(name), kind) or isinstance(state.get(name), bool)
    ]
    return faults or _faults_of_fields(state) + _faults_of_entries(state)


def from_format_1(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state_dict of format 1 in this version's format."""
    return dict(state) | {"kinds": {}, "settings": _settings_of_format_1(state.get("settings"))}


def _settings_of_format_1(settings: object) -> object:
    """Return settings as format 2 has them: PowerSGD with error feedback is `ErrorFeedback` around it, with a decay."""
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
            translated |= {f"{owner}compressor": "ErrorFeedback", f"{owner}decay": "1.0"}
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
    known = {*state["kinds"], RESIDUAL}
    for where, entries in parts.items():
        if not isinstance(entries, Mapping):
            faults.append(f"{where}: expected a dictionary, got {kind_of(entries)}")
            continue
        for name, kept in entries.items():
            if name not in state["shapes"]:
                faults.append(f"{where}[{name!r}]: no such parameter among its shapes")
            elif not isinstance(kept, Mapping) or not all(isinstance(tensor, Tensor) for tensor in kept.values()):
                faults.append(f"{where}[{name!r}]: expected a dictionary of tensors")
            elif where != "replicated" and not kept.keys() <= known:
                unknown = ", ".join(sorted(map(repr, kept.keys() - known)))
                faults.append(f"{where}[{name!r}]: nothing says of what kind {unknown} is")
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
    """Return how many elements a residual may have: twice as many for complex ones, as PyTorch's DDP hands them in."""
    if not _is_shape(shape):
        return ()
    elements = torch.Size(shape).numel()  # type: ignore[arg-type]  # "object" is not Iterable: just looked at
    return elements, 2 * elements


def kind_of(value: object) -> str:
    """Return what a value is, for a message."""
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"[:80]
