"""Engines that share a connection: one thread, one group, one order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
import random
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commhooks
from commhooks import CollectiveError, Exchanger
from commhooks.communicators import Collective, Communicator, Pending
from commhooks.exchange import Averaging
from commhooks.exchange.exchanger import TensorChannel
from commhooks.language import AllReduce, BucketView, Compressor, Context, Exchange, Part
from commhooks.lockstep import average_in_lockstep, lockstep_connections
from commhooks.scheduling import connection as connections
from commhooks.scheduling.connection import ProcessGroupConnection
from tests.commhooks.told import told_by
from tests.ddp_core.facts import Facts
from tests.world import on_ranks

facts = Facts()

ELEMENTS = 24


class Counted:
    """A communicator that counts the bytes of everything that a connection sends for its channels."""

    made: Counted

    def __init__(self, inner: Communicator) -> None:
        self._inner, self.bytes = inner, 0
        self.rank, self.world_size = inner.rank, inner.world_size
        Counted.made = self

    def start(self, collective: Collective) -> Pending:
        self.bytes += collective.payload_bytes
        return self._inner.start(collective)


def values_of(rank: int, turn: int) -> dict[str, Tensor]:
    return {"w": torch.full((ELEMENTS,), float(turn % 100 + rank))}


def threads_of_lines() -> int:
    return sum(thread.name == "commhooks" for thread in threading.enumerate())


def on_one_connection(count: int, compressor: Compressor | str = "all-reduce") -> list[Exchanger]:
    connection = ProcessGroupConnection(
        dist.distributed_c10d._get_default_group(), wrap_communicator=Counted, hook_timeout=20.0
    )
    return [
        Exchanger(
            values_of(0, 0), compressor, connection=connection, name=f"part {n}", policy="fused" if n % 2 else "fifo"
        )
        for n in range(count)
    ]


@on_ranks(2)
def test_lanes_in_one_order_get_their_own_means_over_one_thread_and_group(rank: int) -> None:
    """Begin rounds on channels in an order that all ranks share, at times that they do not, several under way."""
    exchangers = on_one_connection(16)
    order, jitter = random.Random(0), random.Random(rank)
    under_way: list[tuple[int, Averaging]] = []

    def end_one() -> None:
        turn, averaging = under_way.pop(0)
        averaging.write(into := {"w": torch.zeros(ELEMENTS)})
        assert torch.equal(into["w"], (values_of(0, turn)["w"] + values_of(1, turn)["w"]) / 2), turn

    for turn in range(60):
        chosen = exchangers[order.randrange(len(exchangers))]
        under_way.append((turn, chosen.begin(values_of(rank, turn))))
        if jitter.random() < 0.1:
            time.sleep(0.002)
        if len(under_way) > 4:
            end_one()
    while under_way:
        end_one()
    assert threads_of_lines() == 1
    worker = exchangers[0].engine.connection._worker  # type: ignore[attr-defined]
    assert len(worker.private_group.groups) == 1
    assert sum(exchanger.statistics().payload_bytes for exchanger in exchangers) == Counted.made.bytes > 0
    for exchanger in exchangers:
        exchanger.close()


@facts
def lanes_in_another_order_are_named_on_every_rank_and_never_mixed(rank: int) -> None:
    """Swap two of equal sizes, so that nothing but the order tells them apart."""
    for number, _ in enumerate(("fifo", "fused")):
        exchangers = on_one_connection(3)
        one, other = exchangers[number], exchangers[2]
        for exchanger in exchangers:
            exchanger.average(values_of(rank, 0))
        rounds = [exchanger.begin(values_of(rank, 1)) for exchanger in ((one, other) if rank == 0 else (other, one))]
        for told in [told_by(averaging.wait) for averaging in rounds]:
            assert told.error == "CollectiveError" and told.seconds < 20.0
            assert "ranks hand in different things" in told.text
            assert f"rank 0: round 1, part {number}, bucket 0; rank 1: round 1, part 2, bucket 0." in told.text


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailsOnce(Compressor):
    """A sum that raises on one rank in one step."""

    rank: int = 0
    step: int = 2

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        if (context.rank, context.step) == (self.rank, self.step):
            raise ZeroDivisionError("on purpose")
        yield AllReduce(Part(bucket.memory, in_place=True), average=True, last=True)


@facts
def a_failure_on_one_lane_ends_all_and_names_it(rank: int) -> None:
    """First the one that fails, then those under way, then a later round."""
    exchangers = on_one_connection(3, FailsOnce())
    for _ in range(2):
        for exchanger in exchangers:
            exchanger.average(values_of(rank, 0))
    rounds = [exchanger.begin(values_of(rank, 1)) for exchanger in (exchangers[1], exchangers[0], exchangers[2])]
    told = [told_by(averaging.wait) for averaging in rounds]
    told.append(told_by(lambda: exchangers[2].average(values_of(rank, 2))))
    for one in told:
        assert one.error in ("CompressorError", "CollectiveError", "RuntimeError")
        assert "rank 0, round 2, part 1, bucket 0 (parameters w): ZeroDivisionError: on purpose" in one.text
    later = "rank 0, round 3, part 2, bucket 0 (parameters w): not started, because of"
    assert rank == 1 or told[-1].text.startswith(later)


@facts
def closing_a_lane_leaves_the_others_and_closing_the_last_ends_the_thread(rank: int) -> None:
    exchangers = on_one_connection(3)
    for closed in exchangers:
        for exchanger in exchangers[exchangers.index(closed) :]:
            exchanger.average(values_of(rank, 0))
        closed.close()
        told = told_by(lambda closed=closed: closed.average(values_of(rank, 0)))  # type: ignore[misc]
        assert told.text == "begin: this Exchanger was closed."
    assert threads_of_lines() == 0


@facts
def a_closed_lane_is_saved_as_it_is_after_the_round_under_way(rank: int) -> None:
    closed, other = on_one_connection(2)
    closed.average(values_of(rank, 0))
    time.sleep(0.3 * rank)
    averaging = closed.begin(values_of(rank, 1))
    closed.close()
    closed.state_dict()
    assert averaging.done()
    other.close()


@facts
def a_refused_comparison_ends_only_what_it_was_about(rank: int) -> None:
    """Disagree about a channel that opens, and about one that replaces."""
    connection = ProcessGroupConnection(dist.distributed_c10d._get_default_group(), hook_timeout=20.0)
    first = Exchanger(values_of(0, 0), "all-reduce", connection=connection)
    second = Exchanger(values_of(0, 0), "fp16" if rank else "bf16", connection=connection, name="second")
    first.average(values_of(rank, 0))
    for told in [told_by(lambda: second.average(values_of(rank, 0))) for _ in range(2)]:
        assert "ranks disagree" in told.text and "dtype: torch.bfloat16 (rank 0), torch.float16 (rank 1)" in told.text
    told = told_by(lambda: first.replace("top-k" if rank else "sign"))
    assert told.error == "AttachError" and "ranks disagree" in told.text
    values = values_of(rank, 0)
    first.average(values)
    assert torch.equal(values["w"], torch.full((ELEMENTS,), 0.5))
    first.close()
    second.close()


def test_workers_of_one_process_that_swap_channels_are_told() -> None:
    (one, other), (another, swapped) = (
        [Exchanger(values_of(0, 0), "fp16", connection=x) for _ in "ab"] for x in lockstep_connections(2)
    )
    with pytest.raises(
        CollectiveError, match="rank 0: channel 0, step 0, bucket 0; rank 1: channel 1, step 0, bucket 0"
    ):
        average_in_lockstep([one, swapped, other, another], [values_of(n % 2, 0) for n in range(4)])


def mean_of(rank: int, exchanger: Exchanger | TensorChannel) -> float:
    (name,) = exchanger.buffers
    exchanger.begin({name: torch.full((1,), float(rank))}).write({name: (value := torch.zeros(1))})
    return float(value)


def one_more(process_group: Any = None, name: str = "", tensor: str = "x") -> Exchanger:
    like = {tensor: torch.zeros(1)}
    return Exchanger(like, "all-reduce", process_group=process_group, hook_timeout=20.0, name=name)


def a_group() -> Exchanger:
    groups = {"a": {"x": torch.zeros(1)}, "b": {"y": torch.zeros(1)}}
    return Exchanger(groups, "all-reduce", hook_timeout=20.0)


def kept_alone() -> list[object]:
    """Make what can be made, and keep it; some of it is refused, closed or dropped at once."""
    nameless = one_more()
    kept: list[object] = [nameless, one_more(tensor="other"), one_more(name="named"), a_group()]
    for settings in ({"scaler": 3}, {"residuals": "none"}):
        try:
            Exchanger({"x": torch.zeros(1)}, "all-reduce", **settings)
        except commhooks.SettingsError as error:
            kept.append(error)  # the frames that raised exist as long as the error does
    connection = ProcessGroupConnection(dist.distributed_c10d._get_default_group(), label="Exchanger")
    closed = one_more()
    for one in (closed, a_group(), Exchanger({"x": torch.zeros(1)}, "all-reduce", connection=connection)):
        one.close()
    assert told_by(lambda: mean_of(0, closed)).text == "begin: this Exchanger was closed."
    one_more()
    with contextlib.suppress(TypeError):  # if it can be pickled one day, that must have no effect either
        kept.append(pickle.loads(pickle.dumps(nameless)))
    return [*kept, closed, connection]


@facts
def what_one_rank_alone_makes_and_keeps_has_no_effect_on_the_others(rank: int) -> None:
    """Make it before, between and after what all make, until all of that was used twice."""
    for odd in (0, 1):
        kept: list[object] = []
        made: list[TensorChannel] = []
        handles = []
        for _ in range(3):
            kept += kept_alone() if rank == odd else []
            handles += [one_more(), a_group()]
            made = [channel for one in handles for channel in one.values()]
            if len(made) > 3:  # the first are used after the next were made
                assert [mean_of(rank, one) for one in made] == [0.5] * len(made)
        for one in handles:
            one.close()


@facts
def equal_exchangers_are_paired_in_the_order_of_their_first_use(rank: int) -> None:
    """Not in the order of making, and whenever they are made."""
    made = [one_more() for _ in range(1 + rank)]
    assert mean_of(rank, made[0]) == 0.5
    made += [one_more() for _ in range(3 - rank)]
    made[2].open()
    averagings = {n: made[n].begin({"x": torch.full((1,), float(n))}) for n in ((1, 3, 2) if rank else (1, 2, 3))}
    for n, averaging in averagings.items():
        averaging.write({"x": (value := torch.zeros(1))})
        assert float(value) == n
    for exchanger in made:
        exchanger.close()


ALONE = "channel, in the order of first use: {} (rank 0), {} (rank 1)"
LATE = "equal ones made later and used earlier (make and use all in one order, or name each Exchanger): 0 (rank 0), 2"
DIFFERENT_ORDERS: list[tuple[list[dict[str, str]], int, str]] = [
    ([{"name": name} for name in "abc"], 0, ALONE.format("a", "b")),
    ([{"tensor": name} for name in "abc"], 0, "tensor a: "),
    ([{}, {}, {}], 2, LATE),
]


@facts
def exchangers_first_used_in_different_orders_are_refused_on_every_rank(rank: int) -> None:
    """Refuse them at once if they differ; equal ones at the first that shows it, with one made and kept in between."""
    for settings, right, told in DIFFERENT_ORDERS:
        made = [one_more(**of_one) for of_one in settings]
        if rank == 1:
            made.insert(1, one_more())
        in_turn = [made[n] for n in ((2, 3, 0) if rank else (0, 1, 2))]
        for one in in_turn[:right]:
            mean_of(rank, one)
        refused = told_by(functools.partial(mean_of, rank, in_turn[right]))
        assert refused.error == "AttachError" and f"ranks disagree. {told}" in refused.text


@facts
def an_exchanger_whose_first_use_fails_on_one_rank_lets_no_other_take_its_place(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    first, second = one_more(group), one_more(group)
    if rank == 0:
        told = told_by(lambda: first.average({"y": torch.zeros(1)}))
        assert told.error == "CompressorError" and told.seconds < 1
    else:
        assert "Missing: rank 0" in told_by(lambda: mean_of(rank, first)).text
    dist.barrier()
    assert mean_of(rank, second) == 0.5
    second.close()


class Interrupted(weakref.WeakSet[ProcessGroupConnection]):
    """Connections among which another thread makes one more while they are counted."""

    def __iter__(self) -> Iterator[ProcessGroupConnection]:
        for one in super().__iter__():
            thread = threading.Thread(target=one_more)
            thread.start()
            thread.join(0.2)  # it may have to wait
            yield one


@facts
def a_thread_may_make_an_exchanger_while_another_is_first_used(rank: int) -> None:
    kept, used = one_more(), one_more()
    with mock.patch.object(connections, "_unopened", Interrupted([kept.engine.connection, used.engine.connection])):  # type: ignore[list-item]  # a Connection
        assert mean_of(rank, used) == 0.5
    used.close()


@facts
def a_lane_is_not_mistaken_for_one_whose_name_reads_like_it_in_messages(rank: int) -> None:
    connection = ProcessGroupConnection(dist.distributed_c10d._get_default_group(), hook_timeout=20.0)
    made = [
        Exchanger({"x": torch.zeros(1)}, "all-reduce", connection=connection, name=name) for name in ("a", "a", "a, 1")
    ]
    assert [mean_of(rank, one) for one in made] == [0.5] * 3
    assert "ranks hand in different things" in told_by(lambda: mean_of(rank, made[1 + rank])).text


@facts
def on_a_shared_line_named_exchangers_may_be_kept_alone_and_nameless_ones_are_refused(rank: int) -> None:
    connection = ProcessGroupConnection(dist.distributed_c10d._get_default_group(), hook_timeout=20.0)
    names = ["a", "kept", "b", "", ""] if rank else ["a", "b", ""]
    made = [Exchanger({"x": torch.zeros(1)}, "all-reduce", connection=connection, name=name) for name in names]
    common = [one for one in made[:-1] if one.name in "ab"]
    for _ in range(2):
        assert [mean_of(rank, one) for one in common] == [0.5, 0.5]
    refused = told_by(lambda: mean_of(rank, made[-1]))
    assert (
        refused.error == "AttachError" and f"ranks disagree. {ALONE.format('channel 0', 'channel 1')}" in refused.text
    )
    assert [mean_of(rank, one) for one in common] == [0.5, 0.5]


test = facts.tests()
