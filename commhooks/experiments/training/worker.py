"""The training loop of one rank."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from commhooks.errors import CheckpointError
from commhooks.experiments.commit import commit_of_code
from commhooks.experiments.devices import PeakMemory, backend_in_use, own_device
from commhooks.experiments.launch import Send, silent
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.machine import OtherPrograms, machine, versions
from commhooks.experiments.results.goals import GoingOn, Pursuit
from commhooks.experiments.runs import (
    Compute,
    EvaluationRecord,
    Goal,
    LayerRecord,
    ProbeRecord,
    RunResult,
    RunSettings,
    StepRecord,
)
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import LoadedTask, load_task
from commhooks.experiments.tasks.task import mixed, seed_generators
from commhooks.experiments.training.kinds import register
from commhooks.experiments.training.measure import Split
from commhooks.experiments.training.probe import Probe
from commhooks.experiments.training.progress import Progress, StoppedError, can_continue
from commhooks.experiments.training.registration import Counted, sent_by_interface
from commhooks.experiments.turns import drawn

# How many steps of a model are measured for its compute, and for how many seconds if they are more than the least.
_LEAST_CALIBRATION_STEPS, _CALIBRATION_STEPS, _CALIBRATION_SECONDS = 7, 60, 4.0
_WARM_UP = 2  # steps of those that are not counted: memory is allocated in them


@dataclass(frozen=True)
class Work:
    """The runs for the ranks, the scales of their time, and the goals of runs that continue after their steps."""

    runs: Mapping[int, RunSettings]
    time_scales: Mapping[int, float]  # of each run, seconds here for one second as reported; missing: 1.0
    compute_here: Mapping[int, float]  # of each run whose compute is stated, as measured by `calibrate`
    going_on: GoingOn | None = None  # None: every run ends after the steps asked for
    goals: Mapping[int, Goal] = field(default_factory=dict)  # of runs whose baseline was finished before
    progress: Path | None = None  # the folder in which runs save their progress; None: they do not save it


@dataclass(frozen=True)
class Preparing:
    """The message that the ranks are at work, but have no step to report yet."""


@dataclass(frozen=True)
class GroupBegun:
    """The message that the ranks begin to train these runs in turns."""

    runs: tuple[int, ...]


@dataclass(frozen=True)
class StepsBegin:
    """The message that a comparison group's models are in place: the first step and the clock of rates begin."""


@dataclass(frozen=True)
class StepDone:
    """The message that all ranks finished a step of a run."""

    run: int
    record: StepRecord
    again: bool = False  # True if it was made in an earlier attempt, and reported there


@dataclass(frozen=True)
class Evaluated:
    """The message that a run was evaluated, and its gradients measured if the step was probed."""

    run: int
    evaluation: EvaluationRecord
    probe: ProbeRecord | None


@dataclass(frozen=True)
class BeginsAgain:
    """The message that a run begins with its first step, because its checkpoint cannot be used."""

    run: int
    reason: str


@dataclass(frozen=True)
class NotSaved:
    """The message that a run's progress could not be written; the run continues."""

    run: int
    reason: str


@dataclass(frozen=True)
class RunDone:
    """The message that all ranks finished a run."""

    run: int
    result: RunResult


def train_all(rank: int, ranks: int, argument: Work, send: Send) -> None:
    """Train all runs in this rank's process; rank 0 sends the measurements.

    The runs of one comparison group, which differ only in their hooks, take turns, one step each: any other load on the
    machine then slows all of them equally, so that their times can be compared. Runs that continue after their steps
    take turns too.
    """
    torch.set_num_threads(1)
    told = send if rank == 0 else silent
    for _, group in groupby(argument.runs.items(), key=lambda pair: pair[1].comparison_group):
        numbered = dict(group)
        told(GroupBegun(tuple(numbered)))
        try:
            _train_in_turns(numbered, argument, told)
        except StoppedError:
            return
        finally:
            gc.collect()  # a DDP that outlives its process group may abort the process


