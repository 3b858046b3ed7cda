"""A controller over real attachments."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks import Handle, make_compressor
from commhooks.control import Adaptive
from commhooks.control.decider import StepTimes
from commhooks.control.link import Link as Found
from commhooks.experiments.timing.link import Link
from tests.commhooks.mirrored import SHAPES, backward, given
from tests.commhooks.models import digest_of
from tests.commhooks.simulated_ladder import FAST, SLOW, Run, ladder
from tests.commhooks.told import Told, told_by
from tests.commhooks.workers import normal, zeros
from tests.ddp_core.facts import Facts
from tests.world import on_ranks

facts = Facts()

LADDER = ["all-reduce", "fp16", "int8", "powersgd(rank=2)", "powersgd(rank=1)"]
CHANGE, SAVED, END = 30, 36, 60


def link_at(step: int) -> Link:
    return FAST if step < CHANGE else SLOW


class Simulated:
    """What a controller would measure on a simulated link; the exchange of it is left out."""

    ranks = 2

    def __init__(self, controller: Adaptive) -> None:
        self.group = controller._meter.group
        self._run = Run(ladder(), link_at)
        self._controller = controller
        self.now = 0

    def start(self) -> None:
        """Do nothing: no clock is read."""

    def step_times(self) -> StepTimes:
        names = [str(candidate) for candidate in self._controller.ladder]
        step = ladder()[names.index(str(self._controller.compressor))]
        self.now += 1
        return self._run.seen(step, link_at(self.now - 1))

    def probe(self, link: Found | None, seconds: float) -> Found:
        found = link_at(self.now - 1)
        return Found(found.rate, found.latency)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run on one rank."""

    digests: list[bytes]
    compressors: list[str]
    decisions: list[str]


@on_ranks(2)
@pytest.mark.kernels
@pytest.mark.parametrize("kind", ["core", "torch"])
def test_replicas_are_equal_through_every_move_and_a_resumed_run_is_the_one_that_was_not_interrupted(
    rank: int, kind: str
) -> Trained:
    """On a link that changes: the means of all steps, bit for bit, and the decisions."""
    first, model = _controlled(kind)
    digests = _steps(rank, model, first, 0, SAVED)
    state, hooks = first.state_dict(), _attachment_of(first).gathered()
    digests += _steps(rank, model, first, SAVED, END)
    second, again = _controlled(kind)
    second.load_state_dict(state)
    _attachment_of(second).load_state_dict(hooks)
    _simulated(second).now = SAVED
    digests_again = _steps(rank, again, second, SAVED, END)
    whole, resumed = _trained(first, digests), _trained(second, digests_again)
    moves = [line for line in whole.decisions if "to measure it" not in line]
    assert len(moves) >= 2 and any(line.startswith(f"step {CHANGE + 1}: ") for line in moves)
    assert resumed.digests == whole.digests[SAVED:]
    assert (resumed.compressors, resumed.decisions) == (whole.compressors, whole.decisions)
    assert resumed.compressors[0].startswith("powersgd")
    return whole


def _controlled(kind: str) -> tuple[Adaptive, nn.Module]:
    model = given(kind)
    controller = Adaptive(commhooks.attach(model, LADDER[0]), LADDER)
    controller._meter = Simulated(controller)  # type: ignore[assignment]  # '"Simulated", variable has type "_Meter"'
    return controller, model


def _attachment_of(controller: Adaptive) -> Handle[Any]:
    assert isinstance(controller._attachment, Handle)
    return controller._attachment


def _simulated(controller: Adaptive) -> Any:
    return controller._meter


def _steps(rank: int, model: nn.Module, controller: Adaptive, first: int, end: int) -> list[bytes]:
    digests = []
    for step in range(first, end):
        means = backward(model, _gradients(step)[rank])
        digests.append(digest_of(means))
        controller.step()
    return digests


def _gradients(step: int) -> Sequence[list[Tensor]]:
    return normal(zeros(*SHAPES), 2, seed=step)


