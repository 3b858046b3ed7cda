"""TensorBoard logs, read as TensorBoard reads them: while the run goes, afterwards, and after an interruption."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from commhooks.experiments.runs import LayerRecord, ProbeRecord, RunResult
from commhooks.experiments.sweeps import tensorboard
from commhooks.experiments.sweeps.tensorboard import LiveLogs
from commhooks.experiments.training.worker import Evaluated, RunDone, StepDone
from tests.experiments.synthetic import DENSE_BYTES, STARTED, result
from tests.waiting import until

LAYERS = tuple(
    LayerRecord(name=f"layer{n}.weight", elements=10 * n, payload_bytes=None, error=n / 100, residual=None)
    for n in range(20)
)


def probed(steps: int = 40) -> RunResult:
    run = result("powersgd:rank=4", steps=steps)
    probe = ProbeRecord(step=10, error=0.25, residual=0.5, layers=LAYERS)
    return dataclasses.replace(run, probes=(probe,))


def messages(run: RunResult, until: int | None = None) -> Iterator[object]:
    """Yield what the ranks of a run send, up to a step; to the end without one."""
    evaluations = {one.step: one for one in run.evaluations}
    probes = {one.step: one for one in run.probes}
    for step in run.steps[:until]:
        yield StepDone(0, step)
        if step.step in evaluations:
            yield Evaluated(0, evaluations[step.step], probes.get(step.step))
    if until is None:
        yield RunDone(0, run)


def logged(run: RunResult, folder: Path) -> Path:
    """Log a run from its first message to its last, and return where."""
    with LiveLogs(folder) as logs:
        for message in messages(run):
            logs(run.settings, message)
    return folder / run.settings.log_folder


def events(path: Path) -> EventAccumulator:
    found = EventAccumulator(str(path))
    found.Reload()
    return found


def losses_in(found: EventAccumulator) -> int:
    return len(found.Scalars("loss/train")) if "loss/train" in found.Tags()["scalars"] else 0


def status(found: EventAccumulator) -> int | None:
    """Return how TensorBoard says that the run ended; None: not at all."""
    if "_hparams_/session_end_info" not in found.PluginTagToContent("hparams"):
        return None
    content = found.SummaryMetadata("_hparams_/session_end_info").plugin_data.content
    return int(HParamsPluginData.FromString(content).session_end_info.status)


def test_a_run_can_be_followed_while_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "_FLUSH_SECONDS", 0.05)
    run = probed()
    logs = LiveLogs(tmp_path)
    for message in messages(run, until=15):
        logs(run.settings, message)
    folder = tmp_path / run.settings.log_folder
    assert until(lambda: losses_in(events(folder)) == 15), "the writer flushes by itself"
    found = events(folder)
    assert [event.step for event in found.Scalars("loss/held_out")] == [10]
    assert status(found) is None
    columns = HParamsPluginData.FromString(found.SummaryMetadata("_hparams_/experiment").plugin_data.content).experiment
    shown = {metric.name.tag for metric in columns.metric_infos}
    assert shown <= set(found.Tags()["scalars"]), "each has a value after the first evaluation"
    logs.close()
    assert status(events(tmp_path / run.settings.log_folder)) is None


def test_a_log_shows_when_each_step_was_what_it_sent_and_how_much_of_the_link_it_used(tmp_path: Path) -> None:
    run = result()
    found = events(logged(run, tmp_path))
    assert status(found) == Status.Value("STATUS_SUCCESS")
    losses, by_bytes = found.Scalars("loss/train"), found.Scalars("loss_by_kB_sent/train")
    assert [(event.step, event.wall_time) for event in losses] == [(n, STARTED + n) for n in range(1, 41)]
    assert [event.value for event in losses] == pytest.approx([step.loss for step in run.steps])
    assert [event.step for event in by_bytes] == [DENSE_BYTES // 1_000 * n for n in range(1, 41)]
    assert [event.value for event in by_bytes] == [event.value for event in losses]
    assert found.Scalars("loss_by_training_ms/train")[-1].step == round(1e3 * sum(step.seconds for step in run.steps))
    assert [event.step for event in found.Scalars("loss/held_out")] == [10, 20, 30, 40]
    assert [event.value for event in found.Scalars("bits_per_byte/held_out")] == [3.0] * 4
    use = 8 * DENSE_BYTES / (100e6 * run.steps[2].seconds)
    assert found.Scalars("link_use")[2].value == pytest.approx(use)
    assert found.Scalars("bytes_sent_by_a_rank/per_second")[2].value == pytest.approx(use * 100e6 / 8)


def test_a_run_made_again_replaces_what_was_logged_of_it_before(tmp_path: Path) -> None:
    run, other = probed(steps=20), result("fp16")
    logged(other, tmp_path)
    with LiveLogs(tmp_path) as interrupted:
        for message in messages(run, until=15):
            interrupted(run.settings, message)
    with LiveLogs(tmp_path) as again:
        for attempt in (3, None):  # the first is cut off because another run of its comparison group fails
            for message in messages(run, until=attempt):
                again(run.settings, message)
    folder = tmp_path / run.settings.log_folder
    assert len(list(folder.iterdir())) == 1
    assert [event.step for event in events(folder).Scalars("loss/train")] == list(range(1, 21))
    assert len(events(tmp_path / other.settings.log_folder).Scalars("loss/train")) == 40


def test_a_log_that_cannot_be_written_ends_with_a_warning_and_the_run_goes_on(tmp_path: Path) -> None:
    run = result()
    folder = tmp_path / run.settings.log_folder
    folder.parent.mkdir(parents=True)
    folder.write_text("a file where the folder should be")
    with LiveLogs(tmp_path) as logs:
        with pytest.warns(UserWarning, match="the TensorBoard log ends here"):
            logs(run.settings, next(messages(run)))
        for message in list(messages(run))[1:]:
            logs(run.settings, message)
