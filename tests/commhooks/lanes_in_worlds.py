"""What the tests of lanes, engines that share a line, run on every rank."""

from __future__ import annotations

import dataclasses
import random
import threading
import time

import torch
import torch.distributed as dist
from torch import Tensor

import commhooks
from commhooks import Averaging, Exchanger
from commhooks.communicators import Collective, Communicator, Pending
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Compressor, Context, Exchange
from commhooks.scheduling.line import ProcessGroupLine
from tests.commhooks.told import Told, told_by

ELEMENTS = 24


class Counted:
    """A communicator that counts the bytes of everything that a line sends for its lanes."""

    made: Counted

    def __init__(self, inner: Communicator) -> None:
        self._inner, self.bytes = inner, 0
        self.rank, self.world_size = inner.rank, inner.world_size
        Counted.made = self

    def start(self, collective: Collective) -> Pending:
        self.bytes += collective.payload_bytes
        return self._inner.start(collective)


@dataclasses.dataclass
class Ran:
    """What rounds on several lanes came to, on one rank."""

    wrong: list[int]
    threads: int
    groups: int
    bytes_by_lane: int
    bytes_of_line: int
    longest_wait: float


def values_of(rank: int, turn: int) -> dict[str, Tensor]:
    return {"w": torch.full((ELEMENTS,), float(turn % 100 + rank))}


def on_one_line(count: int, compressor: Compressor | str = "all-reduce") -> list[Exchanger]:
    line = ProcessGroupLine(dist.distributed_c10d._get_default_group(), wrap_communicator=Counted, hook_timeout=20.0)
    return [
        Exchanger(values_of(0, 0), compressor, line=line, name=f"part {n}", policy="fused" if n % 2 else "fifo")
        for n in range(count)
    ]


def in_one_order(rank: int, lanes: int, turns: int) -> Ran:
    """Begin rounds on lanes in an order that all ranks share, at times that they do not, several under way."""
    exchangers = on_one_line(lanes)
    order, jitter = random.Random(0), random.Random(rank)
    under_way: list[tuple[int, float, Averaging]] = []
    wrong, longest = [], 0.0

    def end_one() -> None:
        nonlocal longest
        turn, begun, averaging = under_way.pop(0)
        into = {"w": torch.zeros(ELEMENTS)}
        averaging.write(into)
        longest = max(longest, time.perf_counter() - begun)
        if not torch.equal(into["w"], (values_of(0, turn)["w"] + values_of(1, turn)["w"]) / 2):
            wrong.append(turn)

    for turn in range(turns):
        chosen = exchangers[order.randrange(lanes)]
        begun = time.perf_counter()
        under_way.append((turn, begun, chosen.begin(values_of(rank, turn))))
        if jitter.random() < 0.1:
            time.sleep(0.002)
        if len(under_way) > 4:
            end_one()
    while under_way:
        end_one()
    threads = sum(thread.name == "commhooks" for thread in threading.enumerate())
    worker = exchangers[0]._engine.line._worker  # type: ignore[attr-defined]
    groups = len(worker.connection.groups)
    counted = sum(exchanger.statistics().payload_bytes for exchanger in exchangers)
    for exchanger in exchangers:
        exchanger.close()
    return Ran(wrong, threads, groups, counted, Counted.made.bytes, longest)


def in_another_order(rank: int, policy: str) -> list[Told]:
    """Begin rounds of two lanes, of equal sizes, in another order on rank 1; return what each of the two raises."""
    exchangers = on_one_line(3)
    one, other = (exchangers[0], exchangers[2]) if policy == "fifo" else (exchangers[1], exchangers[2])
    for exchanger in exchangers:
        exchanger.average(values_of(rank, 0))
    rounds = [exchanger.begin(values_of(rank, 1)) for exchanger in ((one, other) if rank == 0 else (other, one))]
    return [told_by(averaging.wait) for averaging in rounds]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailsOnce(Compressor):
    """A sum that raises on rank 0 in its third step."""

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        if context.step == 2 and context.rank == 0:
            raise ZeroDivisionError("on purpose")
        yield commhooks.AllReduce(commhooks.Part(bucket.memory, in_place=True), average=True, last=True)


def one_fails(rank: int) -> list[Told]:
    """Return what every lane raises when one has failed: first that one, then those under way, then a later round."""
    exchangers = on_one_line(3, FailsOnce())
    for _ in range(2):
        for exchanger in exchangers:
            exchanger.average(values_of(rank, 0))
    rounds = [exchanger.begin(values_of(rank, 1)) for exchanger in (exchangers[1], exchangers[0], exchangers[2])]
    told = [told_by(averaging.wait) for averaging in rounds]
    return [*told, told_by(lambda: exchangers[2].average(values_of(rank, 2)))]


def closed_one_by_one(rank: int) -> tuple[list[Told], int]:
    """Close lanes one by one; return what a closed one raises, and how many threads are left at the end."""
    exchangers, told = on_one_line(3), []
    for closed in exchangers:
        for exchanger in exchangers[exchangers.index(closed) :]:
            exchanger.average(values_of(rank, 0))
        closed.close()
        told.append(told_by(lambda closed=closed: closed.average(values_of(rank, 0))))  # type: ignore[misc]
    return told, sum(thread.name == "commhooks" for thread in threading.enumerate())


def refused(rank: int) -> list[Told]:
    """Disagree about a lane that opens, and about one that replaces; the others go on."""
    line = ProcessGroupLine(dist.distributed_c10d._get_default_group(), hook_timeout=20.0)
    first = Exchanger(values_of(0, 0), "all-reduce", line=line)
    second = Exchanger(values_of(0, 0), "fp16" if rank else "bf16", line=line, name="second")
    first.average(values_of(rank, 0))
    told = [told_by(lambda: second.average(values_of(rank, 0))) for _ in range(2)]
    told.append(told_by(lambda: first.replace("top-k" if rank else "sign")))
    values = values_of(rank, 0)
    first.average(values)
    assert torch.equal(values["w"], torch.full((ELEMENTS,), 0.5))
    first.close()
    second.close()
    return told
