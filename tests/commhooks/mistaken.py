"""Thirty compressors with one mistake each, which `commhooks check` must find, and the five that they come from."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

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

MISTAKES: dict[str, tuple[type[Compressor], str, str]] = {}
"""By name: the compressor, the law that its mistake breaks, and what is said of it."""


def breaks(law: str, said: str) -> Callable[[type[Compressor]], type[Compressor]]:
    """Enter a class with a mistake."""

    def enter(kind: type[Compressor]) -> type[Compressor]:
        MISTAKES[kind.__name__] = kind, law, said
        return kind

    return enter


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


@breaks("steps", "rank 0 asked for all-reduce (1,) torch.float32, rank 1 for all-reduce (960,)")
class UnequalCollectives(Averages):
    """Rank 0 asks for one more collective, for its log."""

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        if context.rank == 0 and bucket.filled:
            yield AllReduce(bucket.filled[0].part(bucket.memory.float().norm().view(1)))
        yield from super().compress(bucket, context)


@breaks("equal", "the mean of up to 20,000 is not finite")
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


@breaks("steps", "not enough values to unpack (expected at least 2, got 1) in step 0 on 1 worker")
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


@breaks("repeats", "the global random generator of PyTorch was used or seeded")
class GlobalSeed(Halves):
    """It seeds the generator of all of PyTorch, and so of the training: of dropout, and of the data's order."""

    def places(self, M: Tensor, bucket: BucketView, slot: Slot, context: Context) -> Tensor:
        torch.manual_seed(self.seed(bucket, slot, context))
        return torch.randperm(len(M))[: math.ceil(len(M) / 2)]


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


@breaks("flaws", "the step after one with inf on rank 1 is another than without it")
class BeforeTheVerdict(Oldest):
    """It changes its state before it knows whether the step counts."""

    def places(self, M: Tensor, bucket: BucketView, slot: Slot, context: Context) -> Tensor:
        places = super().places(M, bucket, slot, context)
        super().remember(places, torch.tensor(True), bucket, slot, context)
        return places

    def remember(self, places: Tensor, finite: Tensor, bucket: BucketView, slot: Slot, context: Context) -> None:
        pass


@breaks("repeats", "two runs have different means")
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


@breaks("resume", "after a resume")
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


@breaks("place", "what is remembered is another")
class SharesMemory(Differences):
    """What it remembers of its gradient is the gradient's own memory, which the next backward pass overwrites."""

    def finish(self, slot: Slot, mean: Tensor, finite: Tensor) -> None:
        slot.state("mine").data = slot.form()
        slot.commit("mean", mean, finite)
        slot.mean.copy_(mean)


