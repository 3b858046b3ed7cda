"""A rank that is gone, or does not come, is named on the others by whatever they call next.

What happens in the middle of a step is in test_failure.py.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks.control import Adaptive
from tests.commhooks.mirrored import SHAPES, backward, given
from tests.commhooks.models import SparseTables, wrap
from tests.commhooks.ranks import be_impatient, survived
from tests.commhooks.told import Told, told_by
from tests.commhooks.workers import normal, zeros
from tests.ddp_core.facts import BOTH_DDPS
from tests.tiers import in_turn
from tests.world import run_world_outcomes, stay_away, tell

Calls = dict[str, Callable[[], object]]
NO_ANSWER, NOT_IN_TIME = "No answer from rank 1.", "hook_timeout=0.5 s. No answer from rank 1."
SAYS: dict[str, dict[str, tuple[str, ...]]] = {
    "killed": {
        "replacing": ("replace before step 2: CollectiveError: barrier failed", NO_ANSWER),
        "the step after": ("replace before step 2: CollectiveError: barrier failed", NO_ANSWER),
        "a large exchange": ("Connection", NO_ANSWER),
        "a controller": ("Adaptive.step: ", "all-reduce of a measurement failed", NO_ANSWER),
        "a step of machines": (NO_ANSWER,),
    },
    "late": {
        "the first sparse sum": ("could not connect to every rank within 0.5 s. Missing: rank 1",),
        "replacing": (NOT_IN_TIME,),
        "the step after": (NOT_IN_TIME,),
        "a large exchange": ("a collective was not done after " + NOT_IN_TIME,),
        "a controller": ("was not called within " + NOT_IN_TIME,),
        "a step of machines": (NOT_IN_TIME,),
    },
}
"""By what becomes of rank 1: what is called on the others, and what this raises."""
OF_DDPS = ("the step after", "the first sparse sum", "a step of machines")
"""Calls whose error comes through the DDP: PyTorch's knows RuntimeError only."""


def calls(rank: int, kind: str, limit: float | None) -> Calls:
    """Return what may be called, over connections of their own that are open by now."""
    gradients = normal(zeros(*SHAPES), 4, seed=0)[rank]
    model, controlled, of_machines = given(kind), given(kind), given(kind)
    attachment = commhooks.attach(model, "powersgd", hook_timeout=limit)
    controller = Adaptive(commhooks.attach(controlled, "all-reduce", hook_timeout=limit), ["all-reduce", "fp16"])
    machines = commhooks.Hierarchical(inner=commhooks.make_compressor("powersgd", rank=2), size=2)
    commhooks.attach(of_machines, machines, hook_timeout=limit)
    for _ in range(2):
        backward(model, gradients)
        backward(of_machines, gradients)
    backward(controlled, gradients)
    exchanger = commhooks.Exchanger({"w": torch.zeros(2**20)}, "int8", hook_timeout=limit)
    exchanger.average({"w": torch.ones(2**20)})
    tables = wrap(kind, SparseTables())
    commhooks.attach(tables, "powersgd", hook_timeout=limit)
    loss = tables(torch.tensor([rank]))
    return {
        "replacing": functools.partial(attachment.replace, "fp16"),
        "the step after": functools.partial(backward, model, gradients),
        "a step of machines": functools.partial(backward, of_machines, gradients),
        "a large exchange": lambda: exchanger.average({"w": torch.ones(2**20)}),
        "a controller": controller.step,
        "the first sparse sum": functools.partial(backward_of, tables, loss),
    }


def backward_of(model: nn.Module, loss: Tensor) -> None:
    """Run the backward pass of a model, which must exist until then."""
    loss.backward()


def lose_rank_1(rank: int, how: str, kind: str) -> dict[str, Told]:
    """Let rank 1 be killed, or stay away until rank 0 has told, and call everything; return what was told."""
    if how == "late":
        be_impatient()
    made = calls(rank, kind, 0.5 if how == "late" else None)
    dist.barrier()
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        stay_away()
    told = {what: told_by(made[what]) for what in (["a large exchange"] if rank == 1 else SAYS[how])}
    tell(rank)
    return told


@pytest.mark.parametrize(("how", "kind"), in_turn(list(SAYS), BOTH_DDPS))
def test_a_rank_that_is_killed_or_late_is_named_by_whatever_is_called_next(how: str, kind: str) -> None:
    first, lost, *others = run_world_outcomes(lose_rank_1, 4, how, kind, check_exit=False)
    assert lost.exit_code == (-signal.SIGKILL if how == "killed" else 0)
    for outcome in (first, *others):
        assert survived(outcome), outcome.describe()
        for what, words in SAYS[how].items():
            told: Told = outcome.value[what]
            assert all(word in told.text for word in words), (what, told)
            assert told.error == "CollectiveError" or what in OF_DDPS, (what, told)
            assert how == "killed" or what in ("the step after", "a step of machines") or told.seconds >= 0.5, (
                what,
                told,
            )
    if how == "late":
        assert lost.value["a large exchange"].error == "CollectiveError"
        assert "hook_timeout" in lost.value["a large exchange"].text
