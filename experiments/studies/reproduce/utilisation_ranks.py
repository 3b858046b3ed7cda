"""The work of the ranks of `diloco-utilisation`: steps in turns, with each way to communicate and with none."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import commhooks
from commhooks.experiments import planning
from commhooks.experiments.diloco import exchanged
from commhooks.experiments.hooks import make_hook, policy_of
from commhooks.experiments.launch import Send, Tell
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.planning import Profile
from commhooks.experiments.planning.worlds import around
from commhooks.experiments.specs import Spec, is_diloco, steps_of_a_round
from commhooks.experiments.tasks import load_task
from commhooks.experiments.training.diloco import settings_of
from commhooks.experiments.training.registration import wrap_in_ddp
from commhooks.experiments.training.stepper import Stepper
from commhooks.units import counted, seconds_in_words
from experiments.studies.ranks import same_step
from experiments.studies.reproduce.worker import Worker, ask_for, over_ranks
from experiments.studies.turns import rotated

NOTHING = "none"
"""The name of steps without any communication."""
DENSE = "all-reduce"


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


def run_turns(asked: Asked, send: Send) -> dict[str, Any]:
    """Take turns of every hook, with steps without communication before and after each; return them by hook.

    Of a hook these are the steps of a turn, and lists with a value for each turn: its `seconds`, those in DiLoCo's
    calls that use no mean (`beginning`) and in those that do (`ending`), the bytes `moved` and `carried`, and the
    seconds of `Settings.steps` steps with `nothing`, the mean of those before and after it. Of DiLoCo there are the
    `peak` of a step's bytes too, while an exchange is under way, and the part of the parameters in each fragment.

    Models, connections and a first turn of each, which does not count, come before rank 0 asks for the link's rate.
    """
    settings = asked.settings
    workers = {hook: _Worker(asked, hook, send) for hook in (NOTHING, *asked.hooks)}
    for worker in workers.values():
        worker.turn()
    if asked.limited and settings.kind == "hosts":
        ask_for(settings.link.bits_per_second, send)
    taken: dict[str, list[dict[str, float]]] = {hook: [] for hook in asked.hooks}
    for number in range(asked.turns):
        before = workers[NOTHING].turn()["seconds"]
        for hook in rotated(number, list(asked.hooks)):
            own, after = workers[hook].turn(), workers[NOTHING].turn()["seconds"]
            taken[hook].append({**own, "nothing": (before + after) / 2})
            before = after
    found = {
        hook: {"steps": workers[hook].steps, **over_ranks(turns), **workers[hook].fragments()}
        for hook, turns in taken.items()
    }
    for worker in workers.values():
        worker.close()
    return found


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


class _Worker(Worker):
    """A model under data-parallel training or DiLoCo, or with steps that send nothing."""

    def __init__(self, asked: Asked, hook: str, tell: Tell) -> None:
        settings, spec = asked.settings, Spec.parse(hook)
        task = load_task(Spec.parse(settings.task, "task"))
        self.steps = settings.steps if hook == NOTHING else settings.steps_of(hook)
        self._hook, self._tell, self.has_hosts = hook, tell, settings.kind == "hosts"
        self._diloco: commhooks.DiLoCo | None = None
        self._attachment: commhooks.Handle[Any] | None = None
        wrap = around(settings.link) if asked.limited else None
        if hook == NOTHING or is_diloco(spec):
            self._stepper = Stepper(task, task.model)
        else:
            self._stepper = Stepper(task, wrap_in_ddp(task.model, "core", None))
            self._attachment = commhooks.attach(
                self._stepper.ddp, make_hook(spec), policy=policy_of(spec), wrap_communicator=wrap
            )
        if is_diloco(spec):
            self._diloco = commhooks.DiLoCo(
                task.model, self._stepper.optimizer, wrap_communicator=wrap, **settings_of(spec)
            )

    def run(self) -> dict[str, float]:
        """Take the steps of a turn; return the seconds in DiLoCo's calls."""
        beginning = ending = 0.0
        for _ in range(self.steps):
            self._stepper()
            if self._diloco is not None:
                before = time.perf_counter()
                self._diloco.step()
                took = time.perf_counter() - before
                schedule = self._diloco.schedule
                is_end = (self._diloco.steps % schedule.every or schedule.every) in schedule.turns
                beginning, ending = beginning + took * (not is_end), ending + took * is_end
        return {"beginning": beginning, "ending": ending}

    def turn(self) -> dict[str, float]:
        """Take a turn, and tell how long it took."""
        values = super().turn()
        self._tell(f"  {self._hook}: {counted(self.steps, 'step')} in {seconds_in_words(values['seconds'])}")
        return values

    def fragments(self) -> dict[str, Any]:
        """Return the peak of a step's bytes, 0 without DiLoCo, and the part of the parameters in each fragment."""
        if self._diloco is None:
            return {"peak": 0.0, "shares": [1.0]}
        elements = {name: one.numel() for name, one in self._stepper.task.model.named_parameters()}
        sums = [sum(map(elements.__getitem__, names)) for names in self._diloco.schedule.fragments]
        return {
            "peak": self._diloco.statistics().peak_bytes_per_step,
            "shares": [one / sum(sums) for one in sums],
        }

    def close(self) -> None:
        """End the communication."""
        for one in (self._diloco, self._attachment):
            if one is not None:
                one.close()
        self._stepper.close()

    def moved(self) -> float:
        """Return the bytes that the hook has counted."""
        if self._diloco is not None:
            return float(self._diloco.statistics().traffic.moved_bytes)
        return 0.0 if self._attachment is None else float(self._attachment.statistics().moved_bytes)
