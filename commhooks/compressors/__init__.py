"""The registry of compressors: one line for each, so that a name and settings are enough to make one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.compressors.cast import Cast
from commhooks.compressors.noop import NoOp
from commhooks.compressors.powersgd import PowerSGD
from commhooks.errors import SettingsError
from commhooks.language.compressor import Compressor
from commhooks.wrappers import ErrorFeedback, StartAfter, WireDtype

__all__ = ["AllReduceMean", "COMPRESSORS", "Cast", "NoOp", "PowerSGD", "make_compressor"]


def _fp16() -> Compressor:
    return Cast(dtype=torch.float16)


def _bf16() -> Compressor:
    return Cast(dtype=torch.bfloat16)


COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    "all-reduce": AllReduceMean,
    "bf16": _bf16,
    "fp16": _fp16,
    "noop": NoOp,
    "powersgd": PowerSGD,
}


def make_compressor(
    name: str,
    *,
    start_after: int = 0,
    wire: torch.dtype | None = None,
    error_feedback: bool | None = None,
    **settings: Any,
) -> Compressor:
    """Make the compressor called `name` with its `settings`, as `make_compressor("powersgd", rank=4)`.

    `start_after` lets a plain all-reduce run for so many steps first; `wire` casts what is sent; `error_feedback` keeps
    what is not sent for the next step (None: as the compressor does by itself). Raises `SettingsError` (a `ValueError`)
    for a name or a setting that does not exist, or a value that cannot work.
    """
    if name not in COMPRESSORS:
        close = difflib.get_close_matches(name, COMPRESSORS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise SettingsError(f"compressor {name!r} is not known; known are {', '.join(sorted(COMPRESSORS))}.{hint}")
    has_its_own = "error_feedback" in inspect.signature(COMPRESSORS[name]).parameters
    if has_its_own and error_feedback is not None:
        settings["error_feedback"] = error_feedback
    try:
        compressor = COMPRESSORS[name](**settings)
    except TypeError as error:
        raise SettingsError(f"compressor {name!r} does not take these settings, {settings}: {error}") from error
    if error_feedback and not has_its_own:
        compressor = ErrorFeedback(inner=compressor)
    if wire is not None:
        compressor = WireDtype(inner=compressor, dtype=wire)
    return StartAfter(inner=compressor, steps=start_after) if start_after else compressor
