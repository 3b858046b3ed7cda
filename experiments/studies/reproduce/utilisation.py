"""The share of time in which four hosts at 10 Mbit/s compute: data-parallel training, DiLoCo, and Streaming DiLoCo.

Every rank is on a host of its own (a network namespace), and all hosts share this machine's processors. Utilisation is
the time of a step of the same processes without communication over that with it, in turns. The step-time model is given
what was measured without a link, and predicts each.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

from scipy.optimize import brentq

from commhooks.experiments.diloco import DiLoCoSpec, exchanged
from commhooks.experiments.links.gloo import ACKNOWLEDGEMENT, FRAMING
from commhooks.experiments.planning.candidates import label_in_profile
from commhooks.experiments.planning.predicting import predict, step_of
from commhooks.experiments.report.words import percent
from commhooks.experiments.results.summary import Spread
from commhooks.experiments.specs import Spec, is_diloco
from commhooks.experiments.timing.link import Link
from commhooks.experiments.timing.rounds import Rounds, round_time
from commhooks.experiments.timing.step_time import Bucket, Stage
from commhooks.units import counted, three_digits
from experiments.studies.blocks import Block, Table
from experiments.studies.ranks import UNLIMITED_HOSTS, on_ranks
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.results import Reproduction
from experiments.studies.reproduce.utilisation_ranks import Asked, Settings, run_profile, run_turns

_GOAL, _BYTES_GOAL = 0.90, 0.05
_MET = {True: "met", False: "missed"}
_HEADERS = FRAMING + ACKNOWLEDGEMENT  # bytes on the wire for each byte of data, in both directions at once


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return the turns of all hooks, with and without a limit, and what the step-time model is given."""
    diloco = tuple(hook for hook in settings.hooks if is_diloco(Spec.parse(hook)))
    asked = {
        "free": Asked(settings, diloco, settings.free_turns, limited=False),
        "limited": Asked(settings, settings.hooks, settings.turns),
        "slow": Asked(settings, settings.slow, settings.slow_turns),
    }
    profile = notes.once("profile", lambda: _profiled(settings, notes))
    return {"profile": profile, **{name: notes.once(name, partial(_world, one, notes)) for name, one in asked.items()}}


def _world(asked: Asked, notes: Notes) -> dict[str, Any]:
    """Return what new ranks measured, by hook."""
    link = UNLIMITED_HOSTS if asked.settings.kind == "hosts" else None
    return on_ranks(partial(run_turns, asked), asked.settings.ranks, notes.tell, link=link)


