"""The cost of the guard: training steps with it and without it, in turns, on one model."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import commhooks
import ddp_core
from commhooks.experiments.launch import Tell
from commhooks.experiments.report.words import seconds_in_words
from experiments.studies.bench.rows import AGAIN, OURS, THEIRS, Row, Seconds, compared, ratios
from experiments.studies.ranks import on_ranks
from experiments.studies.turns import forth_and_back, in_turns, turns_of

SENTENCE = (
    'A training step (forward, backward, SGD) on 2 ranks of one thread each with `ddp_core.set_guard(model, "raise")` '
    'over one with "off": the same model, in 200 turns of 4 steps. CPU time is that of the main thread. Beside each '
    "ratio stand the 95 % interval of its median (by order statistics), and what was timed directly, in µs of a step "
    "and of a parameter: what the guard adds to `optimizer.step()`, and the log that PyTorch's DDP alone needs, "
    "as the difference of a backward pass without any DDP. Targets: 1.03 with 104 small parameters, 1.015 with "
    "2.1 million elements, in CPU time."
)
RANKS = 2
ROUNDS, STEPS = 200, 4
MODELS: dict[str, tuple[int, int, float]] = {  # layers, their width, and the target
    "104 small parameters": (52, 16, 1.03),
    "4 layers, 2.1 million elements": (4, 724, 1.015),
}
CLOCKS: dict[str, Callable[[], float]] = {"CPU time": time.thread_time, "step time": time.perf_counter}
WRAPPERS = ("ddp_core", "PyTorch, attach(fp16)")


def measure(quick: bool, tell: Tell) -> list[Row]:
    """Return a row for each model, wrapper and clock."""
    found = on_ranks(partial(_take_turns, 3 if quick else ROUNDS), RANKS, tell)
    return [_row(*what, clock, *taken) for what, taken in found.items() for clock in CLOCKS]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, by order statistics: whatever the distribution is."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    middle = (len(values) - 1) / 2
    return ordered[max(0, math.floor(middle - half))], ordered[min(len(values) - 1, math.ceil(middle + half))]


def _row(name: str, wrapper: str, clock: str, taken: dict[str, Seconds], direct: dict[str, float]) -> Row:
    spread, noise = compared(taken[clock])
    paired = ratios(taken[clock][OURS], taken[clock][THEIRS])
    low, high = median_interval([a / b for a, b in zip(taken[clock][OURS], taken[clock][THEIRS], strict=True)])
    layers, _, target = MODELS[name]
    parts = [
        f"with {seconds_in_words(statistics.median(taken[clock][OURS]))}",
        f"without {seconds_in_words(statistics.median(taken[clock][THEIRS]))}",
        f"paired median {paired.median:.3f}, 95 % {low:.3f}–{high:.3f}",
    ]
    if clock == "CPU time":
        parts += [f"{what} {1e6 * s:.1f} µs, {1e6 * s / (2 * layers):.2f} µs a parameter" for what, s in direct.items()]
    return Row(
        name=f"{name}, {wrapper}",
        quantity=f"{clock} of a step",
        spread=spread,
        noise=noise,
        target=target if clock == "CPU time" else None,
        absolute="; ".join(parts),
    )


def _take_turns(rounds: int, tell: Tell) -> dict[tuple[str, str], tuple[dict[str, Seconds], dict[str, float]]]:
    found = {}
    for name, (layers, width, _) in MODELS.items():
        for wrapper in WRAPPERS:
            tell(f"guard: {name}, {wrapper}, with and without in turns")
            site = _Site(wrapper, layers, width)
            taken = {
                what: in_turns(
                    dict.fromkeys((OURS, THEIRS, AGAIN), site.step),
                    rounds,
                    calls=STEPS,
                    clock=clock,
                    prepare=site.prepare,
                    order=forth_and_back,
                    tell=tell,
                )
                for what, clock in CLOCKS.items()
            }
            with_it, without = (partial(site.seconds_of_hooks, who) for who in (OURS, THEIRS))
            direct = {"optimizer.step()": _added(with_it, without, rounds)}
            if "PyTorch" in wrapper:
                local = _Local(layers, width)
                logged, plain = (partial(local.backward_seconds, is_logged=is_logged) for is_logged in (True, False))
                direct["log"] = _added(logged, plain, rounds)
            found[name, wrapper] = taken, direct
            ddp_core.set_guard(site.ddp, "off")
    return found


def _added(with_it: Callable[[], float], without: Callable[[], float], rounds: int) -> float:
    """Return the median difference, in seconds."""
    found = turns_of({OURS: with_it, THEIRS: without}, rounds, warm_up=2, order=forth_and_back)
    return statistics.median(a - b for a, b in zip(found[OURS], found[THEIRS], strict=True))


class _Site:
    """A model that is trained with the guard and without it."""

    def __init__(self, wrapper: str, layers: int, width: int) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.inputs = torch.randn(8, width)
        self.ddp: Any
        if "PyTorch" in wrapper:
            self.ddp = DistributedDataParallel(module)
            self.attachment = commhooks.attach(self.ddp, "fp16")
        else:
            self.ddp = ddp_core.DistributedDataParallel(module)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-4)
        self.idle = _Idle(self.ddp.parameters(), {})

    def prepare(self, who: str) -> None:
        """Turn the guard on or off, and let one step pass."""
        ddp_core.set_guard(self.ddp, "raise" if who == OURS else "off")
        self.step()

    def passes(self) -> None:
        self.optimizer.zero_grad()
        self.ddp(self.inputs).square().mean().backward()

    def step(self) -> None:
        """Take a training step."""
        self.passes()
        self.optimizer.step()

    def seconds_of_hooks(self, who: str) -> float:
        """Return the time of a step of an optimizer that does nothing."""
        self.prepare(who)
        dist.barrier()
        self.passes()
        begun = time.thread_time()
        self.idle.step()
        return time.thread_time() - begun


class _Idle(Optimizer):
    """An optimizer whose steps change nothing: what remains is what PyTorch calls before and after them."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # 'Signature incompatible'
        """Do nothing."""


class _Local:
    """A model without any DDP."""

    def __init__(self, layers: int, width: int) -> None:
        self.module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.inputs = torch.randn(8, width)

    def backward_seconds(self, *, is_logged: bool) -> float:
        """Return the time of a backward pass, whose gradients are logged or not."""
        parameters = list(self.module.parameters())
        log = deque[Tensor](maxlen=len(parameters))
        handles = [p.register_post_accumulate_grad_hook(log.append) for p in parameters] if is_logged else []
        self.module.zero_grad()
        loss = self.module(self.inputs).square().mean()
        begun = time.thread_time()
        loss.backward()
        taken = time.thread_time() - begun
        for handle in handles:
            handle.remove()
        return taken
