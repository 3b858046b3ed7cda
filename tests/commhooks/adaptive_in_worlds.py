"""What the tests of the controller run on every rank."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks import Adaptive, Attachment, make_compressor
from commhooks.planning.deciding import Decider, Seen
from commhooks.planning.links import Link
from tests.commhooks.mirrored import SHAPES, backward, given
from tests.commhooks.models import digest_of
from tests.commhooks.simulated_ladder import FAST, SLOW, Run, ladder
from tests.commhooks.told import Told, told_by
from tests.commhooks.workers import normal, zeros

LADDER = ["all-reduce", "fp16", "int8", "powersgd(rank=2)", "powersgd(rank=1)"]
CHANGE, SAVED, END = 30, 36, 60


def link_at(step: int) -> Link:
    return FAST if step < CHANGE else SLOW


class Simulated:
    """What a controller would measure on a simulated link; the exchange of it is left out."""

    ranks = 2

    def __init__(self, controller: Adaptive) -> None:
        self._run = Run(ladder(), link_at)
        self._controller = controller
        self.now = 0

    def start(self) -> None:
        """Do nothing: no clock is read."""

    def seen(self) -> Seen:
        rungs = [str(rung) for rung in self._controller.ladder]
        step = ladder()[rungs.index(str(self._controller.compressor))]
        self.now += 1
        return self._run.seen(step, link_at(self.now - 1))

    def probe(self, decider: Decider) -> Link:
        return link_at(self.now - 1)

    def gathered(self, text: str) -> list[str]:
        return [text] * self.ranks


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run on one rank."""

    digests: list[bytes]
    compressors: list[str]
    decisions: list[str]


def saved_and_resumed(rank: int, kind: str) -> tuple[Trained, Trained]:
    """Return a run on a link that changes, and a run resumed from its state after the change, from then on."""
    whole, model = _controlled(kind)
    digests = _steps(rank, model, whole, 0, SAVED)
    state, hooks = whole.state_dict(), _attachment_of(whole).gathered()
    digests += _steps(rank, model, whole, SAVED, END)
    resumed, again = _controlled(kind)
    resumed.load_state_dict(state)
    _attachment_of(resumed).load_state_dict(hooks)
    _simulated(resumed).now = SAVED
    digests_again = _steps(rank, again, resumed, SAVED, END)
    return _trained(whole, digests), _trained(resumed, digests_again)


def _controlled(kind: str) -> tuple[Adaptive, nn.Module]:
    model = given(kind)
    controller = Adaptive(commhooks.attach(model, LADDER[0]), LADDER)
    controller._meter = Simulated(controller)  # type: ignore[assignment]  # '"Simulated", variable has type "_Meter"'
    return controller, model


def _attachment_of(controller: Adaptive) -> Attachment:
    assert isinstance(controller._attachment, Attachment)
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
    attachment.detach()
    return Trained(digests, compressors, list(map(str, controller.decisions)))


def measured(rank: int, kind: str) -> tuple[str, list[bytes], int]:
    """Let a controller measure this machine; return its state, the means' digests, and how often it was told."""
    told: list[object] = []
    model = given(kind)
    attachment = commhooks.attach(model, "all-reduce")
    controller = Adaptive(attachment, LADDER, on_decision=told.append)
    assert controller.step() is None  # no step was taken
    digests = _steps(rank, model, controller, 0, 24)
    assert controller.link is not None and controller.metrics()["commhooks/adaptive/link_rate"] == controller.link.rate
    assert controller.compressor == attachment.compressor
    assert told == controller.decisions
    attachment.detach()
    return str(controller.state_dict()), digests, len(told)


def refusals(rank: int, kind: str) -> dict[str, Told]:
    """Ask for controllers that cannot be; the attachment must stay as it was after each."""
    model = given(kind)
    attachment = commhooks.attach(model, "all-reduce")

    def refused(ladder: Any, **settings: Any) -> Told:
        told = told_by(lambda: Adaptive(attachment, ladder, **settings))
        assert attachment.compressor == make_compressor("all-reduce")
        return told

    told = {
        "one rung": refused(["all-reduce"]),
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
    elsewhere = {**state, "decider": {**state["decider"], "rung": rank}}
    told["another rank's state"] = told_by(lambda: controller.load_state_dict(elsewhere))
    told["another rank's damaged state"] = told_by(lambda: controller.load_state_dict(damaged if rank else state))
    told["no rung"] = told_by(
        lambda: controller.load_state_dict({**state, "decider": {**state["decider"], "rung": ""}})
    )
    made = {"step": -1, "source": "a", "target": "b", "reason": "c"}
    told["no step"] = told_by(lambda: controller.load_state_dict({**state, "decisions": [made]}))
    told["no ranks"] = told_by(lambda: controller.load_state_dict({**state, "ranks": "2"}))
    assert (controller.state_dict(), str(attachment.compressor)) == (state, str(controller.ladder[0]))
    backward(model, _gradients(0)[rank])
    controller.step()
    told["replaced by another"] = _replaced_under_it(controller, model, rank)
    attachment.detach()
    told["detached"] = told_by(lambda: Adaptive(attachment, LADDER))
    alone = commhooks.attach(given(kind, process_group=_own_group(rank)), "all-reduce")
    told["one rank"] = told_by(lambda: Adaptive(alone, LADDER))
    alone.detach()
    return told


def _replaced_under_it(controller: Adaptive, model: nn.Module, rank: int) -> Told:
    """Replace the compressor without the controller; it must follow to a rung, and raise for what is none."""
    attachment = _attachment_of(controller)
    attachment.replace(controller.ladder[2])
    backward(model, _gradients(1)[rank])
    assert controller.step() is None and controller.compressor == attachment.compressor == controller.ladder[2]
    attachment.replace("bf16")
    told = told_by(controller.step)
    attachment.replace(controller.ladder[2])
    return told


def without_a_rank(rank: int, kind: str, limit: float) -> tuple[Told, float]:
    """Call `step` on rank 1 only when the others have given up; return what each was told, and after how long."""
    model = given(kind)
    controller = Adaptive(commhooks.attach(model, "all-reduce", hook_timeout=limit), LADDER)
    backward(model, _gradients(0)[rank % 2])
    if rank == 1:
        time.sleep(limit + 2)
    began = time.monotonic()
    return told_by(controller.step), time.monotonic() - began


def of_other_ranks(rank: int, kind: str) -> list[object]:
    """Load the state of a controller that had three ranks; return what is known then."""
    model = given(kind)
    controller = Adaptive(commhooks.attach(model, "all-reduce"), LADDER)
    _steps(rank, model, controller, 0, 6)
    state = controller.state_dict()
    rungs = state["decider"]["rung"], len(state["decisions"])
    controller.load_state_dict({**state, "ranks": 3})
    found: list[object] = [rungs == (LADDER.index("int8"), 2), len(controller.decisions), controller.link]
    found.append(str(controller.compressor) == str(_attachment_of(controller).compressor) == str(controller.ladder[2]))
    _attachment_of(controller).detach()
    return found


def _own_group(rank: int) -> Any:
    groups = [dist.new_group([one]) for one in range(dist.get_world_size())]
    return groups[rank]
