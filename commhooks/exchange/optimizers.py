"""Pairs of compressor and optimizer that do not suit each other, and settings with which they do.

`tests/commhooks/test_optimizers.py` trains a linear regression with each of these pairs, and with each setting that is
advised here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from commhooks.compressors import DGC, DeMo, Sign, Signum, TwoHop, UnbiasedPowerSGD
from commhooks.compressors.sparse.shared_places import SharedPlaces
from commhooks.language.compressor import Compressor, inner_of
from commhooks.wrappers import ErrorFeedback

_MOST = 10
"""The largest element that the mean may have, in units of a gradient's, if the optimizer has momentum: at a ratio of
1/10 the regression converges with momentum 0.9, at 1/20 it diverges."""

_ADAPTIVE = torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta
"""PyTorch's optimizers that divide by the root of second moments and have no `betas`."""


class _Steps(NamedTuple):
    """The properties of an optimizer that decide which means it tolerates."""

    momentum: float
    """SGD's momentum: above 0, steps are 1/(1 - momentum) times as long. 0 for optimizers that divide by second
    moments, or normalise otherwise: their steps do not grow with the mean."""
    is_adaptive: bool
    """True if it divides by the root of second moments, as Adam does."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> _Steps:
        """Return the largest momentum of any group, and whether any group has second moments."""
        groups = optimizer.param_groups
        if isinstance(optimizer, getattr(torch.optim, "Muon", ())):  # PyTorch 2.8 and older have none
            return cls(0.0, is_adaptive=False)
        if isinstance(optimizer, _ADAPTIVE) or any("betas" in group for group in groups):
            return cls(0.0, is_adaptive=True)
        return cls(max((float(group.get("momentum") or 0) for group in groups), default=0.0), is_adaptive=False)


def unsuited(compressor: Compressor, optimizer: Optimizer, parameters: Iterable[Tensor]) -> str | None:
    """Return the reason why training with these two may diverge or be slow, and the remedy; None if none is known.

    `compressor` is attached to `parameters`.
    """
    reasons = _reasons(compressor, None, _Steps.of(optimizer), list(parameters))
    return next((f"{compressor} with {type(optimizer).__name__}: {reason}" for reason in reasons), None)


def _reasons(
    compressor: Compressor, feedback: ErrorFeedback | None, steps: _Steps, parameters: list[Tensor]
) -> Iterator[str]:
    """Yield a reason for each part of a compressor that does not suit; `feedback` is the wrapper around this part."""
    if steps.momentum > 0:
        yield from _with_momentum(compressor, feedback, steps.momentum, parameters)
    if steps.is_adaptive and feedback and isinstance(compressor, TwoHop) and isinstance(compressor.codec, Sign):
        yield (
            "signs with error feedback give all elements of a block the same second moment, which makes the steps of "
            "most of them too short. Set error_feedback=False."
        )
    around = compressor if isinstance(compressor, ErrorFeedback) else feedback
    for inner in inner_of(compressor):
        yield from _reasons(inner, around, steps, parameters)


def _with_momentum(
    compressor: Compressor, feedback: ErrorFeedback | None, momentum: float, parameters: list[Tensor]
) -> Iterator[str]:
    without = f"give the optimizer a momentum of 0 in place of {momentum:g}"
    if isinstance(compressor, DGC) and compressor.momentum:
        yield (
            f"momentum is applied twice, by both; {without}, or set momentum=0 in DGC, and set ratio to at least 0.01 "
            "if training is unstable even then."
        )
    elif isinstance(compressor, Signum) or (isinstance(compressor, DeMo) and compressor.sign):
        yield f"the mean consists of signs, and momentum adds up {1 / (1 - momentum):.3g} of them; {without}."
    elif isinstance(compressor, SharedPlaces) and _growth(compressor, feedback) > _MOST:
        advice = "" if compressor.unbiased else f", or decay to at most {1 - 1 / _MOST:g}"
        yield (
            f"an element that is sent stands for {_growth(compressor, feedback):.3g} gradients, which is unstable with "
            f"momentum; set ratio to at least {1 / _MOST:g}{advice}, or {without}."
        )
    elif isinstance(compressor, UnbiasedPowerSGD):
        # With rank r, 1 + ω = 1 + (m + 1)/r; it must be at most `_MOST` for the widest matrix.
        widths = [p.numel() // len(p) for p in parameters if p.dim() > 1 and len(p)]
        needed = max((math.ceil((m + 1) / (_MOST - 1)) for m in widths), default=0)
        if needed > compressor.rank:
            yield (
                "its error is many times as large as the gradient, which is unstable with momentum; use powersgd, or a "
                f"rank of at least {needed}, or {without}."
            )


def _growth(compressor: SharedPlaces, feedback: ErrorFeedback | None) -> float:
    """Return the number of gradients that an element of a message stands for."""
    if compressor.unbiased:
        return 1 / compressor.ratio
    if feedback is None:
        return 1.0
    kept = 1 / (1 - feedback.decay) if feedback.decay < 1 else math.inf
    return round(min(1 / compressor.ratio, kept), 6)  # 1 / (1 - 0.9) is above 10
