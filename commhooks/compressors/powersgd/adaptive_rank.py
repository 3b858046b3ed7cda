"""Adaptive rank: PowerSGD with a rank for each layer.

Source: Markov, Alimohammadi, Frantar, Alistarh, "L-GreCo: Layerwise-Adaptive Gradient Compression", MLSys 2024,
sections 3 and 4; Agarwal, Wang, Lee, Venkataraman, Papailiopoulos, "Accordion: Adaptive Gradient Communication via
Critical Learning Regime Identification", MLSys 2021, algorithm 1.
Idea: PowerSGD's columns are nested, so one step at the highest rank shows the part of each layer that every lower rank
would have sent: another |Qₖ|² for column k, as P is orthonormal. This determines which ranks leave the smallest error
for the bytes of a uniform rank, or need the fewest bytes for its error. "accordion" uses gradient norms instead.
Bytes on the wire: as PowerSGD at the chosen ranks. Two steps in `every` send `max_rank`: the first updates the columns
that were not in use, the second measures. "least-error" counts them in its budget. "accordion" has no such steps, but
sends one extra element per matrix in one step in `every`. Biased: ω is at most PowerSGD's at `min_rank`. Weakness: the
choice is as old as the last measurement, and considers the error of one step, not its correction by error feedback,
with which "fewest-bytes" leaves more than the uniform rank; errors are compared across layers unweighted, which suits
SGD better than Adam; and on a GPU the host waits once in `every` steps, to read the norms.

Legend: M n×m a gradient plus its residual; Q its right factor, r×m; R the highest rank that pays off for a matrix.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from commhooks.compressors.powersgd.allocation import Layer, fewest_bytes, least_error
from commhooks.compressors.powersgd.low_rank import LowRankPlan, planned
from commhooks.compressors.powersgd.matrices import MatrixForm, error_of_rank
from commhooks.compressors.powersgd.powersgd import PowerSGD
from commhooks.language import BucketView, Compressor, Context, Entry, Exchange, Loss, Place, setting
from commhooks.language.entries import CHOICE, Declared, ParameterState
from commhooks.language.settings import refusal
from commhooks.tensors import computing_dtype

Rule = Literal["least-error", "fewest-bytes", "accordion"]
NORMS = "norms"
"""Norms of the rows of the last measured mean Q; for "accordion", gradient norms at the last two measurements."""
STEPS_TO_MEASURE = 2
"""A column that was not in use needs one step to align with the current gradients."""
_MOST_BITS = 15
"""A row is squared as integers, with its largest element scaled to at most 2 to this power."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveRank(Compressor):
    """A compressor that compresses each matrix to its own rank, chosen every `every` steps.

    The matrices of fused experts have one rank.
    It has error feedback, unless it is inside `WithoutFeedback`.
    """

    rank: int = setting(4, least=1)
    """Lower: smaller messages, but more left in the residual. The uniform rank whose bytes are spent, or whose error is
    kept; used as the rank until something is measured and, with "accordion", in stable layers."""
    min_rank: int = setting(2, least=1)
    """Lower: more freedom to choose. At rank 1, the residual may grow for a long time; see `PowerSGD`."""
    max_rank: int = setting(8, least=1)
    """Higher: more freedom to choose, but larger messages in steps that measure."""
    rule: Rule = "least-error"
    """The choice: the smallest error for the bytes of `rank`; the fewest bytes for its error; or `max_rank` for layers
    whose gradient norm changes, and `rank` for the others."""
    every: int = setting(100, least=STEPS_TO_MEASURE + 1)
    """Higher: fewer steps that measure, but older choices."""
    eta: float = setting(0.5, least=0)
    """Higher: "accordion" gives `max_rank` to fewer layers, namely those whose gradient norm has changed by more than
    this fraction."""
    min_compression_rate: float = setting(2.0, above=0)
    """Higher: fewer matrices are compressed, and to lower ranks. The factors are always at least this many times
    smaller than the matrix (at least 1)."""
    seed: int = 0
    """Seeds the first bases, together with the parameter's name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for low, high in (("min_rank", "rank"), ("rank", "max_rank")):
            if getattr(self, high) < getattr(self, low):
                raise refusal(self, high, f"must be an integer of at least {getattr(self, low)}, which is {low}")

    needs_equal_kernels = True  # as PowerSGD

    def may_join_buckets(self, step: int) -> bool:
        """Return True, as PowerSGD."""
        return True

    def state(self, place: Place) -> Declared:
        """Return the entries for the basis of R rows, the chosen rank, and the norms on which the choice is based."""
        form = self._powersgd.paying_form(place.parameter, place.name)
        if form is None:
            return {}
        R = self._highest(form)
        basis = dataclasses.replace(self._powersgd, rank=R).state(place)
        norms = Entry(kind="replicated", shape=(self._measurements(form),), units=1)
        return {**basis, CHOICE: Entry(kind="replicated", shape=(), dtype=torch.int64), NORMS: norms}

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Return PowerSGD's loss at the lowest rank that a layer may get, for a basis that sees the matrix."""
        lowest = self.rank if self.rule == "accordion" else self.min_rank
        form = self._powersgd.paying_form(parameter, name)
        return None if form is None else Loss(error_of_rank(lowest, form.n * form.m))

    def why_whole(self, place: Place) -> str | None:
        """Return how large the factors of PowerSGD at `rank` would be, if that is too large."""
        return self._powersgd.why_whole(place)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Run PowerSGD at the chosen ranks, and measure in the steps for which `measures` is true."""
        plans = planned(bucket, self, lambda level: _Plans(bucket, self._powersgd, self._highest, level))
        matrices = plans.widest.matrices
        measures = self.measures(context.step)
        riders = []
        for slot in [x.home for x in matrices] if measures and self.rule == "accordion" else []:
            # The norm of the gradient alone: the residual would distort it.
            norm = torch.linalg.vector_norm(slot.gradient, dtype=computing_dtype(slot.gradient.dtype))
            riders.append(slot.part(norm.reshape(1)))
        widens = self.rule != "accordion" and context.step % self.every < STEPS_TO_MEASURE
        ranks = [x.r if widens else min(x.r, x.home.choice or self.rank) for x in matrices]
        plan = plans.at(ranks)
        exchanged = yield from self._powersgd.exchange(plan, context, riders)

        if riders:
            measured = [
                (x, torch.cat([x.home.state(NORMS)[1:], norm]))
                for x, norm in zip(matrices, exchanged.riders, strict=True)
            ]
        elif measures:
            factors = zip(plan.groups, exchanged.means, strict=True)
            measured = [
                (x, _norms_of_rows(Q))
                for group, mean in factors
                for x, Q in zip(group.matrices, mean.unflatten(0, (len(group.matrices), -1)), strict=True)
            ]
        else:
            return
        for x, norms in measured:
            x.home.commit(NORMS, norms, exchanged.finite & norms.isfinite().all())

    def measures(self, step: int) -> bool:
        """Return whether norms are measured in a step, so that the next one begins with a choice."""
        return step % self.every == (0 if self.rule == "accordion" else STEPS_TO_MEASURE - 1)

    def choose(self, states: Mapping[Tensor, ParameterState], step: int) -> Mapping[Tensor, int]:
        """Return a rank for each layer, after a step that measured; empty if nothing has been measured yet."""
        if step == 0 or not self.measures(step - 1):
            return {}
        measured: dict[Tensor, tuple[MatrixForm, list[float]]] = {}
        for parameter, state in states.items():
            form = self._powersgd.paying_form(parameter, state.key)
            # A parameter not yet seen has none, and another compressor may have left others.
            if form is not None and NORMS in state.tensors and len(state[NORMS]) == self._measurements(form):
                measured[parameter] = form, state[NORMS].tolist()
        largest = max((norm for _, norms in measured.values() for norm in norms), default=0.0)
        if not largest:
            return {}
        if self.rule == "accordion":
            changed = {p: abs(now - before) > self.eta * before for p, (_, (before, now)) in measured.items()}
            return {parameter: self.max_rank if has else self.rank for parameter, has in changed.items()}
        layers = []
        for form, norms in measured.values():
            ranks = (min(form.n, form.m, rank) for rank in (self.min_rank, self.rank))
            layers.append(Layer([(norm / largest) ** 2 for norm in norms], form.matrices * (form.n + form.m), *ranks))
        chosen = least_error(layers, self._budget(layers)) if self.rule == "least-error" else fewest_bytes(layers)
        return dict(zip(measured, chosen, strict=True))

    @property
    def _powersgd(self) -> PowerSGD:
        """The compressor that decides which matrices are compressed, and exchanges their factors."""
        return PowerSGD(rank=self.rank, min_compression_rate=self.min_compression_rate, seed=self.seed)

    def _budget(self, layers: Sequence[Layer]) -> int:
        """Return the elements that a step may send so that the average, with measuring steps, equals that of `rank`."""
        of_rank = sum(layer.cost * layer.uniform for layer in layers)
        of_measuring = sum(layer.cost * len(layer.gains) for layer in layers)
        left = self.every * of_rank - STEPS_TO_MEASURE * of_measuring
        return max(left // (self.every - STEPS_TO_MEASURE), 0)

    def _highest(self, form: MatrixForm) -> int:
        """Return R, the highest rank at which the factors are still small enough."""
        rate = max(self.min_compression_rate, 1.0)
        return min(form.n, form.m, self.max_rank, math.ceil(form.n * form.m / ((form.n + form.m) * rate)) - 1)

    def _measurements(self, form: MatrixForm) -> int:
        """Return the number of norms remembered for a matrix."""
        return 2 if self.rule == "accordion" else self._highest(form)


class _Plans:
    """A bucket's matrices at their highest ranks, and at the ranks chosen last, each with their own factors."""

    def __init__(
        self, bucket: BucketView, powersgd: PowerSGD, highest: Callable[[MatrixForm], int], level: str | None
    ) -> None:
        self.widest = self._chosen = LowRankPlan.of_slots(bucket, powersgd.paying_form, highest, level)

    def at(self, ranks: Sequence[int]) -> LowRankPlan:
        """Return the matrices at these ranks; they are grouped again when the choice changes."""
        for plan in (self.widest, self._chosen):
            if ranks == [x.r for x in plan.matrices]:
                return plan
        self._chosen = self.widest  # frees the factors of the choice before
        self._chosen = self.widest.at(ranks)
        return self._chosen


def _norms_of_rows(Q: Tensor) -> Tensor:
    """Return the norm of each row, over a stack's matrices k×r×m, with the same bits on every processor.

    All ranks then choose the same. Sums of integers do not depend on their order, and every other operation here but
    the root is correctly rounded. A kernel's root may be off by its last bit. It is rounded to whole units: halves
    between them are further than that from the root of any integer up to 2^48, which no sum here exceeds.
    """
    elements = Q.shape[0] * Q.shape[2]
    units = 1 << min(_MOST_BITS, (48 - (elements - 1).bit_length()) // 2)
    largest = Q.abs().amax(dim=(0, 2))
    whole = (Q / torch.where(largest > 0, largest, 1.0).unsqueeze(1) * units).round().to(torch.int64)
    roots = whole.square().sum(dim=(0, 2)).double().sqrt().round()
    return largest * (roots / units).to(Q.dtype)
