"""Requests of every kind, one at a time and several at once, in lockstep and over Gloo; and those that are refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks.errors import CompressorError
from commhooks.language import (
    AllGather,
    AllReduce,
    AllToAll,
    BucketView,
    Compressor,
    Context,
    Entry,
    Exchange,
    Group,
    Judge,
    Part,
    Place,
    ReduceScatter,
)
from commhooks.language.entries import Declared
from commhooks.tensors import all_finite
from tests.commhooks.models import Given, wrap
from tests.commhooks.workers import Workers, normal, zeros
from tests.tiers import thorough
from tests.world import run_world

both_policies = pytest.mark.parametrize("policy", ["fifo", "fused"])
Script = Callable[[BucketView, Context], Generator[Any, Any, Any]]


def every_way(over_gloo: str) -> pytest.MarkDecorator:
    """Run a test in lockstep under both policies, and over Gloo under one; the long runs have the other too."""
    gloo = thorough([("gloo", "fifo"), ("gloo", "fused")], unless=lambda way: way[1] == over_gloo)
    return pytest.mark.parametrize(("way", "policy"), [("lockstep", "fifo"), ("lockstep", "fused"), *gloo])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scripted(Compressor):
    """Run a script, and note what it returns, by rank, step and bucket; the gradient stays as it is."""

    script: Script = dataclasses.field(repr=False)
    noted: dict[tuple[int, int, int], Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def state(self, place: Place) -> Declared:
        return {"commits": Entry(kind="replicated", shape=(1,))}

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        self.noted[context.rank, context.step, bucket.index] = yield from self.script(bucket, context)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str
)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_verdict_finds_one_bad_element_wherever_it_is(dtype: torch.dtype, bad: float) -> None:
    for elements in (1, 5, 64, 1000):
        good = torch.linspace(-3, 2, elements).to(dtype)
        assert all_finite([good, torch.arange(3), good.expand(3, -1)])
        for at in {0, elements // 2, elements - 1}:
            one_bad = good.index_fill(0, torch.tensor(at), bad)
            assert not all_finite([good, one_bad])
            assert not all_finite([one_bad.expand(3, -1)[1:]])


def over_gloo(rank: int, script: Script, policy: Any, steps: int) -> list[Any]:
    """Run a script over Gloo, in one bucket; return what it returned in each step."""
    scripted = Scripted(script=script)
    model = wrap("core", Given((4,), (6,)))
    attachment = commhooks.attach(model, scripted, policy=policy)
    for _ in range(steps):
        model(torch.ones(4), torch.ones(6)).backward()
    attachment.close()
    return [scripted.noted[rank, step, 0] for step in range(steps)]


def answers(way: str, script: Script, world_size: int, policy: str, steps: int = 1) -> list[list[Any]]:
    """Run a script on every rank, in one bucket; return what it returned by rank and step."""
    if way == "gloo":
        return run_world(over_gloo, world_size, script, policy, steps)
    scripted = Scripted(script=script)
    workers = Workers(scripted, world_size, zeros((4,), (6,)), policy=policy)
    for _ in range(steps):
        workers.step([[torch.ones(4), torch.ones(6)]] * world_size)
    return [[scripted.noted[rank, step, 0] for step in range(steps)] for rank in range(world_size)]


def own(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return whole numbers, different on every rank: no sum of them rounds."""
    return (torch.arange(torch.Size(shape).numel()) + 100 * rank).view(shape).to(dtype)


# --- sums of which each rank gets one -------------------------------------------------------------------------------


def scatters(bucket: BucketView, context: Context) -> Generator[Any, Any, Any]:
    """Send rows of two dtypes and several shapes, and nothing at all beside them."""
    rank, world_size = context.rank, context.world_size
    rows = [
        own(rank, world_size, 5),
        own(rank, world_size, 2, 3, dtype=torch.float64),
        own(rank, world_size),
        own(rank, world_size, 0),
    ]
    received = yield ReduceScatter(*map(Part, rows), last=True)
    return [answer.clone() for answer in received]


