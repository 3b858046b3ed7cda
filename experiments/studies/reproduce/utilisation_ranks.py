"""The work of the ranks of `diloco-utilisation`: steps in turns, with each way to communicate and with none."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import commhooks
from commhooks.experiments import planning
from commhooks.experiments.cluster import INTERFACE, interface_bytes
from commhooks.experiments.hooks import make_hook, policy_of
from commhooks.experiments.launch import Send, Tell, silent
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.planning import Profile
from commhooks.experiments.planning.worlds import around
from commhooks.experiments.seldom import exchanged
from commhooks.experiments.specs import Spec, is_seldom, steps_of_a_round
from commhooks.experiments.tasks import load_task
from commhooks.experiments.training.registration import wrap_in_ddp
from commhooks.experiments.training.seldom import settings_of
from commhooks.experiments.training.stepper import Stepper
from commhooks.units import counted, seconds_in_words
from experiments.studies.ranks import same_step
from experiments.studies.reproduce.control_ranks import NewRate
from experiments.studies.turns import on_slowest, rotated

NOTHING = "none"
"""The name of steps without any communication."""
DENSE = "all-reduce"
_SETTING_SECONDS = 1.0  # for the process that made the hosts to set the rate of their links: much longer than it takes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the measurement."""

    kind: str = "hosts"
    ranks: int = 4
    rate: str = "10Mbit/s"
    task: str = "gpt:size=medium"
    hooks: tuple[str, ...] = (
        "powersgd:rank=4",
        "diloco:every=30,compressor=int4",
        "diloco:every=30,compressor=int4,fragments=3,delay=5",
        "diloco:every=30,compressor=int4,fragments=3,delay=5,arrangement=even",
    )
    slow: tuple[str, ...] = ("all-reduce", "diloco:every=30")  # hooks that send all in fp32: fewer turns
    steps: int = 30  # of a turn without communication
    every_step: Mapping[str, int] = field(default_factory=lambda: {"all-reduce": 2, "powersgd:rank=4": 10})
    """Steps of a turn with hooks that communicate in each; one of DiLoCo is a round."""
    turns: int = 10
    slow_turns: int = 5
    free_turns: int = 3  # of DiLoCo, on links without a limit
    profile_seconds: float = 20.0

    @property
    def link(self) -> LinkSettings:
        """The link between the ranks."""
        return LinkSettings.parse(f"hosts:{self.rate}" if self.kind == "hosts" else self.rate)

    def steps_of(self, hook: str) -> int:
        """Return the steps of a turn."""
        return self.every_step.get(hook) or steps_of_a_round(Spec.parse(hook))


@dataclass(frozen=True)
class Asked:
    """The work of a world of ranks."""

    settings: Settings
    hooks: tuple[str, ...]
    turns: int
    limited: bool = True  # False: the links keep having no limit


@dataclass(frozen=True, kw_only=True)
class Turns:
    """A hook's turns; lists have a value for each."""

    steps: int  # of a turn
    nothing: list[float]  # seconds of `Settings.steps` steps without communication: mean of those before and after it
    seconds: list[float]  # of the turn, as the following two on the rank where it took longest
    beginning: list[float]  # in DiLoCo's calls that use no mean
    ending: list[float]  # in those that do
    moved: list[float]  # bytes that the hook counted, mean over the ranks
    carried: list[float]  # bytes that the host's interface sent, mean over the ranks
    peak: float  # bytes of a step while an exchange is under way; 0: not DiLoCo
    shares: list[float]  # the part of the parameters in each fragment


def run_turns(rank: int, ranks: int, asked: Asked, send: Send) -> None:
    """Take turns of every hook, and of steps without communication before and after each; rank 0 sends `Turns` by hook.

    Models, connections and a first turn of each, which does not count, come before rank 0 asks for the link's rate.
    """
    torch.set_num_threads(1)
    settings = asked.settings
    workers = {hook: _Worker(asked, hook, send if rank == 0 else silent) for hook in (NOTHING, *asked.hooks)}
    for worker in workers.values():
        worker.turn()
    if rank == 0 and asked.limited and settings.kind == "hosts":
        send(NewRate(settings.link.bits_per_second))
        time.sleep(_SETTING_SECONDS)
    taken: dict[str, list[dict[str, float]]] = {hook: [] for hook in asked.hooks}
    for number in range(asked.turns):
        before = workers[NOTHING].turn()
        for hook in rotated(number, list(asked.hooks)):
            own, after = workers[hook].turn(), workers[NOTHING].turn()
            taken[hook].append({**own, "nothing": (before["seconds"] + after["seconds"]) / 2})
            before = after
    found = {
        hook: Turns(
            steps=workers[hook].steps,
            **{name: [turn[name] for turn in turns] for name in turns[0]},  # type: ignore[arg-type]  # 'expected "int"'
            **workers[hook].close(),
        )
        for hook, turns in taken.items()
    }
    if rank == 0:
        send(found)
    workers[NOTHING].close()
    workers.clear()  # a DDP must go before its process group does


