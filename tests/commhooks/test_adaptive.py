"""A controller over real attachments."""

from __future__ import annotations

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

CANDIDATES = ["all-reduce", "fp16", "int8", "powersgd(rank=2)", "powersgd(rank=1)"]
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
        names = [str(candidate) for candidate in self._controller.candidates]
        step = ladder()[names.index(str(self._controller.compressor))]
        self.now += 1
        return self._run.seen(step, link_at(self.now - 1))

    def probe(self, link: Found | None, seconds: float) -> Found:
        found = link_at(self.now - 1)
        return Found(found.rate, found.latency)


@on_ranks(2)
@pytest.mark.kernels
@pytest.mark.parametrize("kind", ["core", "torch"])
def test_replicas_are_equal_through_every_move_and_a_resumed_run_is_the_one_that_was_not_interrupted(
    rank: int, kind: str
) -> tuple[list[bytes], list[str]]:
    """On a link that changes: the means of all steps, bit for bit, and the decisions."""
    first, model = _controlled(kind)
    digests = _steps(rank, model, first, 0, SAVED)
    state, hooks = first.state_dict(), _attachment_of(first).gathered()
    digests += _steps(rank, model, first, SAVED, END)
    second, again = _controlled(kind)
    second.load_state_dict(state)
    _attachment_of(second).load_state_dict(hooks)
    second._meter.now = SAVED  # type: ignore[attr-defined]  # a Simulated
    digests_again = _steps(rank, again, second, SAVED, END)
    whole, resumed = (list(map(str, one.decisions)) for one in (first, second))
    moves = [line for line in whole if "to measure it" not in line]
    assert len(moves) >= 2 and any(line.startswith(f"step {CHANGE + 1}: ") for line in moves)
    assert (digests_again, resumed) == (digests[SAVED:], whole)
    for one in (first, second):
        assert str(one.compressor) == str(_attachment_of(one).compressor) == str(first.compressor)
        _attachment_of(one).close()
    assert str(first.compressor).startswith("powersgd")
    return digests, whole


def _controlled(kind: str) -> tuple[Adaptive, nn.Module]:
    model = given(kind)
    controller = Adaptive(commhooks.attach(model, CANDIDATES[0]), CANDIDATES)
    controller._meter = Simulated(controller)  # type: ignore[assignment]  # '"Simulated", variable has type "_Meter"'
    return controller, model


def _attachment_of(controller: Adaptive) -> Handle[Any]:
    assert isinstance(controller._attachment, Handle)
    return controller._attachment


def _steps(rank: int, model: nn.Module, controller: Adaptive, first: int, end: int) -> list[bytes]:
    digests = []
    for step in range(first, end):
        means = backward(model, _gradients(step)[rank])
        digests.append(digest_of(means))
        controller.step()
    return digests


def _gradients(step: int) -> Sequence[list[Tensor]]:
    return normal(zeros(*SHAPES), 2, seed=step)


@on_ranks(2)
def test_ranks_that_measure_this_machine_know_and_decide_the_same(rank: int) -> tuple[str, list[bytes]]:
    """Return the controller's state, and the means' digests."""
    told: list[object] = []
    model = given("core")
    attachment = commhooks.attach(model, "all-reduce")
    controller = Adaptive(attachment, CANDIDATES, on_decision=told.append)
    assert controller.step() is None  # no step was taken
    digests = _steps(rank, model, controller, 0, 24)
    assert controller.link is not None and controller.metrics()["commhooks/adaptive/link_rate"] == controller.link.rate
    assert controller.compressor == attachment.compressor
    assert told == controller.decisions
    attachment.close()
    assert len(told) >= len(CANDIDATES) - 1
    return str(controller.state_dict()), digests


REFUSED: dict[str, tuple[str, str]] = {
    "one candidate": ("SettingsError", "candidates must be at least two compressors"),
    "no ladder": ("SettingsError", "candidates must be at least two compressors"),
    "unknown": ("SettingsError", "Did you mean 'powersgd'"),
    "twice": ("SettingsError", "is there twice"),
    "no average": ("SettingsError", "noop averages nothing"),
    "not in use": ("SettingsError", "must be one of the candidates"),
    "this model": ("SettingsError", "'head.*' must match a parameter's name"),
    "another ladder": ("AttachError", "ranks disagree: candidates: "),
    "another's state": ("CheckpointError", "candidates: saved"),
    "damaged state": ("CheckpointError", "another version of commhooks saved it. state: expected the entries"),
    "another rank's state": ("CheckpointError", "state.decider.candidate: 0 (rank 0), 1 (rank 1)"),
    "no step": ("CheckpointError", "state.decisions[0].step: expected a whole number of at least 0, got -1"),
    "another rule": ("CheckpointError", "saved AdaptiveRule(margin=0.05, look=4), now AdaptiveRule(margin"),
    "no rule": ("CheckpointError", "the state is damaged. state.decider.rule: AdaptiveRule(look=0)"),
    "fewer samples": ("CheckpointError", "number of samples: saved 2, now 5"),
    "replaced by another": ("SettingsError", "in use, bf16, must be one of the candidates"),
    "detached": ("AttachError", ""),
    "one rank": ("SettingsError", "at least 2 are needed"),
}  # fmt: skip
"""What a controller is refused for, on every rank: the error and its words."""


