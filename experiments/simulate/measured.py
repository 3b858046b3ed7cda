"""What was measured on one machine for the step-time model, as data: it survives a round trip through JSON."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from commhooks.communicators.links import Link
from commhooks.planning import stored
from commhooks.planning.payloads import is_padded
from commhooks.planning.step_time import Bucket, Stage, Step, step_time

FORMAT = 1  # of the file; increased when readers must change

Sends = tuple[tuple[str, int], ...]  # the kind and the payload of each collective of a round


@dataclass(frozen=True)
class ComputeTimes:
    """A step without communication: median seconds over the steps."""

    seconds: float  # forward and backward pass
    optimizer: float
    ready: tuple[float, ...]  # of each bucket, seconds after the step began
    buckets: tuple[tuple[str, ...], ...]  # the parameters of each, in its order

    @property
    def in_all(self) -> float:
        """Seconds of compute."""
        return self.seconds + self.optimizer


@dataclass(frozen=True)
class BucketTimes:
    """A bucket's exchange: median seconds of compression before each round, and after the last."""

    seconds: tuple[float, ...]
    sends: tuple[Sends, ...]
    after: float


@dataclass(frozen=True)
class HookTimes:
    """A hook's exchange of all buckets."""

    policy: str
    by_workers: Mapping[int, tuple[BucketTimes, ...]]  # as measured with so many workers in one process
    counted: Mapping[int, tuple[tuple[Sends, ...], ...]]  # payloads for other numbers of ranks: bucket, round

    @property
    def most_workers(self) -> int:
        """The most workers whose compression was timed."""
        return max(self.by_workers)

    def sends(self, ranks: int) -> tuple[tuple[Sends, ...], ...]:
        """Return what each bucket sends in each round, for any number of ranks.

        For a number that was not counted, payloads follow the power of the ranks that joins the two nearest counted. If
        a bucket starts other collectives for one of these than for the other, because its codes do not pay for as many
        ranks, it counts as for the higher one.
        """
        known = {ranks: tuple(one.sends for one in buckets) for ranks, buckets in self.by_workers.items()}
        known |= self.counted
        if ranks in known:
            return known[ranks]
        numbers = sorted(known)
        place = min(max(1, bisect.bisect(numbers, ranks)), len(numbers) - 1)
        low, high = numbers[place - 1], numbers[place]
        found = []
        for at_low, at_high in zip(known[low], known[high], strict=True):
            if _kinds_of(at_low) != _kinds_of(at_high):
                found.append(at_high)
                continue
            rounds = []
            for mine, others in zip(at_low, at_high, strict=True):
                pairs = zip(mine, others, strict=True)
                rounds.append(
                    tuple((kind, _between(low, own, high, other, ranks)) for (kind, own), (_, other) in pairs)
                )
            found.append(tuple(rounds))
        return tuple(found)

    def is_counted(self, ranks: int) -> bool:
        """Return whether the payloads for so many ranks were counted, or do not depend on them."""
        known = [tuple(one.sends for one in buckets) for buckets in self.by_workers.values()]
        known += self.counted.values()
        is_constant = len(known) > 1 and all(one == known[0] and not any(map(is_padded, one)) for one in known)
        return ranks in self.by_workers or ranks in self.counted or is_constant

    def buckets(self, ready: Sequence[float], ranks: int) -> tuple[Bucket, ...]:
        """Return the buckets of the model, for any number of ranks.

        Compression is interpolated between the numbers of workers that were timed. Beyond, what follows a collective
        grows linearly with the bytes of its answer, as adding up what was gathered does; what has an answer of the
        same size stays as it is.
        """
        sends = self.sends(ranks)
        found = []
        for number, (moment, mine) in enumerate(zip(ready, sends, strict=True)):
            rounds = [
                self._seconds(number, place, ranks, mine[place - 1] if place else ()) for place in range(len(mine) + 1)
            ]
            stages = tuple(Stage(seconds, sent) for seconds, sent in zip(rounds, mine, strict=False))
            found.append(Bucket(moment, stages, rounds[-1]))
        return tuple(found)

    def _seconds(self, number: int, place: int, ranks: int, asked: Sends) -> float:
        """Return the compression before a round (or after the last), which follows the collectives `asked`."""
        timed = {workers: self.by_workers[workers][number] for workers in sorted(self.by_workers)}
        seconds = [(*one.seconds, one.after)[place] for one in timed.values()]
        if ranks <= self.most_workers:
            return float(np.interp(ranks, list(timed), seconds))
        if place == 0:  # before anything was sent
            return float(np.median(seconds))
        answers = [answer_bytes(one.sends[place - 1], workers) for workers, one in timed.items()]
        if max(answers) < 2 * min(answers):  # too alike to tell growth from noise
            return float(np.median(seconds))
        slope = max(0.0, float(np.polyfit(answers, seconds, 1)[0]))
        return seconds[-1] + slope * max(0.0, answer_bytes(asked, ranks) - answers[-1])