def run_profile(settings: Settings, tell: Tell) -> Profile:
    """Return the profile of the task under the compressors of all hooks, without a link."""
    stepper = same_step(settings.task)
    sent = [exchanged(hook).label for hook in map(Spec.parse, (*settings.slow, *settings.hooks))]
    tell(f"profiling for {settings.profile_seconds:g} s")
    found = planning.profile(
        stepper.ddp,
        stepper,
        hooks=[hook for hook in dict.fromkeys(sent) if hook != DENSE],
        seconds=settings.profile_seconds,
    )
    stepper.close()
    return found


class _Worker:
    """A model with one way to communicate, whose turns are timed."""

    def __init__(self, asked: Asked, hook: str, tell: Tell) -> None:
        settings, spec = asked.settings, Spec.parse(hook)
        task = load_task(Spec.parse(settings.task, "task"))
        self.steps = settings.steps if hook == NOTHING else settings.steps_of(hook)
        self._hook, self._tell, self._has_hosts = hook, tell, settings.kind == "hosts"
        self._diloco: commhooks.DiLoCo | None = None
        self._attachment: commhooks.Handle[Any] | None = None
        wrap = around(settings.link) if asked.limited else None
        if hook == NOTHING or is_seldom(spec):
            self._stepper = Stepper(task, task.model)
        else:
            self._stepper = Stepper(task, wrap_in_ddp(task.model, "core", None))
            self._attachment = commhooks.attach(
                self._stepper.ddp, make_hook(spec), policy=policy_of(spec), wrap_communicator=wrap
            )
        if is_seldom(spec):
            self._diloco = commhooks.DiLoCo(
                task.model, self._stepper.optimizer, wrap_communicator=wrap, **settings_of(spec)
            )

    def turn(self) -> dict[str, float]:
        """Take steps that begin on all ranks together; return what `Turns` has of them."""
        dist.barrier()
        moved, carried = self._moved(), self._carried()
        beginning = ending = 0.0
        began = time.perf_counter()
        for _ in range(self.steps):
            self._stepper()
            if self._diloco is not None:
                before = time.perf_counter()
                self._diloco.step()
                took = time.perf_counter() - before
                schedule = self._diloco.schedule
                is_end = (self._diloco.steps % schedule.every or schedule.every) in schedule.turns
                beginning, ending = beginning + took * (not is_end), ending + took * is_end
        seconds = time.perf_counter() - began
        dist.barrier()  # what the other ranks still send is this turn's
        sent = torch.tensor([self._moved() - moved, self._carried() - carried], dtype=torch.float64)
        dist.all_reduce(sent)
        values = dict(zip(("seconds", "beginning", "ending"), on_slowest([seconds, beginning, ending]), strict=True))
        values |= dict(zip(("moved", "carried"), (sent / dist.get_world_size()).tolist(), strict=True))
        self._tell(f"  {self._hook}: {counted(self.steps, 'step')} in {seconds_in_words(values['seconds'])}")
        return values

    def close(self) -> dict[str, Any]:
        """End the communication; return the peak and the shares of `Turns`."""
        peak, shares = 0.0, [1.0]
        if self._diloco is not None:
            peak = self._diloco.statistics().peak_bytes_per_step
            elements = {name: one.numel() for name, one in self._stepper.task.model.named_parameters()}
            sums = [sum(map(elements.__getitem__, names)) for names in self._diloco.schedule.fragments]
            shares = [one / sum(sums) for one in sums]
            self._diloco.close()
        if self._attachment is not None:
            self._attachment.close()
        self._stepper.close()
        return {"peak": peak, "shares": shares}

    def _moved(self) -> float:
        if self._diloco is not None:
            return float(self._diloco.statistics().traffic.moved_bytes)
        return 0.0 if self._attachment is None else float(self._attachment.statistics().moved_bytes)

    def _carried(self) -> float:
        return float(interface_bytes(INTERFACE)[0]) if self._has_hosts else 0.0