def _trained(controller: Adaptive, digests: list[bytes]) -> Trained:
    attachment = _attachment_of(controller)
    compressors = [str(attachment.compressor), str(controller.compressor)]
    attachment.close()
    return Trained(digests, compressors, list(map(str, controller.decisions)))


@on_ranks(2)
def test_ranks_that_measure_this_machine_know_and_decide_the_same(rank: int) -> tuple[str, list[bytes]]:
    """Return the controller's state, and the means' digests."""
    told: list[object] = []
    model = given("core")
    attachment = commhooks.attach(model, "all-reduce")
    controller = Adaptive(attachment, LADDER, on_decision=told.append)
    assert controller.step() is None  # no step was taken
    digests = _steps(rank, model, controller, 0, 24)
    assert controller.link is not None and controller.metrics()["commhooks/adaptive/link_rate"] == controller.link.rate
    assert controller.compressor == attachment.compressor
    assert told == controller.decisions
    attachment.close()
    assert len(told) >= len(LADDER) - 1
    return str(controller.state_dict()), digests


@facts
def a_controller_that_cannot_work_raises_on_every_rank_and_the_attachment_stays(rank: int) -> None:
    model = given("core")
    attachment = commhooks.attach(model, "all-reduce")

    def refused(ladder: Any, **settings: Any) -> Told:
        told = told_by(lambda: Adaptive(attachment, ladder, **settings))
        assert attachment.compressor == make_compressor("all-reduce")
        return told

    told = {
        "one candidate": refused(["all-reduce"]),
        "no ladder": refused("all-reduce"),
        "unknown": refused(["all-reduce", "powersdg"]),
        "twice": refused(["all-reduce", "fp16", "fp16"]),
        "no average": refused(["all-reduce", "noop"]),
        "not in use": refused(["fp16", "int8"]),
        "this model": refused(["all-reduce", make_compressor("powersgd", skip=("head.*",))]),
        "another rank's": refused(["all-reduce", "fp16" if rank == 0 else "powersdg"]),
        "another ladder": refused(["all-reduce", "fp16" if rank == 0 else "bf16"]),
    }
    controller = Adaptive(attachment, LADDER)
    other = Adaptive(attachment, LADDER[:2])
    told["another's state"] = told_by(lambda: controller.load_state_dict(other.state_dict()))
    told["damaged state"] = told_by(lambda: controller.load_state_dict({"ladder": LADDER}))
    state = controller.state_dict()
    damaged: dict[str, Any] = {"ladder": LADDER}
    elsewhere = {**state, "decider": {**state["decider"], "candidate": rank}}
    told["another rank's state"] = told_by(lambda: controller.load_state_dict(elsewhere))
    told["another rank's damaged state"] = told_by(lambda: controller.load_state_dict(damaged if rank else state))
    refusals = {what: functools.partial(controller.load_state_dict, each) for what, each in _damaged(state).items()}
    told |= {what: told_by(load) for what, load in refusals.items()}
    assert (controller.state_dict(), str(attachment.compressor)) == (state, str(controller.ladder[0]))
    backward(model, _gradients(0)[rank])
    controller.step()
    told["replaced by another"] = _replaced_under_it(controller, model, rank)
    attachment.close()
    told["detached"] = told_by(lambda: Adaptive(attachment, LADDER))
    alone = commhooks.attach(given("core", process_group=_own_group(rank)), "all-reduce")
    told["one rank"] = told_by(lambda: Adaptive(alone, LADDER))
    alone.close()
    errors = {what: one.error for what, one in told.items()}
    assert errors == dict.fromkeys(told, "SettingsError") | {
        "another rank's": "SettingsError" if rank else "AttachError",
        "another ladder": "AttachError",
        "another's state": "CheckpointError",
        "damaged state": "CheckpointError",
        "another rank's state": "CheckpointError",
        "another rank's damaged state": "CheckpointError",
        "no candidate": "CheckpointError",
        "no step": "CheckpointError",
        "no ranks": "CheckpointError",
        "another rule": "CheckpointError",
        "no rule": "CheckpointError",
        "fewer samples": "CheckpointError",
        "detached": "AttachError",
    }
    assert "ladder must have at least two compressors" in told["one candidate"].text
    assert "ladder must have at least two compressors" in told["no ladder"].text
    assert "Did you mean 'powersgd'" in told["unknown"].text
    assert "is there twice" in told["twice"].text
    assert "noop averages nothing" in told["no average"].text
    assert "must be a candidate of the ladder" in told["not in use"].text
    assert "'head.*' must match a parameter's name" in told["this model"].text
    assert "'powersdg'" in told["another rank's"].text
    assert rank or "rank 1 cannot take part" in told["another rank's"].text
    assert "ranks disagree: ladder: " in told["another ladder"].text
    assert "ladder: saved" in told["another's state"].text
    assert "state.decider.candidate: 0 (rank 0), 1 (rank 1)" in told["another rank's state"].text
    assert rank or "rank 1 cannot take part" in told["another rank's damaged state"].text
    assert "another version of commhooks saved it. state: expected the entries ladder" in told["damaged state"].text
    assert "state.decider.candidate: expected a whole number" in told["no candidate"].text
    assert "state.decisions[0].step: expected a whole number of at least 0, got -1" in told["no step"].text
    assert "state.ranks: expected a whole number of at least 0, got '2'" in told["no ranks"].text
    assert "saved AdaptiveRule(margin=0.05, look=4), now AdaptiveRule(margin" in told["another rule"].text
    assert "the state is damaged. state.decider.rule: AdaptiveRule(look=0)" in told["no rule"].text
    assert "number of samples: saved 2, now 5" in told["fewer samples"].text
    assert "in use, bf16, must be a candidate" in told["replaced by another"].text
    assert "at least 2 are needed" in told["one rank"].text


