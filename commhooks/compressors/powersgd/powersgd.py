"""PowerSGD: a gradient matrix as the product of two thin ones.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression", NeurIPS 2019, algorithms 1
and 2. The alternating form is that of the authors' own later implementation.
Idea: one step of a power iteration, warm-started from the last one, finds a rank-r basis P of the *mean* gradient,
and the mean's coefficients Q in that basis; both are linear in the gradient, so they are summed on the wire. What a
rank's own factors miss stays in its residual and is added to its next gradient.
Bytes on the wire: (n + m)·r for a matrix n×m; vectors and small matrices ride uncompressed in the first collective.
Weakness: two rounds, the second of which cannot start before the first is done (one if alternating). What ranks owe in
opposite directions is sent only as the basis turns: at rank 1, under one constant direction, such residuals grow.

Legend, as in low_rank.py: M n×m a gradient plus its residual; P r×n and Q r×m its factors, transposed; r the rank.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from commhooks.compressors.powersgd.low_rank import OTHER, LowRankMatrix, LowRankPlan, Side, joint_residual
from commhooks.compressors.powersgd.matrices import MATRIX_RULES, MatrixForm, MatrixRule, form_of, form_of_bucket
from commhooks.compressors.powersgd.precision import in_full
from commhooks.errors import SettingsError
from commhooks.language.compressor import BucketView, Compressor, Context, Exchange, Result, residual_of
from commhooks.language.randomness import seeded_normal, stable_seed
from commhooks.language.requests import AllReduce

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(Compressor):
    """Compress matrices to rank `rank`, with local error feedback and warm start: at most two collectives a bucket.

    A step whose answers hold an inf or a NaN commits nothing, and its mean comes out non-finite on every rank.
    """

    rank: int = 1
    """Lower: smaller messages, more left to the residual."""
    min_compression_rate: float = 2.0
    """Higher: fewer matrices are compressed. One is if its factors are so many times smaller than it (at least 1)."""
    error_feedback: bool = True
    """Off: what was not sent is lost, and the mean is biased."""
    warm_start: bool = True
    """Off: every step starts from a new random basis, and needs more steps to find the same one."""
    epsilon: float = 0.0
    """Higher: directions of a factor with a norm near or below it are damped. Zero columns need none."""
    seed: int = 0
    """Seed of the random bases, with the parameter's name and, without warm start, the step."""
    alternating: bool = False
    """On: a step computes and sends P or Q, in turns: half the products, bytes and collectives, a slower pursuit."""
    iterations: int = 1
    """Higher: so many rounds of both factors a step (of one, if alternating): nearer to the best rank r, more sent."""
    matrices: MatrixRule = "first-dimension"
    """How a gradient is a matrix: the first dimension against the rest; where it is most square; or the whole bucket
    as one nearly square matrix, vectors and all, which is fast and coarse."""
    skip: tuple[str, ...] = ()
    """Names of parameters never to compress, or shell patterns such as "head.*"."""

    def __post_init__(self) -> None:
        _check_count("rank", self.rank)
        _check_count("iterations", self.iterations)
        if not self.min_compression_rate > 0:
            raise SettingsError(
                f"PowerSGD(min_compression_rate={self.min_compression_rate!r}): min_compression_rate must be above 0."
            )
        if not self.epsilon >= 0:
            raise SettingsError(f"PowerSGD(epsilon={self.epsilon!r}): epsilon must be 0 or more.")
        if self.matrices not in MATRIX_RULES:
            raise SettingsError(
                f"PowerSGD(matrices={self.matrices!r}): matrices must be one of {', '.join(MATRIX_RULES)}."
            )
        if not isinstance(self.skip, tuple) or not all(isinstance(name, str) for name in self.skip):
            raise SettingsError(f"PowerSGD(skip={self.skip!r}): skip must be a tuple of names or patterns.")
        if self.skip and self.matrices == "whole-bucket":
            raise SettingsError(
                f"PowerSGD(skip={self.skip!r}): skip must be empty where matrices='whole-bucket', "
                "which has no room for exceptions."
            )

    def check_parameters(self, names: Iterable[str]) -> None:
        """Raise `SettingsError` for a pattern in `skip` that matches no parameter: it is misspelt."""
        known = list(names)
        for pattern in self.skip:
            if not fnmatch.filter(known, pattern):
                shown = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
                raise SettingsError(
                    f"PowerSGD(skip={self.skip!r}): {pattern!r} must fit a parameter's name; there are {shown}. "
                    "(A hook learns names from attach, from PowerSGDState.bind, or from ddp_core's DDP.)"
                )

    def first_steps(self) -> tuple[int, ...]:
        """Return the first step, unless buckets decide which matrices there are."""
        return () if self.matrices == "whole-bucket" else (0,)

    def sides(self, step: int) -> tuple[Side, ...]:
        """Return which factors a step computes and sends, in order."""
        if not self.alternating:
            return ("P", "Q") * self.iterations
        first = step * self.iterations
        return tuple("P" if turn % 2 == 0 else "Q" for turn in range(first, first + self.iterations))

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Exchange the factors in turn, each computed from the last; what is not compressed goes with the first."""
        plan = bucket.plan(self, lambda: self._plan(bucket))
        if not plan.matrices:
            mean = yield AllReduce(bucket.memory, average=True, last=True, layout=bucket.layout)
            return Result(mean)

        sides = self.sides(context.step)
        if self.alternating and self.warm_start:  # all state is made before the first request
            for x in plan.matrices:
                self._basis(x, "P", context)
        checks = []
        for turn, side in enumerate(sides):
            for x in _there_and_back(plan.matrices, turn):
                basis = x.factor(OTHER[side])
                basis.copy_(orthonormal_rows(basis, self.epsilon) if turn else self._basis(x, OTHER[side], context))
                x.multiply(side, again=turn > 0)
            message, is_last = plan.messages[side], turn == len(sides) - 1
            received = yield message.pack(with_rest=turn == 0, last=is_last)
            checks.append(context.all_finite(received))
            if not is_last:  # the last side's factors stay this rank's own: its residual is what they miss
                message.unpack()

        checks.append(plan.fits(sides[0], side))
        finite = torch.stack(checks).all()
        if not _surely(finite):
            message.factors.add_(torch.where(finite, 0.0, torch.nan))  # one bad element spoils the mean, for all to see
        for x, mean in _there_and_back(list(zip(plan.matrices, message.parts, strict=True)), len(sides)):
            sent = _as_sent(x.factor(side), context.wire, context.world_size)
            self._finish(x, side, mean, sent, context, finite)
            if self.warm_start:
                self._keep(x, side, mean, context, finite)
        plan.messages[sides[0]].unpack_rest()
        return Result(bucket.memory)

    def _finish(
        self, x: LowRankMatrix, side: Side, mean: Tensor, sent: Tensor, context: Context, finite: Tensor
    ) -> None:
        """Write the mean, from the last side's `mean` factor, and the residual, from this rank's own factor `sent`."""
        P, Q = (mean, x.Q) if side == "P" else (x.P, mean)
        P = P.t().contiguous()  # n×r, which products of few columns read faster
        P_sent, Q_sent = (sent.t().contiguous(), Q) if side == "P" else (P, sent)
        (P, Q), (P_sent, Q_sent) = in_full(P, Q), in_full(P_sent, Q_sent)  # what they lose nobody would owe
        surely_finite = _surely(finite)
        for block, P_rows, sent_rows in zip(x.blocks, P.split(x.block_rows), P_sent.split(x.block_rows), strict=True):
            if block.residual is not None:
                M = x.form(block, again=True)
                if surely_finite and block.residual.dtype == M.dtype and block.residual.device == M.device:
                    torch.addmm(M, sent_rows, Q_sent, alpha=-1, out=block.residual)
                else:
                    context.commit(block.residual, M.addmm_(sent_rows, Q_sent, alpha=-1), finite)
            x.write_mean(block, torch.mm(P_rows, Q, out=x.room(block)))

    def compresses(self, parameter: Tensor, name: str = "") -> bool:
        """Return whether a parameter's gradient is sent as factors of its own; always False with "whole-bucket"."""
        form = self._form(parameter, name)
        return form is not None and self._pays(form)

    def payload_elements(self, parameter: Tensor, name: str = "", step: int = 0) -> int:
        """Return how many elements a step sends for this parameter (see `sides` for why the step matters)."""
        form = self._form(parameter, name)
        if form is None or not self._pays(form):
            return parameter.numel()
        r = min(form.n, form.m, self.rank)
        return sum(r * (form.n if side == "P" else form.m) for side in self.sides(step))

    def _form(self, parameter: Tensor, name: str) -> MatrixForm | None:
        skipped = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.skip)
        if skipped or self.matrices == "whole-bucket" or not parameter.is_floating_point():
            return None
        return form_of(parameter, self.matrices)

    def _pays(self, form: MatrixForm) -> bool:
        """Return whether a step's factors are more than `min_compression_rate` times smaller than the matrix."""
        n, m = form.n, form.m
        pairs = (len(self.sides(0)) + 1) // 2
        return (n + m) * min(n, m, self.rank) * pairs * max(self.min_compression_rate, 1.0) < n * m

    @property
    def _rides_with(self) -> tuple[Side, ...]:
        """The sides that may be a step's first, which the uncompressed rest rides with."""
        return ("P", "Q") if self.alternating else ("P",)

    def _plan(self, bucket: BucketView) -> LowRankPlan:
        if self.matrices == "whole-bucket":
            return self._plan_of_whole(bucket)
        matrices, rest = [], []
        for slot in bucket.slots:
            form = self._form(slot.parameter, slot.state.key)
            if form is None or not self._pays(form):
                rest.append((slot.state.key, slot.gradient))
                continue
            residual = residual_of(slot) if self.error_feedback else None
            matrices.append(LowRankMatrix(slot.state.key, form, self.rank, slot.gradient, residual, slot.state))
        return LowRankPlan(bucket, matrices, rest, self._rides_with)

    def _plan_of_whole(self, bucket: BucketView) -> LowRankPlan:
        form = form_of_bucket(bucket.memory.numel(), self.rank)
        if not bucket.slots or not self._pays(form):
            return LowRankPlan(bucket, [], [], ())
        key = "+".join(slot.state.key for slot in bucket.slots)  # seeds the basis; the message belongs to all of them
        inside = form.n * form.m
        residual = joint_residual(bucket.slots)[:inside] if self.error_feedback else None
        x = LowRankMatrix(key, form, self.rank, bucket.memory[:inside], residual, bucket.slots[0].state)
        rest = [(key, bucket.memory[inside:])] if inside < bucket.memory.numel() else []
        return LowRankPlan(bucket, [x], rest, self._rides_with, by_parameter=False)

    def _basis(self, x: LowRankMatrix, side: Side, context: Context) -> Tensor:
        """Return the factor to start from: the last step's, or a random one, the same on every rank."""
        name, width = self._name(side), x.m if side == "Q" else x.n
        kept = x.home.replicated.get(name)
        if self.warm_start and kept is not None and kept.shape == (x.r, width) and kept.dtype == x.P.dtype:
            return kept
        what = () if side == "Q" else (side,)
        when = () if self.warm_start else (context.step,)
        seed = stable_seed("powersgd", *what, self.seed, x.key, x.r, width, *when)
        basis = seeded_normal((x.r, width), seed, like=x.P)
        if self.alternating:
            basis = orthonormal_rows(basis).contiguous()
        if self.warm_start:
            x.home.replicated[name] = basis
        return basis

    def _keep(self, x: LowRankMatrix, side: Side, factor: Tensor, context: Context, allowed: Tensor) -> None:
        """Keep a factor for the next step; a row of zeros would never recover, so the old one stays in its place."""
        kept = self._basis(x, side, context)
        largest = factor.abs().amax(dim=1, keepdim=True)  # r×1
        if self.alternating:  # the next product is the last one too, and needs an orthonormal basis
            filled = torch.where(largest > 0, factor, kept)
            context.commit(kept, orthonormal_rows(filled, self.epsilon), allowed)
        else:
            allowed = allowed & (largest > 0)
            if _surely(allowed):
                torch.div(factor, largest, out=kept)
            else:
                context.commit(kept, factor / largest, allowed)

    def _name(self, side: Side) -> str:
        return f"{side} of the bucket" if self.matrices == "whole-bucket" else side


