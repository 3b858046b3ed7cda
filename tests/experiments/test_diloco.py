"""DiLoCo in the place of a hook: how it is written, what is refused, and what a run of it does."""

from __future__ import annotations

import inspect
import re
import statistics
from html import unescape
from pathlib import Path

import pytest

import commhooks
from commhooks.experiments.report.writing import write
from commhooks.experiments.results.outcomes import settings_of
from commhooks.experiments.runs import RunResult, RunSettings
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.experiments.training.diloco import settings_of as arguments_of
from tests.experiments.on_two_ranks import train_on_two_ranks

BITS_PER_SECOND = 50e6
DENSE, EXACT, ROUNDS, STREAMED = HOOKS = (
    "all-reduce",
    "diloco:every=1,outer=average",
    "diloco:compressor=int4,every=6",
    "diloco:compressor=(powersgd:rank=1),delay=1,every=4,fragments=2,mixing=0.5",
)
STEPS = 14


def settings(hook: str) -> RunSettings:
    return RunSettings.from_dict(
        {"task": "digits:size=tiny", "hook": hook, "optimizer": "sgd:lr=0.05", "steps": STEPS, "link": "50Mbit/s"}
        | {"evaluate_every": 5}
    )


@pytest.fixture(scope="module")
def results() -> dict[str, RunResult]:
    return dict(zip(HOOKS, train_on_two_ranks([settings(hook) for hook in HOOKS]), strict=True))


def test_what_a_comparison_trains_is_what_diloco_does_by_default() -> None:
    made = arguments_of(Spec.parse("diloco:every=6,compressor=int4"))
    assert (made.pop("every"), made.pop("compressor")) == (6, commhooks.make_compressor("int4"))
    parameters = inspect.signature(commhooks.DiLoCo).parameters
    assert made == {name: parameters[name].default for name in made} and "outer" in made


def test_a_run_whose_exchanges_go_on_between_steps_takes_no_turns() -> None:
    dense, _, diloco, streamed = map(settings, HOOKS)
    assert dense.comparison_group == diloco.comparison_group != streamed.comparison_group


def test_rounds_of_one_step_train_as_data_parallel_training_does(results: dict[str, RunResult]) -> None:
    dense, exact = results[DENSE], results[EXACT]
    for one, other in zip(dense.steps, exact.steps, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-4)  # sums in another order, 14 steps long
        assert other.moved_bytes == one.moved_bytes == other.dense_bytes


def test_bytes_are_sent_at_the_rounds_turns_and_take_their_time_on_the_link(results: dict[str, RunResult]) -> None:
    steps = results[ROUNDS].steps
    assert [step.step for step in steps if step.moved_bytes] == [6, 12]
    for step in steps:
        assert step.dense_bytes == results[DENSE].steps[0].dense_bytes
        assert step.compute + step.compression + step.waiting == pytest.approx(step.seconds, abs=1e-6)
        assert step.seconds >= 8 * step.moved_bytes / BITS_PER_SECOND
        assert (step.waiting > 0) == (step.moved_bytes > 0)
    assert [step.step for step in results[STREAMED].steps if step.moved_bytes] == [2, 4, 6, 8, 10, 12, 14]
    sent = [sum(step.moved_bytes for step in results[hook].steps) for hook in (ROUNDS, STREAMED)]
    assert 0 < sent[1] < sent[0] < sum(step.dense_bytes for step in steps) / 4


def test_ranks_share_the_model_that_is_evaluated(results: dict[str, RunResult]) -> None:
    for result in results.values():
        assert result.replicas_identical
        assert [one.step for one in result.evaluations] == [5, 10, 14]
        assert [one.step for one in result.probes] == ([5, 10, 14] if result.settings.hook.label == DENSE else [])
    first, second, last = (one.loss for one in results[ROUNDS].evaluations)
    assert first == load_task(results[ROUNDS].settings.task).evaluate()["loss"], "no round has ended by step 5"
    assert last < second < first


@pytest.mark.usefixtures("pictures_are_not_rendered")
def test_a_report_has_the_mean_step_and_the_peak_of_a_round(results: dict[str, RunResult], tmp_path: Path) -> None:
    (setting,) = settings_of([results[hook] for hook in HOOKS])
    found = {one.hook: one for one in setting.outcomes}
    rounds = [results[ROUNDS].steps[begin : begin + 6] for begin in (0, 6)]
    means = [statistics.fmean(step.seconds for step in own) for own in rounds]
    assert found[ROUNDS].step.mean == pytest.approx(statistics.fmean(means))
    assert found[ROUNDS].parts["waiting"] > 0
    assert found[ROUNDS].peak_bytes.mean == results[ROUNDS].steps[5].moved_bytes and not found[DENSE].peak_bytes.seeds
    write(list(results.values()), tmp_path, baseline=None, target_loss=None, command="")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    shown = unescape(re.sub("<[^>]+>", "", page))
    assert all(hook in shown for hook in HOOKS) and "peak bytes" in shown
