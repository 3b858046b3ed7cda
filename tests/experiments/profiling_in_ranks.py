"""What ranks do in tests of the profiler; a new process imports them by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import commhooks
import ddp_core
from commhooks.errors import CommHooksError
from commhooks.experiments import planning
from commhooks.experiments.launch import Send
from commhooks.experiments.planning.candidates import Candidate, named

CLASSES: dict[str, Any] = {"core": ddp_core.DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel}


def candidates() -> list[Candidate]:
    """Return hooks of one round and of two, with sums, gathers and exchanges, under both policies."""
    return [
        named("int8"),
        named("powersgd", rank=1),
        named("top-k", policy="fused", ratio=0.1),
        named("powersgd", policy="fused", rank=1),
    ]


class Training:
    """A small model in its DDP; `step` takes a step, and fails in the one asked for."""

    def __init__(self, ddp: str, fails_in: int = -1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.ddp = CLASSES[ddp](self.model, bucket_cap_mb=0.0005)  # several buckets
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.taken, self.fails_in = 0, fails_in

    def step(self) -> None:
        self.taken += 1
        if self.taken == self.fails_in:
            raise LookupError("the data is gone")
        self.optimizer.zero_grad()
        self.ddp(torch.randn(4, 8)).square().sum().backward()
        self.optimizer.step()

    def contents(self) -> list[Tensor]:
        """Return copies of all that a profile must leave as it is."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        kept = [*self.model.parameters(), *(p.grad for p in self.model.parameters()), *states]
        return [one.detach().clone() for one in kept if one is not None]


def profiled(rank: int, ranks: int, argument: str, send: Send) -> None:
    """Profile after a first step; send the profile, whether all is as before, and what real steps send."""
    training = Training(argument)
    training.step()
    before, own = training.contents(), installed(training)
    found = planning.profile(training.ddp, training.step, hooks=candidates(), steps=3)
    after = training.contents()
    is_as_before = len(before) == len(after) and all(map(torch.equal, before, after))
    left = installed(training)
    send((rank, found, is_as_before, left == own, {one.label: sent(training, one) for one in candidates()}))


def installed(training: Training) -> list[str]:
    """Return the hooks of the kinds that a profile installs, those of the DDP too."""
    from torch.optim import optimizer

    left = ["backward"] * (torch.autograd.backward.__module__ != "torch.autograd")
    left += ["optimizer"] * (len(optimizer._global_optimizer_pre_hooks) + len(optimizer._global_optimizer_post_hooks))
    left += ["gradient" for p in training.model.parameters() if p._post_accumulate_grad_hooks]
    return left + ["forward"] * (len(training.ddp._forward_pre_hooks) + len(training.ddp._forward_hooks))


def sent(training: Training, candidate: Candidate) -> dict[str, int]:
    """Return the payload of one real step, by the kind of collective, as its communicator counts it."""
    attachment = commhooks.attach(training.ddp, candidate.compressor, policy=candidate.policy)
    training.step()
    counts = {kind: found.payload_bytes for kind, found in attachment.statistics().by_kind.items()}
    attachment.close()
    return counts


def pretended(found: planning.Profile, label: str) -> dict[str, int]:
    """Return the payload of a step by a profile."""
    payload: Counter[str] = Counter()
    for bucket in found.hooks[label].buckets:
        for one in bucket.rounds:
            for kind, size in one.sends:
                payload[kind] += size
    return dict(payload)


def failing(rank: int, ranks: int, argument: int, send: Send) -> None:
    """Profile with a step that fails on rank 1; send the error, and whether all is as before."""
    training = Training("core", fails_in=argument if rank == 1 else -1)
    before, own = training.contents(), installed(training)
    error = refusal(lambda: planning.profile(training.ddp, training.step, hooks=(), steps=3))
    after = training.contents()
    is_as_before = len(before) == len(after) and all(map(torch.equal, before, after))
    send((rank, error, is_as_before, installed(training) == own))


def refused(rank: int, ranks: int, argument: Any, send: Send) -> None:
    """Send the errors of profiles that cannot be measured."""
    training = Training("core")

    def measure(**settings: Any) -> Callable[[], object]:
        return lambda: planning.profile(training.ddp, settings.pop("step", training.step), hooks=(), **settings)

    found = {
        "steps": refusal(measure(steps=2)),
        "seconds": refusal(measure(seconds=0.0)),
        "as ranks": refusal(measure(steps=3, as_ranks=1)),
        "budget": refusal(measure(seconds=1e-6)),
        "inner model": refusal(measure(step=lambda: training.model(torch.ones(1, 8)).sum().backward(), steps=3)),
        "no backward": refusal(measure(step=lambda: training.model(torch.ones(1, 8)), steps=3)),
        "twice": refusal(
            lambda: planning.profile(training.ddp, training.step, hooks=(named("fp16"), named("fp16")), steps=3)
        ),
    }
    found["another rank's"] = refusal(measure(steps=3 + rank))
    attachment = commhooks.attach(training.ddp, "fp16")
    found["attached"] = refusal(measure(steps=3))
    attachment.close()
    if rank == 0:
        send(found)


def refusal(act: Callable[[], object]) -> str:
    """Return the error in words."""
    try:
        act()
    except CommHooksError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