@dataclass(frozen=True)
class Measured:
    """What a machine needs for a step, without a link."""

    task: str
    parameters: int
    compute: ComputeTimes
    hooks: Mapping[str, HookTimes]  # by the hook's label
    versions: Mapping[str, str]
    machine: Mapping[str, str | int | float]

    def step(self, hook: str, ranks: int, *, cores: int = 1) -> Step:
        """Return the step under a hook, with so many ranks."""
        times = self.hooks[hook]
        return Step(
            compute=self.compute.seconds,
            optimizer=self.compute.optimizer,
            buckets=times.buckets(self.compute.ready, ranks),
            policy=times.policy,
            cores=cores,
        )

    def write(self, path: Path) -> None:
        """Write the file, completely or not at all."""
        stored.write(self, path, form=FORMAT)

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Return the measurements in a file.

        Raises:
            ValueError: There is no such file, or it does not hold measurements of this format.

        """
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if raw.get("format") != FORMAT:
                raise ValueError(f"its format is {raw.get('format')}, which another version of commhooks wrote")
            found = cls(
                task=raw["task"],
                parameters=raw["parameters"],
                compute=ComputeTimes(
                    raw["compute"]["seconds"],
                    raw["compute"]["optimizer"],
                    tuple(raw["compute"]["ready"]),
                    tuple(map(tuple, raw["compute"]["buckets"])),
                ),
                hooks={label: _hook_of(hook) for label, hook in raw["hooks"].items()},
                versions=raw["versions"],
                machine=raw["machine"],
            )
            found._try()
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"measured {path}: expected a file of format {FORMAT} that 'commhooks simulate --save' wrote "
                f"({type(error).__name__}: {error}); measure again with --task and --save"
            ) from error
        return found

    def _try(self) -> None:
        """Raise an error of some kind if a simulation could not use these measurements."""
        for hook in self.hooks:
            for ranks in (2, 3, 10_000):
                step_time(self.step(hook, ranks), Link(rate=1e9), ranks)
        if not isinstance(self.task, str) or not isinstance(self.parameters, int):
            raise TypeError("the task must be a text, and its parameters a number")
        if missing := {"processor", "cores", "load"} - self.machine.keys():
            raise ValueError(f"the machine has no {', '.join(sorted(missing))}")
        self.versions.items()


def _kinds_of(rounds: Sequence[Sends]) -> list[list[str]]:
    """Return the kinds of the collectives of each round."""
    return [[kind for kind, _ in sent] for sent in rounds]


def answer_bytes(sends: Sends, ranks: int) -> int:
    """Return the bytes that a rank receives as answers: of a gather, the payloads of all ranks."""
    return sum(payload * (ranks if kind == "all-gather" else 1) for kind, payload in sends)


def _between(low: int, at_low: int, high: int, at_high: int, ranks: int) -> int:
    if at_low == at_high or not at_low or not at_high:
        return max(at_low, at_high)
    power = math.log(at_high / at_low) / math.log(high / low)
    return round(float(at_high * (ranks / high) ** power))


def _hook_of(raw: Mapping[str, Any]) -> HookTimes:
    by_workers = {
        int(workers): tuple(
            BucketTimes(tuple(one["seconds"]), _sends_of(one["sends"]), one["after"]) for one in buckets
        )
        for workers, buckets in raw["by_workers"].items()
    }
    counted = {int(ranks): tuple(map(_sends_of, buckets)) for ranks, buckets in raw["counted"].items()}
    return HookTimes(raw["policy"], by_workers, counted)


def _sends_of(raw: Sequence[Any]) -> tuple[Sends, ...]:
    return tuple(tuple((kind, payload) for kind, payload in sends) for sends in raw)