def _profiled(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return what the model is given: each compressor's exchange, and what the link adds to hooks of every step."""
    profile = on_ranks(partial(run_profile, settings), settings.ranks, notes.tell)
    exchanges, added = {}, {}
    for hook in (*settings.slow, *settings.hooks):
        sent = exchanged(Spec.parse(hook)).label
        own = profile.hooks[label_in_profile(sent)]
        exchanges[sent] = [dataclasses.asdict(bucket) for bucket in step_of(profile, own, own.buckets).buckets]
        for bucket in exchanges[sent]:
            del bucket["due"]  # never, which JSON cannot hold
        if not is_diloco(Spec.parse(hook)):
            seconds = predict(profile, _link(settings), label_in_profile(sent)).seconds
            added[hook] = seconds - profile.noop.seconds.median
    return {"cores": profile.cores, "step": profile.noop.seconds.median, "exchanges": exchanges, "added": added}


def _link(settings: Settings) -> Link:
    rate = settings.link.bits_per_second
    assert rate is not None, "the settings have a rate"
    return Link(rate=rate)


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return measured and predicted utilisation, what the links carried, and what follows."""
    turns = {**measured["slow"], **measured["limited"]}
    rows, sent = [], []
    for hook, own in turns.items():
        step = statistics.median(own["nothing"]) / settings.steps
        spread, predicted = _utilisation(settings, own), _predicted(settings, measured["profile"], hook, step, own)
        taken = f"{len(own['seconds'])} of {counted(own['steps'], 'step')}"
        seconds = statistics.median(own["seconds"]) / own["steps"]
        median = f"{percent(spread.median)} ({100 * spread.low:.0f} to {100 * spread.high:.0f})"
        rows.append(
            [f"`{hook}`", taken, three_digits(1e3 * seconds), three_digits(1e3 * step), median, percent(predicted)]
        )
        moved, carried = statistics.median(own["moved"]), statistics.median(own["carried"])
        peak = f"{8e-6 * own['peak'] / step:.2f}" if own["peak"] else ""
        over = f"{carried / moved:.3f}" if carried else ""
        sent.append([f"`{hook}`", three_digits(moved / own["steps"] / 1e3), over, peak])
    title = f"{settings.task}, {settings.ranks} ranks, {settings.link.label}"
    return [
        Table(title, ["hook", "turns", "ms a step", "without", "utilisation", "predicted"], rows),
        "Without: ms of a step without communication, between which the turns were taken. Utilisation: their ratio, "
        "median and quartiles over the turns.",
        _verdict(settings, measured),
        _waits(settings, measured),
        Table("What ranks send", ["hook", "kB a step", "interface", "peak, Mbit/s"], sent),
        *([_bytes(turns)] if settings.kind == "hosts" else []),
    ]


def _utilisation(settings: Settings, own: Mapping[str, Any]) -> Spread:
    """Return a step without communication over one with it, turn by turn."""
    pairs = zip(own["nothing"], own["seconds"], strict=True)
    return Spread.of([nothing / settings.steps / (seconds / own["steps"]) for nothing, seconds in pairs])


def _predicted(settings: Settings, profile: Mapping[str, Any], hook: str, step: float, own: Mapping[str, Any]) -> float:
    """Return the step-time model's utilisation for a step that takes `step` seconds without communication."""
    spec = Spec.parse(hook)
    if not is_diloco(spec):
        return step / (step + float(profile["added"][hook]))
    exchange = [_bucket(one) for one in profile["exchanges"][exchanged(spec).label]]
    asked = DiLoCoSpec.of(spec).rounds
    rounds = Rounds(every=asked.every, fragments=asked.fragments, delay=asked.delay, shares=tuple(own["shares"]))
    return round_time(rounds, exchange, step, _link(settings), settings.ranks, cores=int(profile["cores"])).utilisation


def _bucket(raw: Mapping[str, Any]) -> Bucket:
    stages = [Stage(one["seconds"], tuple(map(tuple, one["collectives"]))) for one in raw["stages"]]
    return Bucket(raw["ready"], tuple(stages), raw["after"])


def _verdict(settings: Settings, measured: Mapping[str, Any]) -> str:
    """Return whether the goal was reached, and how long a step must take for that, according to the model."""
    limited = measured["limited"]
    spreads = {hook: _utilisation(settings, own) for hook, own in limited.items()}
    best = max(spreads, key=lambda hook: spreads[hook].median)
    needed = [
        f"{three_digits(1e3 * _shortest_step(settings, measured['profile'], hook, own))} ms with `{hook}`"
        for hook, own in limited.items()
        if is_diloco(Spec.parse(hook))
    ]
    return (
        f"Most of the time, {percent(spreads[best].median)}, is computed with `{best}`. The goal of {percent(_GOAL)} "
        f"is {_MET[spreads[best].median >= _GOAL]}. It depends on how long a step takes: by the model, "
        f"{percent(_GOAL)} needs a step of at least {', '.join(needed)}."
    )


def _shortest_step(settings: Settings, profile: Mapping[str, Any], hook: str, own: Mapping[str, Any]) -> float:
    """Return the seconds of a step without communication from which on the model predicts the goal."""

    def surplus(step: float) -> float:
        return _predicted(settings, profile, hook, step, own) - _GOAL

    return float(brentq(surplus, 1e-4, 100.0, xtol=1e-5))


def _waits(settings: Settings, measured: Mapping[str, Any]) -> str:
    """Return what the ranks lose without a limit, and where the training thread spends the rest."""
    said = []
    for hook, without in measured["free"].items():
        own = measured["limited"][hook]
        ending, free = statistics.median(own["ending"]), statistics.median(without["ending"])
        said.append(
            f"`{hook}`: {percent(_utilisation(settings, without).median)} without a limit, "
            f"{percent(_utilisation(settings, own).median)} with it. In a round {three_digits(ending)} s are spent in "
            f"the calls that use a mean ({three_digits(free)} s without a limit), and "
            f"{three_digits(1e3 * statistics.median(own['beginning']))} ms in all others."
        )
    listed = "\n".join(f"- {one}" for one in said)
    turns = counted(settings.free_turns, "turn")
    return f"Links without a limit ({turns} of each) show what is lost for other reasons:\n\n{listed}"


def _bytes(turns: Mapping[str, Any]) -> str:
    """Return how far the hosts' interfaces agree with what the hooks count."""
    off = {
        hook: statistics.median(own["carried"]) / statistics.median(own["moved"]) / _HEADERS - 1
        for hook, own in turns.items()
    }
    farthest = max(off, key=lambda hook: abs(off[hook]))
    return (
        "Interface: what the host's interface sent over the bytes of data that were counted. Packet headers and "
        f"acknowledgements make it {_HEADERS:.3f}; from that it is off by at most {percent(abs(off[farthest]))} "
        f"(`{farthest}`; goal: {percent(_BYTES_GOAL)}, {_MET[abs(off[farthest]) <= _BYTES_GOAL]}). Peak: the rate of "
        "an exchange that takes as long as the delay, or a step if there is none."
    )


REPRODUCTION = Reproduction(
    name="diloco-utilisation",
    title="How much of the time hosts at 10 Mbit/s compute",
    source="This project: `commhooks.DiLoCo`",
    said=(
        "With an exchange every 30 steps, int4, 3 fragments and a delay of 5 steps, hosts at 10 Mbit/s compute at "
        "least 90 % of the time (the goal).",
        "The step-time model predicts utilisation, and hooks count what the hosts' interfaces send, within 5 %.",
    ),
    sizes={
        "default": Settings(),
        "tiny": Settings(
            kind="emulated", ranks=2, task="gpt:size=tiny", steps=6, turns=2, slow_turns=1, free_turns=1,
            hooks=(
                "powersgd:rank=1", "diloco:every=6,compressor=int4",
                "diloco:every=6,compressor=int4,fragments=2,delay=1",
            ),
            slow=("all-reduce",), every_step={"all-reduce": 1, "powersgd:rank=1": 2}, profile_seconds=6.0,
        ),
    },
    measure=measure,
    show=show,
)  # fmt: skip
