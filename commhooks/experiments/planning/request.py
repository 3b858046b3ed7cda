"""`commhooks plan`: what is asked on the command line, measured as far as it must be, and planned."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commhooks.errors import CommHooksError
from commhooks.experiments import stored
from commhooks.experiments.diloco import DiLoCoSpec, exchanged
from commhooks.experiments.hooks import policy_of
from commhooks.experiments.launch import torchrun_world
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.planning.candidates import label_in_profile
from commhooks.experiments.planning.costs import Costs, copy_seconds
from commhooks.experiments.planning.measurements import Asked as Measuring
from commhooks.experiments.planning.measurements import Measured, check_asked, measure
from commhooks.experiments.planning.plans import Plan, plan
from commhooks.experiments.planning.predicting import probed_link
from commhooks.experiments.planning.probes import Probe
from commhooks.experiments.planning.profiles import Profile
from commhooks.experiments.planning.tables import as_one_of, profile_from_tables
from commhooks.experiments.planning.worlds import check_world
from commhooks.experiments.runs import Compute, strict
from commhooks.experiments.specs import Spec, is_diloco
from commhooks.experiments.timing.link import Link, Network
from commhooks.experiments.timing.rounds import Rounds

FORMAT = 2  # until 1, a plan was of one number of ranks, and had its bucket sizes
ASSUMED_LATENCY = 50e-6
"""Seconds of latency of a link about which nothing is said: neighbours in one room."""
PROBE_SHARE = 0.2  # of the time that measuring may take
REAL_SECONDS = 30.0
_MOST_RANKS_HERE = 8
_POWERS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The settings of a plan."""

    parameters: float | None = None  # then the profile is made of tables
    compute: str | None = None  # of a step with these parameters
    task: Spec | None = None  # to be profiled
    profiled: Profile | None = None  # of an earlier command
    probe: Probe | None = None  # of an earlier command
    link: str | None = None  # in full; None: it is probed
    hooks: tuple[Spec, ...] | None = None
    ranks: tuple[int, ...] | None = None
    cores: int = 1  # of each rank; a measured profile knows them
    sharded: bool = False
    device: str = "cpu"
    seconds: float = 100.0  # that measuring may take
    validate: bool = False

    def __post_init__(self) -> None:
        if self.link in ("real", "unlimited"):  # as it is, so it is probed
            object.__setattr__(self, "link", None)
        given = [self.parameters is not None, self.task is not None, self.profiled is not None]
        if not any(given):
            raise ValueError("say what is trained: --task my_task.py:task, or --parameters 25M --compute 200ms")
        if given[0] and sum(given) > 1:
            raise ValueError("--parameters stands for a model about which nothing else is known: leave out the others")
        if given[0] != (self.compute is not None):
            raise ValueError("--parameters and --compute, the time of a step without communication, go together")
        if given[0] and self.compute is not None and Compute.parse(self.compute).seconds is None:
            raise ValueError(f"--compute {self.compute} is a factor: give the seconds of a step, such as 200ms")
        if self.link is not None and self.probe is not None:
            raise ValueError("--link and --probe each name the network: leave out one of them")
        self._check_measuring()
        for hook in self.hooks or ():
            _ = DiLoCoSpec.of(hook).rounds if is_diloco(hook) else policy_of(hook)  # raises if there can be none

    def _check_measuring(self) -> None:
        """Raise ValueError if something cannot be measured."""
        if self.parameters is not None and self.network_is_measured:
            raise ValueError("--parameters needs a network: --link 200Mbit/s,latency=5ms, or --probe FILE")
        if self.validate and self.task is None:
            raise ValueError("--validate takes real steps, which needs a --task")
        if len(self.ranks or ()) > 1 and self.network_is_measured:
            raise ValueError(
                "one network is probed, that of the ranks here: for several --ranks give --link or --probe"
            )

    @property
    def network_is_measured(self) -> bool:
        """True if the network is probed now."""
        return self.link is None and self.probe is None

    @property
    def measures(self) -> bool:
        """True if anything is measured now."""
        return (self.task is not None and self.profiled is None) or self.validate or self.network_is_measured

    @property
    def settings(self) -> LinkSettings:
        """The link between the ranks that measure, with the assumed latency if none is given."""
        _, settings = check_world(None, self.link)
        latency = ASSUMED_LATENCY if self.latency_is_assumed else settings.latency_seconds
        return dataclasses.replace(settings, latency_seconds=latency)

    @property
    def latency_is_assumed(self) -> bool:
        """True if a rate was given without a latency."""
        return self.link is not None and "latency" not in self.link and not self.link.startswith(("hosts", "real"))