@pytest.mark.parametrize(
    ("world_size", "way", "policy"),
    [
        *itertools.product((2, 3), ["lockstep"], ("fifo", "fused")),
        (2, "gloo", "fused"),
        (3, "gloo", "fifo"),
        *thorough([(2, "gloo", "fifo"), (3, "gloo", "fused")]),
    ],
)
def test_every_rank_gets_its_row_of_the_sum(world_size: int, way: str, policy: str) -> None:
    ranks = answers(way, scatters, world_size, policy, steps=2)
    for rank, steps in enumerate(ranks):
        for received in steps:
            for answer, (shape, dtype) in zip(
                received,
                [((5,), torch.float32), ((2, 3), torch.float64), ((), torch.float32), ((0,), torch.float32)],
                strict=True,
            ):
                terms = [own(other, world_size, *shape, dtype=dtype)[rank] for other in range(world_size)]
                assert answer.dtype == dtype and torch.equal(answer, torch.stack(terms).sum(0))


# --- gathers and exchanges of any dtype -----------------------------------------------------------------------------

DTYPES = [
    torch.uint8, torch.float64, torch.bool, torch.uint16, torch.float8_e4m3fn, torch.bfloat16, torch.int64,
    torch.complex64,
]  # fmt: skip
SHAPES = [(3,), (2, 2), (), (5, 1), (7,), (0,), (1,), (3,)]


def raw(rank: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of any bits, NaN among them; a bool's are 0 and 1."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    size = torch.Size(shape).numel() * dtype.itemsize
    noise = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return noise.view(dtype).view(shape)


def seen(tensor: Tensor) -> tuple[torch.dtype, torch.Size, Tensor]:
    """Return a tensor's dtype, shape and bytes: not every dtype can be compared, or pickled."""
    memory = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    return tensor.dtype, tensor.shape, memory.view(torch.uint8)


def demand(answer: tuple[torch.dtype, torch.Size, Tensor], rows: list[Tensor]) -> None:
    """Assert that an answer is made of these rows, bit for bit."""
    dtype, shape, its_bytes = answer
    assert (dtype, shape) == (rows[0].dtype, (len(rows), *rows[0].shape))
    assert torch.equal(its_bytes, torch.cat([seen(row)[2] for row in rows])), dtype


def gathers(bucket: BucketView, context: Context) -> Generator[Any, Any, Any]:
    """Gather all dtypes in one message, and then each dtype in a message of its own."""
    sent = [raw(context.rank, n, *each) for n, each in enumerate(zip(SHAPES, DTYPES, strict=True))]
    together = yield AllGather(*map(Part, sent))
    noted = list(map(seen, together))
    for tensor in sent:
        (answer,) = yield AllGather(Part(tensor))
        noted.append(seen(answer))
    return noted


@every_way("fused")
def test_gathered_parts_of_any_dtype_come_back_typed_and_bit_for_bit(way: str, policy: str) -> None:
    for steps in answers(way, gathers, 3, policy, steps=2):
        for received in steps:
            for number, answer in enumerate(received):
                n = number % len(DTYPES)
                demand(answer, [raw(rank, n, SHAPES[n], DTYPES[n]) for rank in range(3)])


def exchanges(bucket: BucketView, context: Context) -> Generator[Any, Any, Any]:
    """Exchange rows of all dtypes in one message."""
    W = context.world_size
    sent = [
        raw(context.rank, n, (W, *shape), dtype) for n, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True))
    ]
    received = yield AllToAll(*map(Part, sent), last=True)
    return list(map(seen, received))


@every_way("fifo")
def test_exchanged_parts_of_any_dtype_come_back_typed_and_bit_for_bit(way: str, policy: str) -> None:
    for rank, (received,) in enumerate(answers(way, exchanges, 3, policy)):
        for n, answer in enumerate(received):
            demand(answer, [raw(other, n, (3, *SHAPES[n]), DTYPES[n])[rank] for other in range(3)])


# --- several at once ------------------------------------------------------------------------------------------------


