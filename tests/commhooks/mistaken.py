"""Thirty compressors as a user would write them, each with one mistake, and the five without one that they come from.

test_mistaken.py: `commhooks check` finds each mistake, and nothing in the five.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from commhooks.language import (
    AllGather,
    AllReduce,
    BucketView,
    Compressor,
    Context,
    Entry,
    Exchange,
    Judge,
    Loss,
    Part,
    Place,
    Sends,
    Slot,
)
from commhooks.language.randomness import seeded_places, stable_seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Averages(Compressor):
    """The mean, without a mistake."""

    def slots(self, bucket: BucketView) -> Sequence[Slot]:
        return bucket.filled

    def sent(self, M: Tensor, slot: Slot, context: Context) -> Tensor:
        return M.clone()

    def part(self, bucket: BucketView, slot: Slot, sent: Tensor) -> Part:
        return slot.part(sent)

    def mean(self, answer: Tensor, slot: Slot, context: Context) -> Tensor:
        return answer / context.world_size

    def finish(self, slot: Slot, mean: Tensor, finite: Tensor) -> None:
        slot.write(mean)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        slots = self.slots(bucket)
        if not slots:
            return
        parts = [self.part(bucket, slot, self.sent(slot.form(), slot, context)) for slot in slots]
        answers = yield AllReduce(*parts, last=True)
        means = [self.mean(answer, slot, context) for slot, answer in zip(slots, answers, strict=True)]
        finite = yield Judge(*(mean.to(slot.gradient.dtype) for slot, mean in zip(slots, means, strict=True)))
        for slot, mean in zip(slots, means, strict=True):
            self.finish(slot, mean, finite)


class SumForMean(Averages):
    """It returns the sum over ranks in place of the mean."""

    def mean(self, answer: Tensor, slot: Slot, context: Context) -> Tensor:
        return answer


class ScaledTwice(Averages):
    """It divides by the world size before the sum and after it."""

    def sent(self, M: Tensor, slot: Slot, context: Context) -> Tensor:
        return M / context.world_size


class HalfDropped(Averages):
    """It sends the first half of each gradient, and declares no loss."""

    def sent(self, M: Tensor, slot: Slot, context: Context) -> Tensor:
        return M.index_fill(0, torch.arange(len(M) // 2, len(M)), 0.0)


class Clips(Averages):
    """It clips large elements, and declares no loss."""

    def sent(self, M: Tensor, slot: Slot, context: Context) -> Tensor:
        return M.clamp(-100, 100)


class SwallowsNaN(Averages):
    """It replaces inf and NaN by zeros before anybody sees them."""

    def sent(self, M: Tensor, slot: Slot, context: Context) -> Tensor:
        return M.nan_to_num(0.0, 0.0, 0.0)


class OddElement(Averages):
    """It works on pairs of elements, and forgets the last one of an odd number."""

    def sent(self, M: Tensor, slot: Slot, context: Context) -> Tensor:
        return M[: len(M) // 2 * 2].view(-1, 2).clone()

    def mean(self, answer: Tensor, slot: Slot, context: Context) -> Tensor:
        mean = super().mean(answer, slot, context).flatten()
        return torch.cat([mean, mean.new_zeros(slot.gradient.numel() - len(mean))])


class FirstBucketOnly(Averages):
    """It leaves every bucket after the first as it is."""

    def slots(self, bucket: BucketView) -> Sequence[Slot]:
        return bucket.filled if bucket.index == 0 else []


class EmptyParameter(Averages):
    """It views each gradient as rows, which fails for a parameter without elements."""

    def slots(self, bucket: BucketView) -> Sequence[Slot]:
        return bucket.slots

    def sent(self, M: Tensor, slot: Slot, context: Context) -> Tensor:
        return M.view(slot.parameter.shape[:1].numel(), -1).flatten().clone()


class ZeroDimParameter(Averages):
    """It asks for the number of a parameter's rows, which a 0-dim one has not."""

    def sent(self, M: Tensor, slot: Slot, context: Context) -> Tensor:
        return M.view(len(slot.parameter), -1).flatten().clone()