IN_ONE_METHOD: list[tuple[str, type[Compressor], str, str, dict[str, Callable[..., Any]]]] = [
    ("SumForMean", Averages, "mean", "the mean is 2 times that of what ranks sent",
     {"mean": lambda self, answer, slot, context: answer}),
    ("ScaledTwice", Averages, "mean", "the mean is 0.5 times that of what ranks sent",
     {"sent": lambda self, M, slot, context: M / context.world_size}),
    ("HalfDropped", Averages, "mean", "480 of the mean's 960 elements are 0, and should not be",
     {"sent": lambda self, M, *_: M.index_fill(0, torch.arange(len(M) // 2, len(M)), 0.0)}),
    ("Clips", Averages, "mean", "of gradients of 1e+30, the mean is off",
     {"sent": lambda self, M, *_: M.clamp(-100, 100)}),
    ("SwallowsNaN", Averages, "flaws", "all means are finite on rank 0, with inf on rank 1",
     {"sent": lambda self, M, *_: M.nan_to_num(0.0, 0.0, 0.0)}),
    ("OddElement", Averages, "mean", "1 of the mean's 135 elements are 0, and should not be",
     {"sent": lambda self, M, *_: M[: len(M) // 2 * 2].view(-1, 2).clone(),
      "mean": lambda self, answer, slot, of: pad(answer.flatten(), (0, slot.gradient.numel() % 2)) / of.world_size}),
    ("FirstBucketOnly", Averages, "mean", "the mean is 1, 0 times what ranks 0, 1 sent",
     {"slots": lambda self, bucket: bucket.filled if bucket.index == 0 else []}),
    ("EmptyParameter", Averages, "steps", "RuntimeError: cannot reshape tensor of 0 elements",
     {"slots": lambda self, bucket: bucket.slots,
      "sent": lambda self, M, slot, _: M.view(slot.parameter.shape[:1].numel(), -1).flatten().clone()}),
    ("ZeroDimParameter", Averages, "steps", "TypeError: len() of a 0-d tensor in step 0 on 2 workers, with float32",
     {"sent": lambda self, M, slot, _: M.view(len(slot.parameter), -1).flatten().clone()}),
    ("NoBFloat16", Averages, "shapes", "TypeError: Got unsupported ScalarType BFloat16",
     {"sent": lambda self, M, slot, _: torch.from_numpy(slot.gradient.numpy().astype("float64")).to(M.dtype)}),
    ("Item", Averages, "waits", "M.abs().amax().item() != 0",
     {"sent": lambda self, M, *_: M.clone() if M.abs().amax().item() != 0 else torch.zeros_like(M)}),
    ("WrongBytes", Averages, "bytes", "no byte is counted as sent",
     {"part": lambda self, bucket, slot, sent: Part(sent, bucket.filled[0].layout(sent.numel()))}),
    ("WrongDim", Gathers, "conservation", "the mean is off by 2 of its largest element",
     {"mean": lambda self, of_ranks, context: of_ranks.reshape(-1, context.world_size).mean(1)}),
    ("MeanOfMeans", Gathers, "conservation", "the mean is 0.25, 0.25, 0.5 times what ranks 0, 1, 2 sent",
     {"mean": lambda self, of_ranks, context: functools.reduce(lambda mean, other: (mean + other) / 2, of_ranks)}),
    ("SumInAnswer", Gathers, "conservation", "the mean is 0.33, 0, 0 times what ranks 0, 1, 2 sent",
     {"mean": lambda self, of_ranks, context: functools.reduce(Tensor.add_, of_ranks) / context.world_size}),
    ("OwnFirst", Gathers, "replicas", "ranks 0 and 1 have different means",
     {"mean": lambda self, of_ranks, context: Gathers.mean(self, of_ranks.roll(-context.rank, 0), context)}),
    ("NoResidual", Halves, "conservation", "no residual is kept",
     {"keep": lambda *_: None}),
    ("WrongSign", Halves, "conservation", "the residual is -1 times what was not sent",
     {"keep": lambda self, slot, unsent, finite, _: slot.keep(-unsent, finite)}),
    ("ResidualOfShare", Halves, "conservation", "the residual is 0.33 times what was not sent",
     {"keep": lambda self, slot, unsent, finite, context: slot.keep(unsent / context.world_size, finite)}),
    ("RandomByRank", Halves, "replicas", "ranks 0 and 1 have different means",
     {"seed": lambda self, bucket, slot, context: stable_seed(slot.name, context.step, context.rank)}),
    ("ByIndex", Halves, "buckets", "the means differ",
     {"seed": lambda self, bucket, slot, context: stable_seed(bucket.index, bucket.slots.index(slot), context.step)}),
    ("ShapeByRank", Halves, "steps", "rank 0 asked for all-reduce (596,) torch.float32, rank 1 for all-reduce (585,)",
     {"places": lambda self, M, *_: (M.abs() > 0.5).nonzero().flatten()}),
]  # fmt: skip
for _name, _base, _law, _said, _methods in IN_ONE_METHOD:
    breaks(_law, _said)(type(_name, (_base,), _methods))

RIGHT = (Averages, Gathers, Halves, Oldest, Differences)
