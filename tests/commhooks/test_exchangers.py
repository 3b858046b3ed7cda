"""Groups of tensors, each in rounds of its own, over one thread and one private group."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import CheckpointError, Exchanger, SettingsError
from commhooks.communicators.parent_group import group_or_default
from commhooks.errors import CompressorError
from commhooks.exchange import ProcessGroupConnection
from commhooks.lockstep import average_in_lockstep, lockstep_connections
from commhooks.scheduling.lockstep import LockstepConnection, run_in_turns
from tests import bounds
from tests.commhooks.resuming import distance, roundtrip
from tests.commhooks.told import told_by
from tests.ddp_core.facts import Facts
from tests.world import on_ranks

facts = Facts()

GROUPS: dict[str, dict[str, Tensor]] = {
    "fragment 0 of 3": {"a": torch.zeros(24, 40), "b": torch.zeros(5, dtype=torch.float64)},
    "fragment 1 of 3": {"c": torch.zeros(64, 16)},
    "fragment 2 of 3": {"d": torch.zeros(())},
}


def drawn(label: str, rank: int, turn: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return {name: torch.randn(t.shape, generator=generator).to(t.dtype) for name, t in GROUPS[label].items()}


def alone(name: str, tensors: dict[str, Tensor], **settings: Any) -> Exchanger:
    return Exchanger(tensors, name, connection=lockstep_connections(1)[0], **settings)


def in_turns_of_one(exchanger: Exchanger) -> None:
    connection = exchanger.engine.connection
    assert isinstance(connection, LockstepConnection)
    run_in_turns([connection])


@pytest.mark.parametrize("name", ["all-reduce", "int4", "top-k", "powersgd"])
def test_tensors_written_in_the_room_get_the_means_of_tensors_that_are_copied(name: str) -> None:
    copied, written = (
        [Exchanger(GROUPS["fragment 0 of 3"], name, connection=connection) for connection in lockstep_connections(2)]
        for _ in range(2)
    )
    for turn in range(3):
        values = [drawn("fragment 0 of 3", rank, turn) for rank in range(2)]
        for exchanger, own in zip(written, values, strict=True):
            room = exchanger.buffers
            assert room.keys() == own.keys()
            for key, value in own.items():
                room[key].copy_(value)
        rounds = [exchanger.begin() for exchanger in written]
        run_in_turns([exchanger.engine.connection for exchanger in written])  # type: ignore[misc]  # LockstepConnections
        average_in_lockstep(copied, values)
        assert all(
            torch.equal(one.means[key], own[key]) for one, own in zip(rounds, values, strict=True) for key in own
        )
    memory = {buffer.data_ptr() for buffer in written[0]["gradients"].memories()}
    del rounds
    assert {place.data_ptr() for place in written[0].buffers.values()} & memory, (
        "the memory of a dropped round is used again"
    )


def test_the_room_is_another_one_while_means_are_read_and_nothing_is_sent_that_nobody_wrote() -> None:
    exchanger = alone("all-reduce", {"w": torch.zeros(3)})
    with pytest.raises(CompressorError, match="rank 0: begin without tensors sends what was written into `buffers`"):
        exchanger.begin()
    exchanger.buffers["w"].fill_(1)
    first = exchanger.begin()
    with pytest.raises(CompressorError, match="Exchanger.buffers: the last round is under way"):
        exchanger.buffers  # noqa: B018
    in_turns_of_one(exchanger)
    exchanger.buffers["w"].fill_(2)
    assert exchanger["gradients"].is_in_use and first.means["w"].tolist() == [1, 1, 1]
    first.write({"w": torch.zeros(3)})
    with pytest.raises(CompressorError, match=r"Averaging.means: the means were written"):
        first.means  # noqa: B018


@pytest.mark.parametrize("policy", ["fifo", "fused"])
def test_a_weighted_mean_counts_each_rank_by_its_weight(policy: Any) -> None:
    """Bound: each term is scaled once, by a quotient of two rounded sums, and then averaged; fp64 tensors in fp64."""
    weights = [1.3, 0.0, 0.1]  # none of them exact in fp32
    group, connections = GROUPS["fragment 0 of 3"], lockstep_connections(3, policy)
    workers = [Exchanger(group, "all-reduce", connection=connection, weighted=True) for connection in connections]
    values = [drawn("fragment 0 of 3", rank, 0) for rank in range(3)]
    values[1]["a"].fill_(math.nan)  # of weight 0
    rounds = [worker.begin(own, weight=w) for worker, own, w in zip(workers, values, weights, strict=True)]
    run_in_turns([worker.engine.connection for worker in workers])  # type: ignore[misc]  # LockstepConnections
    for name in ("a", "b"):
        mean = (1.3 * values[0][name].double() + 0.1 * values[2][name].double()) / 1.4
        dtype = values[0][name].dtype
        allowed = 5 * 3 * (bounds.of_mean(3, dtype) + 4 * torch.finfo(dtype).eps)  # |values| below 5
        assert all((one.means[name].double() - mean).abs().amax() <= allowed for one in rounds)
        assert torch.equal(rounds[0].means[name], rounds[1].means[name])


def test_a_rank_of_weight_0_sends_what_it_owes_and_nothing_else() -> None:
    """Its tensors do not count, but the residual of earlier rounds does, or it would never be sent."""
    like = {"w": torch.zeros(2)}
    workers = [
        Exchanger(like, "top-k:ratio=0.5", connection=connection, weighted=True)
        for connection in lockstep_connections(2, "fused")
    ]
    tensors = [{"w": torch.tensor([3.0, 1.0])}, {"w": torch.zeros(2)}]
    for weight, mean in ((1.0, [1.5, 0.0]), (0.0, [0.0, 0.5]), (0.0, [0.0, 0.0])):
        rounds = [worker.begin(own, weight=w) for worker, own, w in zip(workers, tensors, (weight, 1.0), strict=True)]
        run_in_turns([worker.engine.connection for worker in workers])  # type: ignore[misc]  # LockstepConnections
        assert rounds[1].means["w"].tolist() == mean


@pytest.mark.parametrize(("weight", "mean"), [(0, 0), (1e-30, 1), (1e30, 1)])
def test_weights_are_those_whose_sum_fp32_holds_and_of_none_the_mean_is_zero(weight: float, mean: float) -> None:
    """Two of 1e-46 were 0 there, and the means NaN."""
    exchanger = alone("all-reduce", {"w": torch.zeros(3)}, weighted=True)
    averaging = exchanger.begin({"w": torch.ones(3)}, weight=weight)
    in_turns_of_one(exchanger)
    assert averaging.means["w"].tolist() == [mean] * 3


@pytest.mark.parametrize(
    ("weighted", "weight"),
    [(True, None), (True, -1.0), (True, math.inf), (True, "2"), (False, 1.0), (True, 1e-46), (True, 1e39)],
)
def test_a_weight_is_given_if_and_only_if_the_exchanger_is_weighted(weighted: bool, weight: Any) -> None:
    exchanger = alone("all-reduce", {"w": torch.zeros(3)}, weighted=weighted)
    with pytest.raises(CompressorError, match=r"weight must be (0, or from 1e-30 to 1e\+30|None unless)"):
        exchanger.begin({"w": torch.zeros(3)}, weight=weight)


def test_votes_have_no_weights() -> None:
    for name in ("signum", commhooks.PerParameter(rules=(("w", commhooks.make_compressor("signum")),))):
        with pytest.raises(SettingsError, match="counts votes, which have no weights"):
            alone(name, {"w": torch.zeros(3)}, weighted=True)  # type: ignore[arg-type]  # a name or a compressor
    exchanger = alone("top-k", {"w": torch.zeros(3)}, weighted=True)
    with pytest.raises(SettingsError, match="counts votes"):
        exchanger.replace("signum")
    assert str(exchanger.compressor) == "top-k"


@on_ranks(2, store="tcp")
def test_exchangers_on_lines_with_labels_connect_at_once_in_any_order(rank: int) -> None:
    """Gloo waits in the store for peers; over one connection to it, each rank waited for the group that it made."""
    for _ in range(4):
        connections = [ProcessGroupConnection(group_or_default(None), label=label) for label in "abcd"]
        several = [Exchanger({"w": torch.zeros(3)}, "all-reduce", connection=connection) for connection in connections]
        in_order = several if rank == 0 else several[::-1]
        rounds = [one.begin({"w": torch.full((3,), 2.0 * rank)}) for one in in_order]
        assert all(averaging.means["w"].tolist() == [1, 1, 1] for averaging in rounds)
        for one in several:
            one.close()


@facts
def groups_are_saved_and_resumed_together_with_rounds_under_way(rank: int) -> None:
    """Save the state after the rounds, and resume a handle from it that goes on as the saved one does."""
    codecs = {"fragment 0 of 3": "top-k", "fragment 1 of 3": "powersgd", "fragment 2 of 3": "all-reduce"}
    one, other = (Exchanger(GROUPS, codecs, residuals="fp32") for _ in range(2))
    for turn in range(2):
        for label, exchanger in one.items():
            exchanger.average(drawn(label, rank, turn))
    one["fragment 0 of 3"].average(drawn("fragment 0 of 3", rank, 2))  # it is a round ahead
    rounds = [one[label].begin(drawn(label, rank, 3)) for label in list(one)[:2]]
    saved = one.state_dict()
    assert all(averaging.done() for averaging in rounds)
    del rounds
    other.load_state_dict(roundtrip(saved))
    assert [exchanger.steps for exchanger in other.values()] == [4, 3, 2]
    for turn in range(4, 6):
        for label in one:
            ours, theirs = drawn(label, rank, turn), drawn(label, rank, turn)
            one[label].average(ours)
            other[label].average(theirs)
            assert distance(ours, theirs) == 0
    assert distance(one.state_dict()["groups"], other.state_dict()["groups"]) == 0
    assert one.statistics().steps == 6 and other.statistics().steps == 2
    assert one.statistics().payload_bytes == sum(x.statistics().payload_bytes for x in one.values()) > 0
    assert set(one.by_parameter()) == {"a", "b", "c", "d"}
    assert one.memory().residuals == sum(x.memory().residuals for x in one.values()) > 0
    one.close()
    other.close()


@facts
def a_state_that_does_not_match_one_group_on_one_rank_is_loaded_nowhere(rank: int) -> None:
    exchangers = Exchanger(GROUPS, "top-k")
    for label, exchanger in exchangers.items():
        exchanger.average(drawn(label, rank, 0))
    saved = exchangers.state_dict()
    for label, exchanger in exchangers.items():
        exchanger.average(drawn(label, rank, 1))
    before = exchangers.state_dict()
    if rank:
        saved["groups"]["fragment 1 of 3"]["local"]["rank1"]["c"]["residual"].fill_(math.nan)
    told = told_by(lambda: exchangers.load_state_dict(saved))
    assert told.error == "CheckpointError", told
    assert "fragment 1 of 3: parameter 'c', entry 'residual' of rank 1: expected finite numbers" in told.text
    assert distance(exchangers.state_dict(), before) == 0
    told = told_by(lambda: exchangers.load_state_dict({"groups": 7}))
    assert "expected the state_dict() of a hook's state" in told.text
    exchangers.close()


def test_groups_in_turns_share_the_memory_of_the_largest() -> None:
    (connection,) = lockstep_connections(1)
    exchangers = Exchanger(GROUPS, "all-reduce", connection=connection, in_turns=True)
    rounds = []
    for label in GROUPS:
        rounds.append(exchangers[label].begin(drawn(label, 0, 0)))
        run_in_turns([connection])
        with pytest.raises(CompressorError, match="in use by a round of " + label):
            exchangers["fragment 0 of 3"].begin(drawn("fragment 0 of 3", 0, 1))
        rounds[-1].write(values := drawn(label, 0, 2))
        assert distance(values, drawn(label, 0, 0)) == 0
    report = exchangers.memory()
    assert report.gradients == 4 * max(24 * 40, 64 * 16) + 8 * 5, "fp32 of the largest group, and fp64"
    apart = Exchanger(GROUPS, "all-reduce", connection=lockstep_connections(1)[0])
    for label in GROUPS:
        apart[label].buffers  # noqa: B018
    assert apart.memory().gradients == 4 * (24 * 40 + 64 * 16 + 1) + 8 * 5


@pytest.mark.parametrize(
    ("groups", "settings", "complaint"),
    [
        ({}, {}, "must name at least one tensor"),
        ({"x": {"w": torch.zeros(1)}, "y": {"w": torch.zeros(1)}}, {}, "'w' is in two channels, x and y"),
        ({"x": {"w": torch.zeros(1)}}, {"compressor": {"y": "top-k"}}, "must be a compressor for each group"),
        ({"x": {"w": torch.zeros(1)}}, {"hook_timeout": 3.0}, "belong to the connection"),
    ],
)
def test_groups_that_cannot_work_are_refused(groups: Any, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        Exchanger(groups, settings.pop("compressor", "top-k"), connection=lockstep_connections(1)[0], **settings)


def test_no_group_switches_if_one_cannot() -> None:
    exchangers = Exchanger(GROUPS, "top-k", connection=lockstep_connections(1)[0])
    with pytest.raises(SettingsError, match="'c' must match a parameter"):
        exchangers.replace(commhooks.PerParameter(rules=(("c", commhooks.make_compressor("fp16")),)))
    with pytest.raises(SettingsError, match="replace: there is no channel other that could switch; fragment 0"):
        exchangers.replace({"other": "fp16"})
    assert {str(exchanger.compressor) for exchanger in exchangers.values()} == {"top-k"}
    exchangers.replace({"fragment 1 of 3": "fp16"})
    assert [str(exchanger.compressor) for exchanger in exchangers.values()] == ["top-k", "fp16", "top-k"]
    assert str(exchangers).count("fragment") == 3
    with pytest.raises(CheckpointError, match="it was saved with the channels x, and this run has"):
        exchangers.load_state_dict(
            {"layout": 4, "groups": {"x": alone("top-k", {"w": torch.zeros(3)}).state_dict()}, "shared": {}}
        )


test = facts.tests()