def calibrate(rank: int, ranks: int, argument: Sequence[RunSettings], send: Send) -> None:
    """Measure a step's compute, in seconds, for runs of one comparison group; rank 0 sends each estimate.

    Compute is measured as in the runs: in their DDP, on all ranks at once, and in turns between the same number of
    models, which evict each other from the processor's caches. But the hook is plain all-reduce, and the link has no
    limit.
    """
    torch.set_num_threads(1)
    plain = dataclasses.replace(
        argument[0], hook=Spec("all-reduce"), link=LinkSettings(), steps=_CALIBRATION_STEPS + 1, evaluate_every=10**9
    )
    runs = []
    for number in range(len(argument)):
        runs.append(_Run(number, plain, 1.0, silent))
        (send if rank == 0 else silent)(Preparing())
    began = time.perf_counter()
    for step in range(_CALIBRATION_STEPS):
        for run in runs:
            run.step(step)
        counted = [one.compute for run in runs for one in run.steps[_WARM_UP:] or run.steps]
        means = torch.tensor([statistics.median(counted), time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(means)  # so that all ranks stop at the same step
        compute, elapsed = (means / ranks).tolist()
        if rank == 0:
            send(compute)
        if step + 1 >= _LEAST_CALIBRATION_STEPS and elapsed > _CALIBRATION_SECONDS:
            break
    for run in runs:
        run.close()


def time_scale_of(settings: RunSettings, compute_here: float | None) -> float:
    """Return the number of seconds here that stand for one second on the processor that the settings state."""
    if settings.compute is None:
        return 1.0
    stated = Compute.parse(settings.compute)
    if stated.factor is not None:
        return 1 / stated.factor
    assert stated.seconds is not None and compute_here is not None, "a stated time is compared with a measured one"
    return compute_here / stated.seconds


def _train_in_turns(runs: Mapping[int, RunSettings], work: Work, send: Send) -> None:
    """Train several runs, a step of each in turn, on the default process group; every rank calls this."""
    training: dict[int, _Run] = {}
    able = all(can_continue(settings) for settings in runs.values())
    for number, settings in runs.items():
        run = _Run(number, settings, work.time_scales.get(number, 1.0), send)
        if work.progress is not None and not run.load(work.progress, able=able):
            run.close()
            run = _Run(number, settings, run.time_scale, send)
        training[number] = run
        send(Preparing())  # a task may take long to load
    send(StepsBegin())
    others, progress = OtherPrograms(), Progress(work.progress if able else None)
    try:
        for step in range(max(settings.steps for settings in runs.values())):
            due = [number for number, run in training.items() if len(run.steps) == step < run.settings.steps]
            for number in drawn(step, due):  # in a fixed order, one hook would always follow the same other
                training[number].step(step)
            if due:
                progress.keep([*training.values()])
        _go_on(training, work, progress)
    except StoppedError:
        for run in training.values():
            run.close()
        raise
    for run in training.values():
        run.evaluate()
    busy = _used_by_others(others, next(iter(runs.values())))
    for number, run in training.items():
        send(RunDone(number, run.result(work.compute_here.get(number), busy)))
        run.close()


def _go_on(training: Mapping[int, _Run], work: Work, progress: Progress) -> None:
    """Let the runs that have a goal take turns until they reach it; rank 0 decides on the steps for all ranks."""
    goals = dict(work.goals)
    if work.going_on is not None:
        baseline = work.going_on.baseline
        first = next((run for run in training.values() if run.settings.hook == baseline), None)
        if first is not None:
            goals = {number: work.going_on.goal(first.steps) for number, run in training.items() if run is not first}
    pursuits = {}
    for number, run in training.items():
        run.goal = goals.get(number)
        if run.goal is not None:
            pursuits[number] = Pursuit(run.goal, run.steps)
    turn = 0
    while pursuits:
        going = torch.tensor([pursuit.goes_on for pursuit in pursuits.values()])
        dist.broadcast(going, 0)  # each rank has its own clock
        pursuits = {number: one for (number, one), goes in zip(pursuits.items(), going.tolist(), strict=True) if goes}
        for number in drawn(turn := turn + 1, [*pursuits]):
            run = training[number]
            run.step(len(run.steps))
            pursuits[number].add(run.steps[-1])
        progress.keep([*training.values()])


def _used_by_others(others: OtherPrograms, settings: RunSettings) -> float | None:
    """Return the number of rank 0's processors that programs other than the ranks used; every rank calls this."""
    here = dist.get_world_size()
    if settings.link.kind != "hosts":  # those are all on this machine
        here = int(os.environ.get("LOCAL_WORLD_SIZE", here))
    seconds = torch.tensor(others.own_seconds() if dist.get_rank() < here else 0.0, dtype=torch.float64)
    dist.all_reduce(seconds)
    return others.used(seconds.item())


class _Run:
    """A model in training, and its measurements so far."""

    def __init__(self, number: int, settings: RunSettings, time_scale: float, send: Send) -> None:
        self.number, self.settings, self.time_scale, self.send = number, settings, time_scale, send
        self.device = own_device(settings.device)
        self.memory = PeakMemory(self.device)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        with self.memory.counted():
            self.task: LoadedTask = load_task(settings.task, settings.seed, self.device)
            self.model = self.task.model
            self._check_data()
            self.registered = register(settings, self.task, time_scale)
        self.optimizer = self.registered.optimizer
        self.clock = self.registered.clock()
        self.goal: Goal | None = None
        self.steps: list[StepRecord] = []
        self.evaluated = 0  # the last step after which the model was evaluated
        self.evaluations: list[EvaluationRecord] = []
        self.probes: list[ProbeRecord] = []
        self.registered.wire.start_clock()
        self.registered.wire.pause()

    def _check_data(self) -> None:
        """Raise ValueError if the ranks do not divide the same data, which no loss would show."""
        prints: list[str | None] = [None] * self.ranks
        dist.all_gather_object(prints, self.task.fingerprint(self.ranks))
        if len(set(prints)) > 1:
            raise ValueError(
                f"task {self.task.name!r}: the ranks have different data, though they have the same seed; "
                "let the task's function depend on its arguments and on torch's, numpy's and Python's random numbers "
                "alone, which are seeded (the order of a set, for example, differs by process)"
            )

    def save(self, folder: Path) -> None:
        """Write model, optimizer, the hook's state and all records so far; every rank calls this."""
        extra = {
            "source": self.task.source,
            "steps": [dataclasses.asdict(one) for one in self.steps],
            "evaluations": [dataclasses.asdict(one) for one in self.evaluations],
            "probes": [dataclasses.asdict(one) for one in self.probes],
        }
        try:
            self.registered.save(folder / self.settings.name, len(self.steps), extra)
        except CheckpointError as error:  # on all ranks
            self.send(NotSaved(self.number, str(error)))

    def load(self, folder: Path, *, able: bool) -> bool:
        """Continue from the run's checkpoint, if there is one, and report again everything before it.

        Returns whether this object can be used. If not, another one must be made: the checkpoint is damaged, or belongs
        to another version of the task. Runs that are not `able` to continue, perhaps because of one that takes turns
        with them, begin with their first step.
        """
        place = folder / self.settings.name
        if not able:
            if place.exists():
                self.send(BeginsAgain(self.number, "it takes turns with a run that cannot be continued"))
            return True
        try:
            found = self.registered.load(place)
        except CheckpointError as error:  # on all ranks
            self.send(BeginsAgain(self.number, str(error)))
            return False
        if found is None:
            return True
        if found["source"] != self.task.source:
            self.send(BeginsAgain(self.number, f"the file of task {self.task.name!r} has changed"))
            return False
        self.steps = [StepRecord(**one) for one in found["steps"]]
        self.evaluations = [EvaluationRecord(**one) for one in found["evaluations"]]
        self.probes = [
            ProbeRecord(**one | {"layers": tuple(LayerRecord(**layer) for layer in one["layers"])})
            for one in found["probes"]
        ]
        self.evaluated = self.evaluations[-1].step if self.evaluations else 0
        self.registered.wire.start_clock(self.time_scale * sum(one.seconds for one in self.steps))
        self.registered.wire.pause()
        probes = {one.step: one for one in self.probes}
        evaluations = {one.step: Evaluated(self.number, one, probes.get(one.step)) for one in self.evaluations}
        for record in self.steps:
            self.send(StepDone(self.number, record, again=True))
            if record.step in evaluations:
                self.send(evaluations[record.step])
        return True

    def step(self, step: int) -> None:
        """Take one optimizer step, and record its time and bytes."""
        batch = self.task.batch(step, self.rank, self.ranks)
        asked = self.settings.steps
        last = step + 1 == asked
        evaluated = last or (step + 1) % self.settings.evaluate_every == 0
        # The true mean crosses the network too, uncompressed: on a network that is really slow, only once.
        probed = last or (evaluated and step < asked and self.settings.link.kind == "emulated")
        probed = probed and self.registered.can_be_probed
        probe = Probe(self.model) if probed else None
        # A schedule is for the steps asked for. A run that goes on keeps the last rate.
        self.task.set_learning_rate(self.optimizer, min(step, asked - 1), asked)
        seed_generators(mixed(self.settings.seed, step, self.rank))  # dropout must not depend on whose turn it was
        before, sent = self.registered.counted(), sent_by_interface(self.settings)
        self.registered.wire.resume()
        with self.memory.counted():
            self.clock.begin()
            loss = self.task.loss(self.registered.ddp, batch)
            loss.backward()
            self.clock.backward_ended()
            self.optimizer.step()
            self.clock.optimizer_ended()
            self.registered.after_step()
            split, ended = self.clock.end(), time.time()
        self.registered.wire.pause()
        after, interface = self.registered.counted(), _difference(sent, sent_by_interface(self.settings))
        mean_loss = loss.detach().cpu().double().reshape(())
        dist.all_reduce(mean_loss)
        record = _record(step + 1, mean_loss.item() / self.ranks, split, before, after, self)
        self.steps.append(dataclasses.replace(record, probed=probed, ended=ended, interface_bytes=interface))
        found = None if probe is None else probe.finish(step + 1, self.registered)
        self.optimizer.zero_grad()
        self.send(StepDone(self.number, self.steps[-1]))
        if found is not None:
            self.probes.append(found)
        if evaluated:
            self.evaluate(found)

    def evaluate(self, probe: ProbeRecord | None = None) -> None:
        """Evaluate the model on rank 0, unless that was done after this step; the clock is stopped, and others wait."""
        if self.evaluated == len(self.steps):
            return
        self.evaluated = len(self.steps)
        with self.registered.shared_model() as model:
            if self.rank == 0:
                metrics = self.task.evaluate(model)
                loss = metrics.pop("loss")
                self.evaluations.append(EvaluationRecord(step=self.evaluated, loss=loss, metrics=metrics))
                self.send(Evaluated(self.number, self.evaluations[-1], probe))
        dist.barrier()

    def result(self, compute_here: float | None, used_by_others: float | None) -> RunResult:
        """Return the measurements."""
        fingerprints: list[str | None] = [None] * self.ranks
        with self.registered.shared_model() as model:
            dist.all_gather_object(fingerprints, fingerprint(model))
        return RunResult(
            settings=self.settings,
            parameters=sum(p.numel() for p in self.model.parameters()),
            description=self.task.description,
            source=self.task.source,
            steps=tuple(self.steps),
            evaluations=tuple(self.evaluations),
            probes=tuple(self.probes),
            replicas_identical=len(set(fingerprints)) == 1,
            time_scale=self.time_scale,
            compute_here=compute_here,
            versions=versions(),
            machine=machine(self.device, backend_in_use(self.device))
            | ({} if used_by_others is None else {"used_by_others": round(used_by_others, 2)}),
            goal=self.goal,
            peak_memory=self.memory.peak,
            commit=commit_of_code() if self.rank == 0 else None,  # whose result is kept
        )

    def close(self) -> None:
        """Remove everything from the model; the DDP must go before the process group does."""
        self.clock.remove()
        self.registered.close()
        del self.registered


def fingerprint(model: nn.Module) -> str:
    """Return a hash of all parameters' bits."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def _record(step: int, loss: float, split: Split, before: Counted, after: Counted, run: _Run) -> StepRecord:
    """Return a step's split in the seconds of the stated processor, and the bytes that it added."""
    gradient_bytes = after.gradient_bytes - before.gradient_bytes
    return StepRecord(
        step=step,
        loss=loss,
        **{name: seconds / run.time_scale for name, seconds in vars(split).items()},
        gradient_bytes=gradient_bytes,
        payload_bytes=after.payload_bytes - before.payload_bytes,
        moved_bytes=after.moved_bytes - before.moved_bytes,
        dense_bytes=run.registered.dense_bytes(gradient_bytes, run.ranks),
    )


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
