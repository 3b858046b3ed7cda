"""The registry of compressors: one line for each, so that a name and settings are enough to make one."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.compressors.cast import Cast
from commhooks.compressors.codecs import Codec, Int4, Sign
from commhooks.compressors.noop import NoOp
from commhooks.compressors.powersgd import PowerSGD
from commhooks.compressors.top_k import TopK
from commhooks.compressors.two_hop import TwoHop
from commhooks.errors import SettingsError
from commhooks.language.compressor import Compressor
from commhooks.wrappers import ErrorFeedback, StartAfter, WireDtype

__all__ = [
    "AllReduceMean",
    "COMPRESSORS",
    "Cast",
    "Codec",
    "Int4",
    "NoOp",
    "PowerSGD",
    "Sign",
    "TopK",
    "TwoHop",
    "make_compressor",
]


class Registered(NamedTuple):
    """How a compressor of some name is made."""

    make: Callable[..., Compressor]
    feeds_back: bool = False
    """Whether `make_compressor` puts `ErrorFeedback` around it, unless told otherwise."""


def _two_hop(codec: Callable[..., Codec], *, server_feedback: bool = True, **settings: Any) -> Compressor:
    return TwoHop(codec=codec(**settings), server_feedback=server_feedback)


COMPRESSORS: dict[str, Registered] = {
    "all-reduce": Registered(AllReduceMean),
    "bf16": Registered(functools.partial(Cast, dtype=torch.bfloat16)),
    "fp16": Registered(functools.partial(Cast, dtype=torch.float16)),
    "int4": Registered(functools.partial(_two_hop, Int4), feeds_back=True),
    "noop": Registered(NoOp),
    "powersgd": Registered(PowerSGD, feeds_back=True),
    "sign": Registered(functools.partial(_two_hop, Sign), feeds_back=True),
    "top-k": Registered(TopK, feeds_back=True),
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
    what is not sent for the next step (None: where leaving it out would cost accuracy). Raises `SettingsError` (a
    `ValueError`) for a name or a setting that does not exist, or a value that cannot work.
    """
    if name not in COMPRESSORS:
        close = difflib.get_close_matches(name, COMPRESSORS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise SettingsError(f"compressor {name!r} is not known; known are {', '.join(sorted(COMPRESSORS))}.{hint}")
    registered = COMPRESSORS[name]
    try:
        compressor = registered.make(**settings)
    except TypeError as error:
        raise SettingsError(f"compressor {name!r} does not take these settings, {settings}: {error}") from error
    if registered.feeds_back if error_feedback is None else error_feedback:
        compressor = ErrorFeedback(inner=compressor)
    elif isinstance(compressor, TwoHop) and error_feedback is False:
        compressor = TwoHop(codec=compressor.codec, server_feedback=False)
    if wire is not None:
        compressor = WireDtype(inner=compressor, dtype=wire)
    return StartAfter(inner=compressor, steps=start_after) if start_after else compressor