class NoBFloat16(Averages):
    """It passes gradients through NumPy, which has no bf16."""

    def sent(self, M: Tensor, slot: Slot, context: Context) -> Tensor:
        return torch.from_numpy(slot.gradient.numpy().astype("float64")).to(M.dtype)


class Item(Averages):
    """It reads a tensor's value, for which the host waits on a GPU."""

    def sent(self, M: Tensor, slot: Slot, context: Context) -> Tensor:
        return M.clone() if M.abs().amax().item() != 0 else torch.zeros_like(M)


class WrongBytes(Averages):
    """It says that everything it sends belongs to the bucket's first parameter."""

    def part(self, bucket: BucketView, slot: Slot, sent: Tensor) -> Part:
        return Part(sent, bucket.filled[0].layout(sent.numel()))


class UnequalCollectives(Averages):
    """Rank 0 asks for one more collective, for its log."""

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        if context.rank == 0 and bucket.filled:
            yield AllReduce(bucket.filled[0].part(bucket.memory.float().norm().view(1)))
        yield from super().compress(bucket, context)


class SumInHalf(Averages):
    """It adds up in fp16 and divides afterwards, so that the sum overflows where the mean does not."""

    sends = Sends.FIXED

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        return Loss(2.0**-22) if parameter.element_size() > 2 else None

    def sent(self, M: Tensor, slot: Slot, context: Context) -> Tensor:
        return M.half()

    def mean(self, answer: Tensor, slot: Slot, context: Context) -> Tensor:
        return answer.float() / context.world_size

    def finish(self, slot: Slot, mean: Tensor, finite: Tensor) -> None:
        M = slot.form()
        slot.keep(M - M.half(), finite)
        slot.write(mean)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathers(Compressor):
    """The sign of each element, times the mean magnitude: gathered, averaged and fed back, without a mistake."""

    sends = Sends.ANYTHING

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        return Loss(1 - 1 / parameter.numel()) if parameter.numel() else None

    def mean(self, of_ranks: Tensor, context: Context) -> Tensor:
        total = of_ranks[0].clone()
        for other in of_ranks[1:]:
            total += other
        return total / context.world_size

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        parts = []
        for slot in bucket.filled:
            M = slot.form()
            parts.append(slot.part(M.sign() * M.abs().mean()))
        if not parts:
            return
        answers = yield AllGather(*parts, last=True)
        means = [self.mean(of_ranks, context) for of_ranks in answers]
        finite = yield Judge(*(mean.to(bucket.memory.dtype) for mean in means))
        for slot, mean, of_ranks in zip(bucket.filled, means, answers, strict=True):
            slot.keep(slot.form() - of_ranks[context.rank], finite)
            slot.write(mean)


class WrongDim(Gathers):
    """It averages over the wrong dimension of what it has gathered."""

    def mean(self, of_ranks: Tensor, context: Context) -> Tensor:
        return of_ranks.reshape(-1, context.world_size).mean(1)


class MeanOfMeans(Gathers):
    """It averages what it has with the next rank's, so that the last rank counts most."""

    def mean(self, of_ranks: Tensor, context: Context) -> Tensor:
        mean = of_ranks[0].clone()
        for other in of_ranks[1:]:
            mean = (mean + other) / 2
        return mean


class OwnFirst(Gathers):
    """Every rank begins the sum with its own gradient, so that ranks round differently."""

    def mean(self, of_ranks: Tensor, context: Context) -> Tensor:
        return super().mean(of_ranks.roll(-context.rank, 0), context)


class SumInAnswer(Gathers):
    """It adds up in the first rank's answer, from which rank 0 then computes what it has not sent."""

    def mean(self, of_ranks: Tensor, context: Context) -> Tensor:
        total = of_ranks[0]
        for other in of_ranks[1:]:
            total += other
        return total / context.world_size