def asks_for_several(bucket: BucketView, context: Context) -> Generator[Any, Any, Any]:
    """Ask for five things at once, one of them empty and two that travel together."""
    rank, world_size = context.rank, context.world_size
    several = yield (
        AllReduce(Part(own(rank, 3)), Part(own(rank, 2, dtype=torch.float64))),
        AllGather(Part(own(rank, 2))),
        AllReduce(Part(own(rank, 4)), average=True),
        AllToAll(Part(own(rank, world_size, 2))),
        ReduceScatter(Part(own(rank, world_size, 2))),
        AllGather(Part(own(rank, 0))),
        AllReduce(Part(own(rank, 4))),
    )
    (alone,) = yield (AllReduce(Part(own(rank, 1)), last=True),)
    return [[answer.clone() for answer in one] for one in (*several, alone)]


@every_way("fused")
def test_several_requests_at_once_are_answered_one_by_one(way: str, policy: str) -> None:
    W = 2
    total = [own(0, n) + own(1, n) for n in range(5)]
    for rank, (answered,) in enumerate(answers(way, asks_for_several, W, policy)):
        rows = [own(other, W, 2) for other in range(W)]
        expected = [
            [total[3], (own(0, 2) + own(1, 2)).double()],
            [torch.stack([own(0, 2), own(1, 2)])],
            [total[4] / 2],
            [torch.stack([row[rank] for row in rows])],
            [rows[0][rank] + rows[1][rank]],
            [torch.empty(W, 0)],
            [total[4]],
            [total[1]],
        ]
        for ours, theirs in zip(answered, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@both_policies
def test_requests_at_once_that_are_alike_travel_together(policy: str) -> None:
    """Sums of fp32, of fp64, and the mean; both gathers; the exchange; the reduce-scatter: then the one alone."""
    workers = Workers(Scripted(script=asks_for_several), 2, zeros((4,), (6,)), buckets=2, policy=policy)
    workers.step([[torch.ones(4), torch.ones(6)]] * 2)
    of_each = 2 if policy == "fifo" else 1
    kinds = {kind: counts.collectives // of_each for kind, counts in workers.traffic.by_kind.items()}
    assert kinds == {"all-reduce": 3 + 1, "all-gather": 1, "all-to-all": 1, "reduce-scatter": 1}


@dataclasses.dataclass(frozen=True)
class Averages:
    """Average a part that is not to be overwritten, and return it with its mean."""

    dtype: torch.dtype

    def __call__(self, bucket: BucketView, context: Context) -> Generator[Any, Any, Any]:
        mine = own(context.rank, 4, dtype=self.dtype)
        (mean,) = yield AllReduce(Part(mine), average=True, last=True)
        return mine, mean.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_a_part_that_is_not_to_be_overwritten_stays_as_it_is(dtype: torch.dtype) -> None:
    whole = [own(rank, 4, dtype=dtype) for rank in range(2)]
    for rank, ((mine, mean),) in enumerate(answers("lockstep", Averages(dtype), 2, "fifo")):
        assert torch.equal(mine, whole[rank]) and torch.equal(mean, (whole[0] + whole[1]) / 2)


# --- the verdict ----------------------------------------------------------------------------------------------------


def judges(bucket: BucketView, context: Context) -> Generator[Any, Any, Any]:
    """Commit if the mean is finite; buckets of an odd number make one more round."""
    (tile,) = bucket.tiles
    if bucket.index % 2:
        yield AllReduce(Part(own(context.rank, 3)))
    (mean,) = yield AllReduce(tile.part(), average=True, last=True)
    finite = yield Judge(mean)
    for slot in bucket.slots:
        slot.commit("commits", slot.state("commits") + 1, finite)
    return bool(finite)


@both_policies
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_one_verdict_is_for_all_buckets_if_they_are_fused_and_for_each_of_them_in_fifo(policy: str, bad: float) -> None:
    scripted = Scripted(script=judges)
    workers = Workers(scripted, 2, zeros((4,), (6,), (3,)), buckets=3, policy=policy)
    for step in range(3):
        gradients = normal(workers.parameters, 2, seed=step)
        if step == 1:
            gradients[0][1][2] = bad
        workers.step(gradients)
    spoilt = [False] * 3 if policy == "fused" else [True, False, True]
    for rank in range(2):
        for step, expected in enumerate([[True] * 3, spoilt, [True] * 3]):
            assert [scripted.noted[rank, step, index] for index in range(3)] == expected
        commits = [int(workers.states[rank].of(p)["commits"]) for p in workers.parameters]
        assert commits == [2 + fine for fine in spoilt]


# --- what is refused ------------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[Callable[[Part], list[Any]], str]] = {
    "after Judge": (
        lambda part: [AllReduce(part, last=True), Judge(), AllReduce(part)],
        "the compressor asked for something after Judge, which must be the last.",
    ),
    "after the last": (
        lambda part: [AllReduce(part, last=True), AllGather(part)],
        "the compressor asked for an all-gather after a request marked last=True.",
    ),
    "too few rows": (
        lambda _: [AllToAll(Part(torch.zeros(2, 2)), last=True)],
        r"all-to-all: a part must have one row for each of 3 ranks \(got shape \(2, 2\)\).",
    ),
    "no rows": (
        lambda _: [ReduceScatter(Part(torch.zeros(())), last=True)],
        r"reduce-scatter: a part must have one row for each of 3 ranks \(got shape \(\)\).",
    ),
    "nothing": (lambda _: [()], r"the compressor asked for something that is not a request \(got \(\)\)."),
    "a tensor": (lambda part: [part.tensor], r"asked for something that is not a request \(got tensor"),
    "Judge beside a request": (lambda part: [(AllReduce(part), Judge())], "asked for something that is not a request"),
    "of machines that are not whole": (
        lambda part: [AllReduce(part, group=Group("outer", 2), last=True)],
        r"Group\(kind='outer', size=2\): 3 ranks cannot be divided into machines of 2.",
    ),
    "a sparse sum inside machines": (
        lambda _: [AllReduce(Part(torch.eye(3).to_sparse()), group=Group("inner", 3), last=True)],
        "all-reduce: a sparse sum needs all ranks, not a group of them.",
    ),
}


@both_policies
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_asked_for_is_an_error_that_names_rank_and_bucket(what: str, policy: str) -> None:
    wrong, words = REFUSED[what]

    def script(bucket: BucketView, context: Context) -> Generator[Any, Any, Any]:
        part = Part(own(context.rank, 3))
        asked = wrong(part) if bucket.index == 1 else [AllReduce(part, last=True)]
        for one in asked:  # noqa: UP028 (answers are sent in, which a list's iterator does not take)
            yield one

    workers = Workers(Scripted(script=script), 3, zeros((4,), (6,), (5,)), buckets=3, policy=policy)
    where = r"rank 0, step 0, bucket 1 \(parameters layer1\): CompressorError: .*"
    with pytest.raises(CompressorError, match=where + words):
        workers.step([[torch.ones(4), torch.ones(6), torch.ones(5)]] * 3)


# --- how long answers last ------------------------------------------------------------------------------------------


def keeps_answers(bucket: BucketView, context: Context) -> Generator[Any, Any, Any]:
    """Ask twice, in the same layout, for different things, and look at both answers afterwards."""
    first = yield AllReduce(*(slot.part(own(context.rank, 3)) for slot in bucket.slots))
    second = yield AllReduce(*(slot.part(own(context.rank, 3) * 2) for slot in bucket.slots))
    gathered = yield AllGather(*(slot.part(own(context.rank, 3)) for slot in bucket.slots))
    again = yield AllGather(*(slot.part(own(context.rank, 3) * 2) for slot in bucket.slots), last=True)
    return [[answer.clone() for answer in one] for one in (first, second, gathered, again)]


@every_way("fifo")
def test_an_answer_lasts_to_the_end_of_the_exchange(way: str, policy: str) -> None:
    total, rows = own(0, 3) + own(1, 3), torch.stack([own(0, 3), own(1, 3)])
    for ((first, second, gathered, again),) in answers(way, keeps_answers, 2, policy):
        for answered, expected in ((first, total), (second, 2 * total), (gathered, rows), (again, 2 * rows)):
            assert all(torch.equal(answer, expected) for answer in answered)
