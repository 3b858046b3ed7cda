"""How long the runs of a comparison go on, and that going on changes nothing about the steps asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch._C._distributed_c10d import HashStore

from commhooks.experiments.results.goals import GoingOn, Pursuit
from commhooks.experiments.results.outcomes import settings_of
from commhooks.experiments.runs import Goal, RunResult, RunSettings, StepRecord
from commhooks.experiments.specs import Spec
from commhooks.experiments.sweeps import execute
from commhooks.experiments.sweeps.notes import notes_about
from commhooks.experiments.sweeps.sweep import Sweep, report_again
from commhooks.experiments.training.worker import RunDone, Work, train_all
from tests.experiments.synthetic import result

STEPS = 4
TASK = """
import torch
from commhooks.experiments.tasks import Task

def task():
    return Task(
        model=torch.nn.Linear(2, 1),
        data=lambda seed, step, rank, ranks: torch.ones(3, 2) * (step + 1),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.001),
        schedule=lambda step, steps: 1 - step / steps,
    )
"""


@pytest.fixture
def alone() -> Iterator[None]:
    """Provide a world of this process only."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    dist.destroy_process_group()


@pytest.fixture
def task(tmp_path: Path) -> Spec:
    path = tmp_path / "falls.py"
    path.write_text(TASK)
    return Spec.parse(f"{path}:task", "task")


def trained(
    task: Spec, *, going_on: GoingOn | None = None, goals: Mapping[int, Goal] | None = None
) -> dict[str, RunResult]:
    """Train under two hooks in turns."""
    hooks = ("all-reduce", "fp16")
    runs = [RunSettings(task=task, hook=Spec(hook), ranks=1, steps=STEPS, evaluate_every=3) for hook in hooks]
    found: dict[str, RunResult] = {}

    def hear(message: object) -> None:
        if isinstance(message, RunDone):
            found[message.result.settings.hook.label] = message.result

    train_all(0, 1, Work(dict(enumerate(runs)), {}, {}, going_on, goals or {}), hear)
    return found


def losses(run: RunResult) -> list[float]:
    return [step.loss for step in run.steps]


def test_a_run_that_goes_on_has_the_same_steps_and_evaluation_as_one_that_ends_there(alone: None, task: Spec) -> None:
    plain = trained(task)["fp16"]
    gone = trained(task, goals={1: Goal(loss=None, seconds=math.inf, steps=3 * STEPS)})
    assert (len(gone["all-reduce"].steps), len(gone["fp16"].steps)) == (STEPS, 3 * STEPS)
    assert losses(gone["fp16"])[:STEPS] == losses(plain)
    assert [one.step for one in gone["fp16"].evaluations] == [3, 4, 6, 9, 12]
    assert gone["fp16"].evaluation == plain.evaluation == plain.evaluations[-1]
    assert [one.step for one in gone["fp16"].probes] == [one.step for one in plain.probes] == [3, 4]
    (ours,) = settings_of([gone["fp16"]])
    (theirs,) = settings_of([plain])
    assert ours.outcomes[0].held_out_loss == theirs.outcomes[0].held_out_loss
    assert ours.outcomes[0].moved_bytes == theirs.outcomes[0].moved_bytes


def test_ranks_take_the_steps_that_rank_0_decides(alone: None, task: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [True, True, False]

    def broadcast(tensor: torch.Tensor, source: int) -> None:
        assert source == 0
        tensor.fill_(left.pop(0))  # whatever this rank's clock says

    monkeypatch.setattr(dist, "broadcast", broadcast)
    found = trained(task, goals={1: Goal(loss=None, seconds=0.0, steps=STEPS)})
    assert len(found["fp16"].steps) == STEPS + 2 and not left


def steps_of(losses: list[float], seconds: float = 1.0) -> list[StepRecord]:
    return [dataclasses.replace(result().steps[0], loss=loss, seconds=seconds) for loss in losses]


@pytest.mark.parametrize(
    ("goal", "losses", "more"),
    [
        (Goal(loss=None, seconds=30.0, steps=400), [3.0], 10),  # the baseline's time
        (Goal(loss=None, seconds=1e9, steps=25), [3.0], 5),  # the most steps
        (Goal(loss=2.0, seconds=1e9, steps=400), [3.0, 3.0, 3.0, 3.0, 3.0, 1.0], 10),  # the target: a mean of ten
        (Goal(loss=3.5, seconds=1e9, steps=400), [3.0], 0),  # reached in the steps asked for
        (Goal(loss=2.0, seconds=1e9, steps=400), [math.nan], 1),  # diverged
    ],
)
def test_a_run_goes_on_until_the_first_of_its_goals(goal: Goal, losses: list[float], more: int) -> None:
    pursuit, made = Pursuit(goal, steps_of([3.0] * 20)), 0
    while pursuit.goes_on:
        pursuit.add(*steps_of([losses[min(made, len(losses) - 1)]]))
        made += 1
        assert made < 1000
    assert made == more


def test_a_hook_that_is_added_later_has_the_goal_of_the_baseline_that_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, other = result(), result("fp16")
    works: list[Work] = []

    def world(_: object, ranks: int, work: Work, hear: Callable[[object], None], **__: object) -> None:
        works.append(work)
        hear(RunDone(0, dataclasses.replace(other, goal=work.goals[0])))

    monkeypatch.setattr(execute, "run_world", world)
    going_on = Sweep(runs=(other.settings,), out=tmp_path, go_on=5).going_on([first.settings])
    assert going_on == GoingOn(baseline=Spec("all-reduce"), times=5, target=None)
    execute.execute([other.settings], tmp_path, lambda *_: None, going_on=going_on, known={first.settings: first})
    assert works[0].goals == {0: going_on.goal(first.steps)}
    (path,) = (tmp_path / "results").iterdir()
    assert RunResult.read(path).goal == works[0].goals[0]


@pytest.mark.usefixtures("pictures_are_not_rendered")
def test_a_busy_machine_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def on(cores: int, **more: float) -> RunResult:
        return dataclasses.replace(one := result(), machine={**one.machine, "cores": cores, **more})

    for run in (on(2), on(2, used_by_others=0.1), on(16, used_by_others=8.0), on(2, load=3.1)):
        assert notes_about([run]) == []
    # Of a load that nobody counted, the ranks and the process that started them are three.
    assert "other programs used up to 2.0 of 2 cores)" in notes_about([on(2, load=3.9), on(2, load=9.0)])[0]
    (note,) = notes_about([on(2, used_by_others=1.4), on(16, used_by_others=14.5)])
    assert note.startswith("The machine was busy (other programs used up to 1.4 of 2 cores and 14.5 of 16 cores): ")
    (tmp_path / "results").mkdir()
    on(2, used_by_others=1.4).write(tmp_path / "results")
    report_again([tmp_path], tmp_path / "report", Console(width=200))
    assert capsys.readouterr().out.startswith("warning: The machine was busy")
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.index("The machine was busy") < page.index("card finding")