class NotAlone(Gathers):
    """It needs a second rank."""

    def mean(self, of_ranks: Tensor, context: Context) -> Tensor:
        first, second, *others = of_ranks
        total: Tensor = first + second
        for other in others:
            total += other
        return total / context.world_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halves(Compressor):
    """A random half of each gradient, the rest of which is fed back, without a mistake."""

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        n = parameter.numel()
        return Loss(1 - math.ceil(n / 2) / n) if n > 1 else None

    def seed(self, bucket: BucketView, slot: Slot, context: Context) -> int:
        return stable_seed(slot.name, context.step)

    def places(self, M: Tensor, bucket: BucketView, slot: Slot, context: Context) -> Tensor:
        return seeded_places(len(M), math.ceil(len(M) / 2), self.seed(bucket, slot, context), M)

    def keep(self, slot: Slot, unsent: Tensor, finite: Tensor, context: Context) -> None:
        slot.keep(unsent, finite)

    def remember(self, places: Tensor, finite: Tensor, bucket: BucketView, slot: Slot, context: Context) -> None:
        """Note which elements were sent."""

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        slots, places, parts = bucket.filled, [], []
        for slot in slots:
            M = slot.form()
            places.append(self.places(M, bucket, slot, context))
            parts += [slot.part(M[places[-1]]), slot.part(M.abs().amax().view(1))]
        if not parts:
            return
        answers = yield AllReduce(*parts, average=True, last=True)
        finite = yield Judge(*answers, *slots[0].tile.in_own_range(answers[::2]))
        for slot, at, mean in zip(slots, places, answers[::2], strict=True):
            left = slot.form()
            left[at] -= context.as_sent(left[at])
            self.keep(slot, left, finite, context)
            self.remember(at, finite, bucket, slot, context)
            whole = torch.zeros_like(slot.room).index_copy_(0, at, mean)
            slot.write(whole + torch.where(finite, 0.0, torch.nan))


class NoResidual(Halves):
    """It declares a loss, and does not keep what it has not sent."""

    def keep(self, slot: Slot, unsent: Tensor, finite: Tensor, context: Context) -> None:
        pass


class WrongSign(Halves):
    """Its residual has the wrong sign: what was sent less what there was."""

    def keep(self, slot: Slot, unsent: Tensor, finite: Tensor, context: Context) -> None:
        slot.keep(-unsent, finite)


class ResidualOfShare(Halves):
    """Its residual is a share of the mean, one world-size-th of what this rank has not sent."""

    def keep(self, slot: Slot, unsent: Tensor, finite: Tensor, context: Context) -> None:
        slot.keep(unsent / context.world_size, finite)


class RandomByRank(Halves):
    """Each rank draws other places, whose values are then added up."""

    def seed(self, bucket: BucketView, slot: Slot, context: Context) -> int:
        return stable_seed(slot.name, context.step, context.rank)


class ByIndex(Halves):
    """It draws by the parameter's place in its bucket in place of its name."""

    def seed(self, bucket: BucketView, slot: Slot, context: Context) -> int:
        return stable_seed(bucket.index, [one.name for one in bucket.slots].index(slot.name), context.step)


class GlobalSeed(Halves):
    """It seeds the generator of all of PyTorch, and so of the training: of dropout, and of the data's order."""

    def places(self, M: Tensor, bucket: BucketView, slot: Slot, context: Context) -> Tensor:
        torch.manual_seed(self.seed(bucket, slot, context))
        return torch.randperm(len(M))[: math.ceil(len(M) / 2)]


class ShapeByRank(Halves):
    """It sends the elements above a threshold, of which each rank has another number."""

    def places(self, M: Tensor, bucket: BucketView, slot: Slot, context: Context) -> Tensor:
        return (M.abs() > 0.5).nonzero().flatten()


class Oldest(Halves):
    """The half that has waited longest, by a state that is the same on every rank, without a mistake."""

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        return Loss(1 - 1e-9) if parameter.numel() > 1 else None  # a step may send nothing of a gradient

    def state(self, place: Place) -> dict[str, Entry]:
        return {"age": Entry(kind="replicated")}

    def age(self, bucket: BucketView, slot: Slot, context: Context) -> Tensor:
        return slot.state("age")

    def places(self, M: Tensor, bucket: BucketView, slot: Slot, context: Context) -> Tensor:
        age = self.age(bucket, slot, context)
        return age.sort(stable=True, descending=True).indices[: math.ceil(len(age) / 2)]

    def remember(self, places: Tensor, finite: Tensor, bucket: BucketView, slot: Slot, context: Context) -> None:
        slot.commit("age", (slot.state("age") + 1).index_fill_(0, places, 0.0), finite)