def orthonormal_rows(P: Tensor, epsilon: float = 0.0) -> Tensor:
    """Return a matrix r×n, r ≤ n, with orthonormal rows that span those of `P`.

    Householder QR: nothing is divided by a norm, so zero rows, dependent rows, and rows of 1e-30 or 1e30 all give
    finite orthonormal rows (arbitrary ones where `P` has none to offer), the same wherever `P` is the same.
    """
    basis, triangle = torch.linalg.qr(P.t())  # n×r, r×r
    if epsilon:
        norms = triangle.diagonal().abs()
        basis = basis * (norms / (norms + epsilon))
    rows: Tensor = basis.t()
    return rows


def _as_sent(factor: Tensor, wire: torch.dtype | None, world_size: int) -> Tensor:
    """Return this rank's own factor as the wire rounds it, so that what is rounded away stays in the residual."""
    if wire is None or wire.itemsize >= factor.element_size():
        return factor
    return (factor / world_size).to(wire).to(factor.dtype).mul_(world_size)


def _surely(mask: Tensor) -> bool:
    """Return whether all of a mask is known to hold; always False on a GPU, where finding out would mean waiting."""
    return not mask.is_cuda and bool(mask.all())


def _there_and_back(items: Sequence[Item], turn: int) -> Sequence[Item]:
    """Return the items, reversed every other turn, so that those used last, which are still cached, come first."""
    return items[::-1] if turn % 2 else items


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"PowerSGD({name}={value!r}): {name} must be an integer of at least 1.")