def _damaged(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return states of which one entry is damaged, or another controller's."""
    decider, made = state["decider"], {"step": -1, "source": "a", "target": "b", "reason": "c"}
    return {
        "no candidate": {**state, "decider": {**decider, "candidate": ""}},
        "no step": {**state, "decisions": [made]},
        "no ranks": {**state, "ranks": "2"},
        "another rule": {**state, "decider": {**decider, "rule": {"margin": 0.05, "look": 4}}},
        "no rule": {**state, "decider": {**decider, "rule": {"margin": 0.05, "look": 0}}},
        "fewer samples": {**state, "decider": {**decider, "samples": decider["samples"][:2]}},
    }


def _replaced_under_it(controller: Adaptive, model: nn.Module, rank: int) -> Told:
    """Replace the compressor without the controller; it must follow to a candidate, and raise for what is none."""
    attachment = _attachment_of(controller)
    attachment.replace(controller.ladder[2])
    backward(model, _gradients(1)[rank])
    assert controller.step() is None and controller.compressor == attachment.compressor == controller.ladder[2]
    attachment.replace("bf16")
    told = told_by(controller.step)
    attachment.replace(controller.ladder[2])
    return told


@facts
def what_was_measured_with_another_number_of_ranks_is_measured_anew_from_the_saved_candidate(
    rank: int,
) -> None:
    model = given("core")
    controller = Adaptive(commhooks.attach(model, "all-reduce"), LADDER)
    _steps(rank, model, controller, 0, 6)
    state = controller.state_dict()
    assert (state["decider"]["candidate"], len(state["decisions"])) == (LADDER.index("int8"), 2)
    controller.load_state_dict({**state, "ranks": 3})
    assert (len(controller.decisions), controller.link) == (2, None)
    assert str(controller.compressor) == str(_attachment_of(controller).compressor) == str(controller.ladder[2])
    _attachment_of(controller).close()


def _own_group(rank: int) -> Any:
    groups = [dist.new_group([one]) for one in range(dist.get_world_size())]
    return groups[rank]


test = facts.tests()