class BeforeTheVerdict(Oldest):
    """It changes its state before it knows whether the step counts."""

    def places(self, M: Tensor, bucket: BucketView, slot: Slot, context: Context) -> Tensor:
        places = super().places(M, bucket, slot, context)
        super().remember(places, torch.tensor(True), bucket, slot, context)
        return places

    def remember(self, places: Tensor, finite: Tensor, bucket: BucketView, slot: Slot, context: Context) -> None:
        pass


class InItsClass(Oldest):
    """It keeps its state in a dictionary of its class, which no checkpoint saves."""

    ages: ClassVar[dict[tuple[str, int], Tensor]] = {}

    def state(self, place: Place) -> dict[str, Entry]:
        return {}

    def age(self, bucket: BucketView, slot: Slot, context: Context) -> Tensor:
        kept = self.ages.get((slot.name, context.rank))
        n = slot.gradient.numel()
        return torch.zeros(n) if kept is None or len(kept) != n else kept

    def remember(self, places: Tensor, finite: Tensor, bucket: BucketView, slot: Slot, context: Context) -> None:
        age = self.age(bucket, slot, context)
        new = torch.where(finite, (age + 1).index_fill_(0, places, 0.0), age)
        self.ages[slot.name, context.rank] = new


class ColdAfterLoading(Oldest):
    """It keeps its warm start in the bucket's plan, and begins anew after a checkpoint is loaded."""

    def state(self, place: Place) -> dict[str, Entry]:
        return {}

    def age(self, bucket: BucketView, slot: Slot, context: Context) -> Tensor:
        return bucket.plan((self, slot.name), lambda: torch.zeros(slot.gradient.numel()))

    def remember(self, places: Tensor, finite: Tensor, bucket: BucketView, slot: Slot, context: Context) -> None:
        age = self.age(bucket, slot, context)
        age.copy_(torch.where(finite, (age + 1).index_fill_(0, places, 0.0), age))


class Differences(Averages):
    """The mean of what has changed since the step before, and that step's mean, without a mistake."""

    def state(self, place: Place) -> dict[str, Entry]:
        return {"mine": Entry(kind="private"), "mean": Entry(kind="replicated")}

    def sent(self, M: Tensor, slot: Slot, context: Context) -> Tensor:
        return M - slot.state("mine")

    def mean(self, answer: Tensor, slot: Slot, context: Context) -> Tensor:
        return slot.state("mean") + answer / context.world_size

    def finish(self, slot: Slot, mean: Tensor, finite: Tensor) -> None:
        slot.commit("mine", slot.form(), finite)
        slot.commit("mean", mean, finite)
        slot.write(mean)


class SharesMemory(Differences):
    """What it remembers of its gradient is the gradient's own memory, which the next backward pass overwrites."""

    def finish(self, slot: Slot, mean: Tensor, finite: Tensor) -> None:
        slot.state("mine").data = slot.form()
        slot.commit("mean", mean, finite)
        slot.mean.copy_(mean)


RIGHT = (Averages, Gathers, Halves, Oldest, Differences)
MISTAKES = (
    SumForMean, ScaledTwice, HalfDropped, Clips, SwallowsNaN, OddElement, FirstBucketOnly, EmptyParameter,
    ZeroDimParameter, NoBFloat16, Item, WrongBytes, UnequalCollectives, SumInHalf, WrongDim, MeanOfMeans, OwnFirst,
    SumInAnswer, NotAlone, NoResidual, WrongSign, ResidualOfShare, RandomByRank, ByIndex, GlobalSeed, ShapeByRank,
    BeforeTheVerdict, InItsClass, ColdAfterLoading, SharesMemory,
)  # fmt: skip
