"""Real steps under hooks, in turns, with which a plan's predictions are compared."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

import commhooks
from commhooks.communicators.private_group import WrapCommunicator
from commhooks.devices import wait_for_device
from commhooks.experiments.planning.candidates import Candidate
from commhooks.experiments.training.stepper import Stepper
from commhooks.experiments.turns import on_slowest
from commhooks.scheduling.policy import POLICIES, PolicyName

_IN_A_TURN = 3  # steps that count; one before them does not, as in a profile
_LEAST_TURNS, _MOST_TURNS = 3, 14


def measure_steps(
    step: Stepper, candidates: Sequence[Candidate], seconds: float, wrap: WrapCommunicator | None = None
) -> Mapping[str, Sequence[float]]:
    """Return the seconds of steps under every hook, each taken from the slowest rank.

    The hooks take turns for at most `seconds`, but at least three turns each. All ranks return the same.
    """
    found: dict[str, list[float]] = {one.label: [] for one in candidates}
    deadline = time.perf_counter() + seconds
    for turn in range(_MOST_TURNS):
        begun = time.perf_counter()
        for policy in POLICIES:
            own = [one for one in candidates if one.policy == policy]
            if own:
                _turn(step, own, policy, wrap, found)
        now = time.perf_counter()
        is_last = torch.tensor(float(2 * now - begun > deadline and turn + 1 >= _LEAST_TURNS))
        dist.broadcast(is_last, 0)
        if is_last.item():
            break
    return {label: on_slowest(taken) for label, taken in found.items()}


def _turn(
    step: Stepper,
    candidates: Sequence[Candidate],
    policy: PolicyName,
    wrap: WrapCommunicator | None,
    found: Mapping[str, list[float]],
) -> None:
    """Let every hook of a policy take some steps."""
    attachment = commhooks.attach(
        step.ddp,
        candidates[0].compressor,
        policy=policy,
        process_group=dist.group.WORLD,  # not an emulated link's, which `wrap` stands for
        wrap_communicator=wrap,
    )
    attachment.expect(*(one.compressor for one in candidates))  # so that what waits for a turn is not warned of
    try:
        for one in candidates:
            attachment.replace(one.compressor)
            for number in range(1 + _IN_A_TURN):
                dist.barrier()
                begun = time.perf_counter()
                step()
                wait_for_device(step.task.device)
                if number:
                    found[one.label].append(time.perf_counter() - begun)
    finally:
        attachment.close()
