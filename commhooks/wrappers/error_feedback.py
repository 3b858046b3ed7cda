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

from torch import Tensor

from commhooks.errors import SettingsError
from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import Context, Exchange, takes_feedback
from commhooks.language.entries import RESIDUAL, Declared, Entry
from commhooks.language.loss import Loss
from commhooks.language.place import Place
from commhooks.language.settings import refusal, setting
from commhooks.language.spelling import Spelling
from commhooks.wrappers.hierarchical import is_hierarchical
from commhooks.wrappers.wrapper import Wrapper


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Wrapper):
    """Error feedback: `inner` gets the gradient plus the residual, and its error is the next residual.

    Each parameter for which `inner` is lossy has a residual. A step whose mean is not finite changes none.
    """

    decay: float = setting(1.0, above=0, most=1)
    """The factor of the residual in the next step. Below 1, residuals fade, and the faded part is lost. If `inner` may
    lose ω times its input (squared norms), this must be below 1/√ω."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.inner, ErrorFeedback):
            raise refusal(self, "inner", "must not be ErrorFeedback itself")
        if not takes_feedback(self.inner):
            why = "this one's mean is right on average, or it remembers by itself what it has not sent"
            raise refusal(self, "inner", f"must leave something unsent; {why}")
        if is_hierarchical(self.inner):
            raise SettingsError(
                f"ErrorFeedback(inner={self.inner!r}): a machine's residual is its ranks' in common; write "
                "Hierarchical(inner=ErrorFeedback(...)) instead."
            )

    def by_name(self, decay: float | None = None) -> Spelling | None:
        """Return the spelling of `inner` with error feedback."""
        return None if decay is not None else self.inner.by_name(self.decay)

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
