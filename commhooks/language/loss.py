"""The part of a gradient that a compressor leaves out, as error feedback, warnings and plans need to know it."""

from __future__ import annotations

import dataclasses
import enum

_LITTLE = 1e-4
"""A squared relative error below this costs no accuracy worth a residual or a warning: bf16's is 1.5e-5."""


class Sends(enum.IntEnum):
    """The requests that a compressor may make, which decide whether a wrapper may cast them."""

    SUMS = 0
    """Sums only, in the dtype of their parts."""
    FIXED = 1
    """Sums only, in a dtype that it chooses."""
    ANYTHING = 2
    """Gathers and exchanges too, which cannot be cast."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """A bound on the part of a parameter's gradient that is left unsent, or added by chance, in a step."""

    error: float
    """The largest |unsent|² / |formed|², or its expectation if it is random."""
    in_another_norm: float | None = dataclasses.field(default=None, kw_only=True)
    """The same error in another norm, such as the largest magnitude's, if that is smaller."""
    unbiased: bool = dataclasses.field(default=False, kw_only=True)
    """True if the mean's expectation, over the random draws, is the mean of the gradients."""
    is_kept: bool = dataclasses.field(default=True, kw_only=True)
    """True if the unsent part is passed to `slot.keep`. False if the mean is right on average, or if the compressor
    keeps the unsent part itself: `ErrorFeedback` then rejects it."""
    damped: bool = dataclasses.field(default=False, kw_only=True)
    """True if a damping factor was set explicitly, so that `ErrorFeedback` accepts contractions of 1 or more."""
    of_bucket: bool = dataclasses.field(default=False, kw_only=True)
    """True if a bucket as a whole has this loss, so that `compress` needs all its slots: `PerParameter` then rejects
    the compressor."""

    @property
    def contraction(self) -> float:
        """The smaller of the two errors.

        Below 1, error feedback eventually sends everything; from 1 on, its residual may grow without bound.
        """
        return self.error if self.in_another_norm is None else min(self.error, self.in_another_norm)

    @property
    def is_worth_keeping(self) -> bool:
        """True if the loss is more than the rounding to a narrower dtype, and passed to `slot.keep`."""
        return self.is_kept and self.error > _LITTLE

    @classmethod
    def worst(cls, *losses: Loss | None) -> Loss | None:
        """Return a loss that is at least as bad as each of several; None stands for none."""
        found = [loss for loss in losses if loss is not None]
        if len(found) < 2:
            return found[0] if found else None
        return cls(
            max(loss.error for loss in found),
            in_another_norm=max(loss.contraction for loss in found),
            unbiased=all(loss.unbiased for loss in found),
            is_kept=all(loss.is_kept for loss in found),
            damped=all(loss.damped or loss.contraction < 1 for loss in found),
            of_bucket=any(loss.of_bucket for loss in found),
        )


def error_of(loss: Loss | None) -> float:
    """Return a loss's error: 0 for None."""
    return 0.0 if loss is None else loss.error