@dataclass(frozen=True)
class Planned:
    """Plans, and from what they were computed."""

    plans: tuple[Plan, ...]
    """One for each number of ranks, ascending."""
    model: str
    link: Link | None
    """The given network; None: it was probed."""
    profile: Profile | None
    """The measured profile; None: it was made of tables."""
    probe: Probe | None = None
    measured: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The seconds of real steps, by hook; empty: not measured."""
    latency_is_assumed: bool = False
    sharded: bool = False
    cores: int = 1

    def write(self, path: Path) -> None:
        """Write everything into a JSON file; an existing one is replaced at once, or stays as it is."""
        stored.write_text(path, json.dumps(strict({"format": FORMAT, **dataclasses.asdict(self)}), indent=1) + "\n")


def make_plans(asked: Asked) -> Planned | None:
    """Return the plans on the process that reports: this one, or torchrun's rank 0; None on torchrun's others.

    Raises:
        ValueError: There is no such task or hook, or what is given cannot be put together.
        WorldError: A rank failed or fell silent, or something could not be measured; the message says why.

    """
    measuring = _measuring(asked)
    found = Measured(asked.profiled, asked.probe)
    if measuring is not None:
        here = ranks_here(asked)
        measured = measure(measuring, here)
        if measured is None:
            return None
        found = dataclasses.replace(measured, probe=measured.probe or asked.probe)
    try:
        return _planned(asked, found)
    except CommHooksError as error:
        raise ValueError(str(error)) from error


def ranks_here(asked: Asked) -> int:
    """Return how many ranks measure: torchrun's, or as many as are asked for if they fit on a machine."""
    joined = torchrun_world()
    asked_for = asked.ranks[0] if asked.ranks and len(asked.ranks) == 1 else 2
    return joined[1] if joined else asked_for if asked_for <= _MOST_RANKS_HERE else 2


def load(probe: Path | None, profile: Path | None) -> dict[str, Any]:
    """Return the contents of files, as fields of `Asked`; raise ValueError if one is not a probe or a profile."""
    try:
        return {
            "probe": None if probe is None else Probe.read(probe),
            "profiled": None if profile is None else Profile.read(profile),
        }
    except CommHooksError as error:
        raise ValueError(str(error)) from error


def count_in(text: str) -> float:
    """Return the number in a text such as '124M' or '1.5B'; raise ValueError if it is not one above zero."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kMBT]?)\s*", text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"parameters {text!r} does not parse: expected a number above zero, such as '124M' or '1B'")
    return float(match[1]) * _POWERS[match[2]]


def numbers_in(text: str) -> tuple[int, ...]:
    """Return the numbers of ranks in a text such as '4', '2,4,8' or '2..1024', which doubles.

    Raises:
        ValueError: The text does not have that form.

    """
    first, dots, last = text.partition("..")
    try:
        found = [int(first), int(last)] if dots else list(map(int, text.split(",")))
    except ValueError:
        found = []
    if not found or found[0] < 2 or found != sorted(set(found)):
        raise ValueError(f"ranks {text!r} does not parse: expected ascending numbers from 2 on: 4 or 2,4,8 or 2..1024")
    if dots:
        found = [*(found[0] << power for power in range(32) if found[0] << power < found[1]), found[1]]
    return tuple(found)


def _measuring(asked: Asked) -> Measuring | None:
    """Return what must be measured for a plan; None: nothing."""
    if not asked.measures:
        return None
    hooks = None if asked.hooks is None else tuple(dict.fromkeys(map(exchanged, asked.hooks)))
    seconds = asked.seconds * (1 - PROBE_SHARE) if asked.network_is_measured else asked.seconds
    measuring = Measuring(
        task=asked.task,
        hooks=hooks,
        link=asked.settings,
        seconds=seconds,
        device=asked.device,
        probe_seconds=min(120.0, asked.seconds * PROBE_SHARE) if asked.network_is_measured else None,
        profiled=asked.profiled,
        real_seconds=REAL_SECONDS if asked.validate else None,
    )
    check_asked(measuring)
    return measuring


def _planned(asked: Asked, found: Measured) -> Planned:
    costs, copy = Costs.read(), copy_seconds()
    link = None
    if asked.link is not None:
        settings = asked.settings
        rate = min(settings.slowest or math.inf, settings.down_bits_per_second or math.inf)
        link = costs.on_gloo(Link(rate=rate, latency=settings.latency_seconds, link=settings.label), copy)
    plans = []
    for ranks in asked.ranks or (_ranks_of(found),):
        if found.profile is not None:
            profile = as_one_of(found.profile, ranks, costs)
        else:
            assert asked.parameters is not None and asked.compute is not None, "checked before"
            profile = profile_from_tables(
                asked.parameters,
                ranks,
                compute=Compute.parse(asked.compute).seconds or 0.0,
                hooks=None if asked.hooks is None else [exchanged(hook).label for hook in asked.hooks],
                cores=asked.cores,
                costs=costs,
                copy=copy,
            )
        plans.append(plan(profile, _network(link, found.probe, ranks), rounds=_rounds(asked), sharded=asked.sharded))
    return Planned(
        plans=tuple(plans),
        model=profile.model,
        link=link,
        profile=found.profile,
        probe=found.probe if link is None else None,
        measured=found.steps,
        latency_is_assumed=asked.latency_is_assumed,
        sharded=asked.sharded,
        cores=profile.cores,
    )


def _ranks_of(found: Measured) -> int:
    """Return the ranks of the profile or else of the probe; 2 if nothing was measured."""
    return found.profile.ranks if found.profile else found.probe.ranks if found.probe else 2


def _network(link: Link | None, probe: Probe | None, ranks: int) -> Network:
    if link is not None:
        return link
    assert probe is not None, "it was probed"
    return probe if probe.ranks == ranks else probed_link(probe)


def _rounds(asked: Asked) -> dict[str, tuple[str, Rounds]]:
    """Return DiLoCo's hooks, each with its compressor's label in the profile and its rounds."""
    return {
        hook.label: (label_in_profile(exchanged(hook).label), DiLoCoSpec.of(hook).rounds)
        for hook in asked.hooks or ()
        if is_diloco(hook)
    }
