"""Error feedback: keep the part of a gradient that a compressor leaves out, and add it to the next gradient.

Source: Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML
2019, algorithm 2. The residual is local: the part that *this* rank did not send, not its distance from the mean.

Weakness: values that are sent late, or in bursts, increase the second moments of optimizers such as Adam, which
shortens their steps (Tang et al., "1-bit Adam", ICML 2021, section 3). With such optimizers, codes such as `Sign` and
`Int4` do better without feedback, `TopK` with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from commhooks.errors import SettingsError
from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import Compressor, Context, Exchange, inner_of, takes_feedback
from commhooks.language.entries import RESIDUAL, Declared, Entry
from commhooks.language.loss import Loss
from commhooks.language.place import Place
from commhooks.language.settings import refusal, setting
from commhooks.language.text import COMPRESSORS, Spelling, is_ours, name_of
from commhooks.wrappers.hierarchical import is_hierarchical
from commhooks.wrappers.wrapper import Wrapper


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Wrapper):
    """Error feedback: `inner` gets the gradient plus the residual, and its error is the next residual.

    It is the only feedback of what it holds: `ErrorFeedback(inner=DeMo(), decay=0.9)` is "demo:decay=0.9".

    Each parameter for which `inner` is lossy has a residual. A step whose mean is not finite changes none.
    """

    decay: float = setting(1.0, above=0, most=1)
    """The factor of the residual in the next step. Below 1, residuals fade, and the faded part is lost. If `inner` may
    lose ω times its input (squared norms), this must be below 1/√ω."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_hierarchical(self.inner):
            raise SettingsError(
                f"ErrorFeedback(inner={self.inner!r}): a machine's residual is its ranks' in common; write "
                "Hierarchical(inner=ErrorFeedback(...)) instead."
            )
        if _holds_feedback(self.inner):
            raise refusal(self, "inner", "must not hold ErrorFeedback itself; write a class, as in PowerSGD(rank=4)")
        if not takes_feedback(self.inner):
            why = "this one's mean is right on average, or it remembers by itself what it has not sent"
            raise refusal(self, "inner", f"must leave something unsent; {why}")

    def by_name(self) -> Spelling | None:
        """Return the spelling of `inner` with the settings of error feedback that differ from its name's."""
        brought, spelling = brought_feedback(self.inner), name_of(self.inner)
        if spelling is None:
            return None
        decay = None if self.decay == (1.0 if brought is None else brought) else self.decay
        if brought is None:
            return spelling.having(error_feedback=True, decay=decay)
        return dataclasses.replace(spelling.having(decay=decay), unsaid=(("error_feedback", True),))

    def takes(self, gradient: Tensor) -> bool:
        """Return whether `inner` takes the gradient and it is dense and real."""
        return self.inner.takes(gradient) and not gradient.is_sparse and gradient.is_floating_point()

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Return `inner`'s loss as a biased one: the part that one step leaves out is sent in a later one."""
        loss = self.inner.loss(name, parameter)
        return None if loss is None else dataclasses.replace(loss, unbiased=False)

    def check(self, named: Mapping[str, Tensor], world_size: int | None) -> None:
        """Raise `SettingsError` if the residual of a parameter would grow without bound."""
        super().check(named, world_size)
        for name, parameter in named.items():
            loss = self.inner.loss(name, parameter)
            if loss is not None and loss.contraction * self.decay**2 >= 1 and not loss.damped:
                error = loss.contraction
                limit = math.floor(1000 / math.sqrt(error)) / 1000
                raise SettingsError(
                    f"ErrorFeedback(inner={self.inner!r}): of parameter {name!r}, inner may lose {error:.3g} times "
                    "what it is given (squared norms), so the residual would grow without bound"
                    + (f"; set decay below {limit:g}, or set a damping factor explicitly." if limit else ".")
                )

    def state(self, place: Place) -> Declared:
        """Return the entries of `inner` and, if it is lossy, the residual, whatever the step."""
        residual = {RESIDUAL: Entry(kind="residual")} if self.inner.loss(place.name, place.parameter) else {}
        return {**residual, **self.inner.state(place)}

    def may_join_buckets(self, step: int) -> bool:
        """Defer to `inner`."""
        return self.inner.may_join_buckets(step)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Run `inner` on the gradient plus the residual."""
        return self.inner.compress(self._with_residuals(bucket), context)

    def scatter(self, bucket: BucketView, context: Context) -> Exchange:
        """Run `inner` on the gradient plus the residual, which each rank keeps for all shards."""
        return self.inner.scatter(self._with_residuals(bucket), context)

    def _with_residuals(self, bucket: BucketView) -> BucketView:
        return bucket.plan(self, lambda: bucket.with_residuals(self._is_lossy, self.decay))

    def _is_lossy(self, slot: Slot) -> bool:
        return self.inner.loss(slot.name, slot.parameter) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithoutFeedback(Wrapper):
    """`inner` without error feedback, as its formula stands: what it does not send is lost."""

    def by_name(self) -> Spelling | None:
        """Return the spelling of `inner` with `error_feedback=False`."""
        spelling = None if brought_feedback(self.inner) is None else name_of(self.inner)
        if spelling is None or not hasattr(self.inner, "server_feedback"):
            return spelling and spelling.having(error_feedback=False)
        # By its name it has no feedback at its server either, unless that is said.
        return spelling.having(error_feedback=False, server_feedback=self.inner.server_feedback or None)


def brought_feedback(compressor: Compressor) -> float | None:
    """Return the decay of the error feedback that belongs to a compressor by its name; None if none does."""
    found = (one for one in COMPRESSORS.values() if one.feeds_back and one.settings_of(compressor) is not None)
    registered = next(found, None)
    return None if registered is None or not takes_feedback(compressor) else registered.decay


def with_feedback(compressor: Compressor) -> Compressor:
    """Return a compressor as it is used: in this package's own, each to which error feedback belongs has it.

    What is inside `ErrorFeedback` and `WithoutFeedback` is returned as it is, and so are users' own classes.
    """
    if isinstance(compressor, ErrorFeedback | WithoutFeedback):
        return compressor
    decay = brought_feedback(compressor)
    if decay is not None:
        return ErrorFeedback(inner=compressor, decay=decay)
    if not is_ours(type(compressor)):
        return compressor
    completed = {name: _completed(value) for name, value in vars(compressor).items()}
    changes = {name: value for name, value in completed.items() if value is not getattr(compressor, name)}
    return dataclasses.replace(compressor, **changes) if changes else compressor  # type: ignore[type-var]  # "Value of type variable": every compressor is a dataclass


def _completed(value: Any) -> Any:
    """Return a setting with error feedback in the compressors that it is or holds; itself, if they have it."""
    if isinstance(value, tuple):
        found = tuple(map(_completed, value))
        return value if all(one is other for one, other in zip(found, value, strict=True)) else found
    return with_feedback(value) if isinstance(value, Compressor) else value


def _holds_feedback(compressor: Compressor) -> bool:
    return isinstance(compressor, ErrorFeedback) or any(map(_holds_feedback, inner_of(compressor)))