@facts
def a_controller_that_cannot_work_raises_on_every_rank_and_the_attachment_stays(rank: int) -> None:
    model = given("core")
    attachment = commhooks.attach(model, "all-reduce")

    def refused(ladder: Any) -> Told:
        told = told_by(lambda: Adaptive(attachment, ladder))
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
        "another ladder": refused(["all-reduce", "fp16" if rank == 0 else "bf16"]),
    }
    of_another_rank = refused(["all-reduce", "fp16" if rank == 0 else "powersdg"])
    assert of_another_rank.error == ("SettingsError" if rank else "AttachError")
    assert rank or "rank 1 cannot take part: " in of_another_rank.text
    controller = Adaptive(attachment, CANDIDATES)
    other = Adaptive(attachment, CANDIDATES[:2])
    state = controller.state_dict()
    decider = state["decider"]
    states: dict[str, Any] = {
        "another's state": other.state_dict(),
        "damaged state": {"candidates": CANDIDATES},
        "another rank's state": state | {"decider": decider | {"candidate": rank}},
        "no step": state | {"decisions": [{"step": -1, "source": "a", "target": "b", "reason": "c"}]},
        "another rule": state | {"decider": decider | {"rule": {"margin": 0.05, "look": 4}}},
        "no rule": state | {"decider": decider | {"rule": {"margin": 0.05, "look": 0}}},
        "fewer samples": state | {"decider": decider | {"samples": decider["samples"][:2]}},
    }
    told |= {what: told_by(functools.partial(controller.load_state_dict, each)) for what, each in states.items()}
    of_another_rank = told_by(lambda: controller.load_state_dict({"candidates": CANDIDATES} if rank else state))
    assert of_another_rank.error == "CheckpointError" and (rank or "rank 1 cannot take part" in of_another_rank.text)
    assert (controller.state_dict(), str(attachment.compressor)) == (state, str(controller.candidates[0]))
    backward(model, _gradients(0)[rank])
    controller.step()
    told["replaced by another"] = _replaced_under_it(controller, model, rank)
    attachment.close()
    told["detached"] = told_by(lambda: Adaptive(attachment, CANDIDATES))
    alone = commhooks.attach(
        given("core", process_group=[dist.new_group([one]) for one in range(2)][rank]), "all-reduce"
    )
    told["one rank"] = told_by(lambda: Adaptive(alone, CANDIDATES))
    alone.close()
    assert told.keys() == REFUSED.keys()
    for what, (error, words) in REFUSED.items():
        assert told[what].error == error and words in told[what].text, (what, told[what])


def _replaced_under_it(controller: Adaptive, model: nn.Module, rank: int) -> Told:
    """Replace the compressor without the controller; it must follow to a candidate, and raise for what is none."""
    attachment = _attachment_of(controller)
    attachment.replace(controller.candidates[2])
    backward(model, _gradients(1)[rank])
    assert controller.step() is None and controller.compressor == attachment.compressor == controller.candidates[2]
    attachment.replace("bf16")
    told = told_by(controller.step)
    attachment.replace(controller.candidates[2])
    return told


@facts
def what_was_measured_with_another_number_of_ranks_is_measured_anew_from_the_saved_candidate(rank: int) -> None:
    model = given("core")
    controller = Adaptive(commhooks.attach(model, "all-reduce"), CANDIDATES)
    _steps(rank, model, controller, 0, 6)
    state = controller.state_dict()
    assert (state["decider"]["candidate"], len(state["decisions"])) == (CANDIDATES.index("int8"), 2)
    controller.load_state_dict({**state, "ranks": 3})
    assert (len(controller.decisions), controller.link) == (2, None)
    assert str(controller.compressor) == str(_attachment_of(controller).compressor) == str(controller.candidates[2])
    _attachment_of(controller).close()


test = facts.tests()
