"""PowerSGD: a gradient matrix as the product of two thin ones.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression", NeurIPS 2019, algorithms 1 and
2. The alternating form is from the authors' own later implementation.
Idea: one step of a power iteration, warm-started from the last one, finds a rank-r basis P of the *mean* gradient, and
the mean's coefficients Q in that basis; both are linear in the gradient, so they can be summed on the wire. The part
that a rank's own factors miss stays in its residual and is added to its next gradient.
Bytes on the wire: (n + m)·r for a matrix n×m, and for each of the k matrices of fused experts k×n×m; vectors and small
matrices are sent uncompressed with the first collective. Weakness: two rounds, the second of which cannot start before
the first is done (one if alternating). Residuals that point in opposite directions on different ranks are sent only as
the basis rotates: at rank 1, under one constant direction, such residuals grow. A warm-started basis can lose sight of
a matrix (see blind_rows.py).
Range: products overflow before their factors' product does. No mean overflows if |M| ≤ L/(4·√m) on every rank, in the
Frobenius norm, with L the largest number of the computing dtype; beyond that, all ranks see an inf.

Legend, as in low_rank.py: M n×m a gradient plus its residual; P r×n and Q r×m its factors, transposed; r the rank.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from commhooks.compressors.powersgd.blind_rows import is_due
from commhooks.compressors.powersgd.low_rank import (
    OTHER,
    LowRankGroup,
    LowRankMatrix,
    LowRankPlan,
    Side,
    keep_scaled,
    planned,
)
from commhooks.compressors.powersgd.matrices import (
    MatrixForm,
    MatrixRule,
    OfMatrices,
    error_of_rank,
    form_of,
    form_of_bucket,
    stack_of,
)
from commhooks.compressors.powersgd.orthonormal import orthonormal_rows, set_orthonormal
from commhooks.errors import SettingsError
from commhooks.language import BucketView, Context, Entry, Exchange, Loss, Place, setting
from commhooks.language.entries import Declared
from commhooks.language.memory import commit_all, surely
from commhooks.language.randomness import seeded_normal, stable_seed
from commhooks.language.requests import AllReduce, Asked, Judge, Layout, Part
from commhooks.language.settings import refusal
from commhooks.native import low_rank as native


class Exchanged(NamedTuple):
    """The result of exchanging factors."""

    finite: Tensor
    """The verdict."""
    means: Sequence[Tensor]
    """The mean of the last side's factors, for each group of matrices."""
    riders: Sequence[Tensor]
    """The means of the riders."""


