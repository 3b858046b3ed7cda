"""Runs that take turns go on where they were stopped, bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from commhooks.experiments.runs import RunResult, RunSettings
from commhooks.experiments.sweeps.execute import execute, goes_on_from, saved_steps
from commhooks.experiments.training.progress import PROGRESS, can_continue
from commhooks.experiments.training.worker import BeginsAgain, Evaluated, NotSaved, StepDone

HOOKS = ("all-reduce", "powersgd:rank=2,start_after=2", "dgc:ratio=0.05", "diloco:compressor=int4,every=5")
STEPS, EVALUATE_EVERY = 18, 6
STOPPED = 11
"""A step within a round of DiLoCo, between two evaluations."""


def settings(hook: str, **others: object) -> RunSettings:
    asked = {"task": "digits:size=tiny", "hook": hook, "steps": STEPS, "evaluate_every": EVALUATE_EVERY}
    return RunSettings.from_dict({"link": "100Mbit/s", **asked, **others})


RUNS = [settings(hook) for hook in HOOKS]


def learned(result: RunResult) -> tuple[object, ...]:
    """Return all of a result that depends on no clock."""
    losses = [(one.step, one.loss, one.moved_bytes, one.probed) for one in result.steps]
    probes = [(one.step, one.error, [layer.error for layer in one.layers]) for one in result.probes]
    return losses, probes, result.evaluations, result.replicas_identical


@pytest.mark.timeout(250)  # three worlds, on a machine that may be busy
def test_after_ctrl_c_in_a_round_all_go_on_after_it(tmp_path: Path) -> None:
    def press(run: RunSettings, message: object) -> None:
        if isinstance(message, StepDone) and (run, message.record.step) == (RUNS[1], STOPPED):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(RUNS, tmp_path / "stopped", press)
    saved = {saved_steps(tmp_path / "stopped", run) for run in RUNS}
    assert len(saved) == 1 and STOPPED <= min(saved) < STEPS  # the round that was under way was finished
    damaged = next((tmp_path / "stopped" / PROGRESS / RUNS[2].name).glob("*/shared.pt"))
    damaged.write_bytes(damaged.read_bytes()[:-1])

    heard: list[tuple[RunSettings, object]] = []
    made = execute(RUNS, tmp_path / "stopped", lambda run, message: heard.append((run, message)))
    assert [run for run, message in heard if isinstance(message, BeginsAgain)] == [RUNS[2]]
    for run in RUNS:
        said = [message for one, message in heard if one == run]
        steps = [message for message in said if isinstance(message, StepDone)]
        assert [message.record.step for message in steps] == [*range(1, STEPS + 1)]
        assert sum(message.again for message in steps) == (0 if run == RUNS[2] else min(saved))
        assert [message.evaluation.step for message in said if isinstance(message, Evaluated)] == [6, 12, 18]
    assert not (tmp_path / "stopped" / PROGRESS).exists()
    whole = execute(RUNS, tmp_path / "whole", lambda *_: None)
    for run in RUNS:
        assert learned(made.results[run]) == learned(whole.results[run])


def test_what_cannot_be_saved_goes_on_and_says_why(tmp_path: Path) -> None:
    (tmp_path / PROGRESS).mkdir()
    (tmp_path / PROGRESS / RUNS[0].name).write_text("in the way")
    heard: list[object] = []

    def press(run: RunSettings, message: object) -> None:
        heard.append(message)
        if isinstance(message, StepDone) and (run, message.record.step) == (RUNS[1], 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(RUNS[:2], tmp_path, press)
    (said,) = [message for message in heard if isinstance(message, NotSaved)]
    assert RUNS[0].name in said.reason
    assert saved_steps(tmp_path, RUNS[0]) == 0 and saved_steps(tmp_path, RUNS[1]) >= 2


def test_what_was_saved_is_not_promised_beside_a_run_that_cannot_be_continued(tmp_path: Path) -> None:
    runs = [dataclasses.replace(settings(hook), steps=2) for hook in ("fp16", "torch.none")]
    saved = tmp_path / PROGRESS / runs[0].name / "checkpoint-00001-step-1"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    assert goes_on_from(tmp_path, runs[:1]) == [1]
    assert goes_on_from(tmp_path, runs) == []
    heard: list[tuple[RunSettings, object]] = []
    execute(runs, tmp_path, lambda run, message: heard.append((run, message)))
    (said,) = [(run, message.reason) for run, message in heard if isinstance(message, BeginsAgain)]
    assert said == (runs[0], "it takes turns with a run that cannot be continued")


def test_what_cannot_go_on_is_not_saved() -> None:
    assert not can_continue(settings("torch.powersgd:matrix_approximation_rank=2"))
    assert not can_continue(settings("fp16", compute="10ms"))
    assert not can_continue(settings("fp16", link="hosts:100Mbit/s+10Mbit/s@10s"))