Exchanging = Generator[Asked, Any, Exchanged]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(OfMatrices):
    """A compressor that compresses matrices to rank `rank`, with warm start: two collectives per bucket.

    It has error feedback, unless it is inside `WithoutFeedback`.

    A step whose answers hold an inf or a NaN commits nothing, and its mean is non-finite on every rank.
    """

    rank: int = setting(1, least=1)
    """Lower: smaller messages, but more left in the residual."""
    min_compression_rate: float = setting(2.0, above=0)
    """Higher: fewer matrices are compressed: only those whose factors are this many times smaller (at least 1)."""
    warm_start: bool = True
    """False: every step starts from a new random basis, and needs more steps to find the same one."""
    epsilon: float = setting(0.0, least=0)
    """Higher: directions of a factor with a norm near or below it are damped. Zero columns need no damping."""
    seed: int = 0
    """Seeds the random bases, together with the parameter's name and, without warm start, the step."""
    alternating: bool = False
    """True: each step computes and sends P or Q, in turns: half the products, bytes and collectives, but slower
    convergence."""
    iterations: int = setting(1, least=1)
    """Higher: this many rounds of both factors per step (of one, if alternating): closer to the best rank r, but more
    sent."""
    matrices: MatrixRule = "stacked"
    """The matrix of a gradient: the first dimension against the rest, "stacked" where a matrix for each index of the
    leading dimensions makes smaller factors, as for fused experts; "first-dimension" always, as PyTorch's hook; as
    square as possible; or the whole bucket as one nearly square matrix, vectors included, which is fast but coarse."""
    stacked: tuple[str, ...] = ()
    """Names of parameters, or shell patterns such as "*.experts.*", whose last two dimensions are matrices with a basis
    each, even where that sends more than the first dimension against the rest."""
    skip: tuple[str, ...] = ()
    """Names of parameters that are never compressed, or shell patterns such as "head.*"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting_of_names in ("stacked", "skip"):
            patterns = getattr(self, setting_of_names)
            if not isinstance(patterns, tuple) or not all(isinstance(name, str) for name in patterns):
                raise refusal(self, setting_of_names, "must be a tuple of names or patterns")
            if patterns and self.matrices == "whole-bucket":
                why = "must be empty if matrices='whole-bucket', which has no room for exceptions"
                raise refusal(self, setting_of_names, why)

    needs_equal_kernels = True  # each rank orthogonalizes P, and multiplies it with Q

    def check(self, named: Mapping[str, Tensor], world_size: int | None) -> None:
        """Raise `SettingsError` for a pattern that matches no parameter, or stacks none: it is misspelt."""
        known = list(named)
        for given, pattern in [("skip", one) for one in self.skip] + [("stacked", one) for one in self.stacked]:
            found = fnmatch.filter(known, pattern)
            written = f"PowerSGD({given}={getattr(self, given)!r}): {pattern!r}"
            if not found:
                shown = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
                raise SettingsError(
                    f"{written} must match a parameter's name; there are {shown}. "
                    "(A hook learns names from attach, from PowerSGDState.bind, or from ddp_core's DDP.)"
                )
            if given == "stacked" and not any(stack_of(named[name]) for name in found):
                raise SettingsError(
                    f"{written} must match a parameter of three or more dimensions, the last two of which lie together "
                    f"in memory; {found[0]!r} has the shape {tuple(named[found[0]].shape)}."
                )

    def may_join_buckets(self, step: int) -> bool:
        """Return True, unless the bucket is the matrix."""
        return self.matrices != "whole-bucket"

    def state(self, place: Place) -> Declared:
        """Return the entries for the bases of the next step, r×width, of the parameter's or its bucket's matrix.

        A stack has a basis for each of its matrices, k×r×width.
        """
        if not self.warm_start:
            return {}
        if self.matrices == "whole-bucket" and place.bucket is not None:
            whole = form_of_bucket(place.bucket.elements, self.rank)
            return self._declared(_key_of(place.bucket), whole) if self.pays(whole) else {}
        form = self.paying_form(place.parameter, place.name)
        return {} if form is None else self._declared(place.name, form)

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Return the largest error of the best rank-r basis, that of a square matrix, if the gradient is compressed.

        It bounds the error only with a basis that sees the matrix, which a power iteration finds in some steps. Until
        then the error may be as large as the gradient: for example, after gradients have moved to other rows and
        columns.
        """
        if self.matrices == "whole-bucket":
            return Loss(error_of_rank(self.rank, parameter.numel()), of_bucket=True)
        form = self.paying_form(parameter, name)
        return None if form is None else Loss(error_of_rank(self.rank, form.n * form.m))

    @property
    def exempt(self) -> Mapping[str, str]:
        """Name the law of buckets, if all of a bucket is one matrix."""
        return {"buckets": "all of a bucket is one matrix"} if self.matrices == "whole-bucket" else {}

    def sides(self, step: int) -> tuple[Side, ...]:
        """Return the factors that a step computes and sends, in order."""
        if not self.alternating:
            return ("P", "Q") * self.iterations
        first = step * self.iterations
        return tuple("P" if turn % 2 == 0 else "Q" for turn in range(first, first + self.iterations))

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Average the bucket's matrices through their factors, and the rest uncompressed."""
        yield from self.exchange(planned(bucket, self, lambda level: self._plan(bucket, level)), context)

    def exchange(self, plan: LowRankPlan, context: Context, riders: Sequence[Part] = ()) -> Exchanging:
        """Exchange the factors in turn, each computed from the last; uncompressed parts go with the first.

        The plan's matrices may have other ranks than `rank`, up to the rows of their bases. `riders` are averaged too.
        """
        if not plan.matrices:
            answers = yield AllReduce(*plan.rest.parts(), average=True, last=True)
            plan.rest.write(answers)
            finite = yield Judge(*answers)
            return Exchanged(finite, [], [])

        sides = self.sides(context.step)
        received: list[Tensor] = []
        means: list[Tensor] = []
        for turn, side in enumerate(sides):
            other = OTHER[side]
            if turn:
                set_orthonormal(plan.factors(other), means, self.epsilon, plan.level)
            else:
                self._set_first(plan, other, context)
            # Other bases do not stay blind: cold ones are redrawn, and alternating ones are made orthonormal.
            if turn == 0 and self.warm_start and not self.alternating and is_due(context.step):
                plan.multiply_and_compare(stable_seed("powersgd", "probe", self.seed, context.step))
            else:
                plan.multiply(side, turn)
            rest = [] if turn else [*plan.rest.parts(), *riders]
            last = turn == len(sides) - 1  # the last side's factors stay this rank's own: what they miss is unsent
            answers = yield AllReduce(*(group.parts[side] for group in plan.groups), *rest, average=True, last=last)
            means = answers[: len(plan.groups)]
            received += means
            if not turn:
                uncompressed = answers[len(plan.groups) :]
                first_rider = len(uncompressed) - len(riders)
                means_of_rest, means_of_riders = uncompressed[:first_rider], uncompressed[first_rider:]

        finite = yield Judge(*received, *means_of_rest, *plan.largest(side, means))
        if not surely(finite):  # one bad element makes the whole mean non-finite, on every rank
            one = finite.to(means[0].dtype)
            torch._foreach_mul_(means, one / one)  # 1, or 0/0
        plan.finish(side, means, len(sides), context, finite)
        if self.warm_start:
            self._keep(plan, side, means, finite)
        plan.rest.write(means_of_rest)
        return Exchanged(finite, means, means_of_riders)

    def compresses(self, parameter: Tensor, name: str = "") -> bool:
        """Return whether a parameter's gradient is sent as its own factors; always False with "whole-bucket"."""
        return self.paying_form(parameter, name) is not None

    def payload_elements(self, parameter: Tensor, name: str = "", step: int = 0) -> int:
        """Return the number of elements that a step sends for a parameter (see `sides` for why the step matters)."""
        form = self.paying_form(parameter, name)
        if form is None:
            return parameter.numel()
        r = min(form.n, form.m, self.rank) * form.matrices
        return sum(r * (form.n if side == "P" else form.m) for side in self.sides(step))

    def matrix(self, parameter: Tensor, name: str) -> MatrixForm | None:
        """Return the form in which a parameter's gradient is a matrix; None for a vector, and if it is skipped."""
        if self.matrices == "whole-bucket" or not parameter.is_floating_point() or _matches(name, self.skip):
            return None
        stack = stack_of(parameter) if _matches(name, self.stacked) else None
        return stack or form_of(parameter, self.matrices)

    def sent(self, form: MatrixForm) -> int:
        """Return the number of elements of the factors that a step sends of a matrix; of both if it alternates."""
        pairs = (len(self.sides(0)) + 1) // 2
        return (form.n + form.m) * min(form.n, form.m, self.rank) * pairs

    def _plan(self, bucket: BucketView, level: str | None) -> LowRankPlan:
        if self.matrices == "whole-bucket":
            return self._plan_of_whole(bucket, level)
        return LowRankPlan.of_slots(bucket, self.paying_form, lambda form: self.rank, level)

    def _plan_of_whole(self, bucket: BucketView, level: str | None) -> LowRankPlan:
        form = form_of_bucket(bucket.memory.numel(), self.rank)
        if not bucket.slots or not self.pays(form):
            return LowRankPlan([], bucket.tiles, level)
        (whole,) = bucket.tiles
        r = min(form.n, form.m, self.rank)
        x = LowRankMatrix(_key_of(bucket.layout), form, r, whole, bucket.slots[0], layout=bucket.layout)
        return LowRankPlan([x], whole.rest(form.n * form.m), level)

    def _declared(self, key: str, form: MatrixForm) -> Declared:
        """Return the entries for the bases that are kept: the last step's Q, and also P if steps alternate."""
        r = min(form.n, form.m, self.rank)
        widths: dict[Side, int] = {"Q": form.m, "P": form.n} if self.alternating else {"Q": form.m}
        return {
            self._name(side): Entry(
                kind="replicated",
                shape=(r, width) if form.stack is None else (form.stack, r, width),
                init=functools.partial(self._random_basis, key, side),
            )
            for side, width in widths.items()
        }

    def _set_first(self, plan: LowRankPlan, side: Side, context: Context) -> None:
        """Set one side's factors to the bases that the step starts from, the same on every rank.

        They are the last step's or, without warm start, random ones.
        """
        places = [place for group in plan.groups for place in group.places[side]]
        if self.warm_start:
            bases = [basis for group in plan.groups for basis in self._kept(group, side)]
        else:
            # A single matrix has no dimension of matrices when it is drawn.
            drawn = zip([x for group in plan.groups for x in group.matrices], places, strict=True)
            bases = [
                self._random_basis(x.key, side, place if x.form.matrices > 1 else place[0], context.step).view_as(place)
                for x, place in drawn
            ]
        torch._foreach_copy_(places, bases)

    def _kept(self, group: LowRankGroup, side: Side) -> list[Tensor]:
        """Return the memory of each matrix's or stack's bases, k×r×width, only the rows in use."""
        name, r = self._name(side), group.r
        bases = [x.home.state(name) for x in group.matrices]
        if bases[0].dim() == 2:
            bases = [basis.unsqueeze(0) for basis in bases]
        return bases if bases[0].shape[1] == r else [basis[:, :r] for basis in bases]

    def _random_basis(self, key: str, side: Side, like: Tensor, *when: int) -> Tensor:
        what = () if side == "Q" else (side,)
        seed = stable_seed("powersgd", *what, self.seed, key, *like.shape, *when)
        basis = seeded_normal(tuple(like.shape), seed, like)
        return orthonormal_rows(basis).contiguous() if self.alternating else basis

    def _keep(self, plan: LowRankPlan, side: Side, means: Sequence[Tensor], finite: Tensor) -> None:
        """Keep the means of the last factors as the bases of the next step.

        Rows are scaled to a largest magnitude of 1. A row of zeros would never recover, so the old one stays.
        """
        if plan.rows is not None and not self.alternating:
            bases_of_all = [basis for group in plan.groups for basis in self._kept(group, side)]
            keep_scaled(
                bases_of_all, means, plan.rows, plan.matrices[0].home.scratch.permits_each(bases_of_all, finite)
            )
            return
        if plan.level is not None:
            if surely(finite):
                kept_of_all = [self._kept(group, side) for group in plan.groups]
                native.keep_scaled(plan.level, kept_of_all, means)
                if self.alternating:
                    bases_of_all = [basis for kept in kept_of_all for basis in kept]
                    set_orthonormal(bases_of_all, bases_of_all, self.epsilon, plan.level)
            return
        for group, mean in zip(plan.groups, means, strict=True):
            kept = self._kept(group, side)
            largest = mean.abs().amax(dim=-1, keepdim=True)  # r×1
            bases = torch.where(largest > 0, mean / largest, torch.cat(kept))
            if self.alternating:  # the next product is also the last one, and needs an orthonormal basis
                bases = orthonormal_rows(bases, self.epsilon)
            bases = bases.unflatten(0, (len(kept), -1))
            commit_all(kept, bases, group.matrices[0].home.scratch.permits_each(kept, finite))

    def _name(self, side: Side) -> str:
        return f"{side} of the bucket" if self.matrices == "whole-bucket" else side


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _key_of(bucket: Layout) -> str:
    """Return the text that seeds the bases of a bucket's matrix."""
    return "+".join(bucket.keys)
