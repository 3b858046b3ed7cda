"""TensorBoard logs of runs, written during training: curves over steps, training time and bytes sent."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.metadata import SESSION_END_INFO_TAG, create_summary_metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
from torch.utils.tensorboard.summary import hparams
from torch.utils.tensorboard.writer import FileWriter

from commhooks.experiments.results.rates import bytes_per_second, link_use
from commhooks.experiments.results.summary import Typical, unprobed
from commhooks.experiments.runs import EvaluationRecord, ProbeRecord, RunSettings, StepRecord
from commhooks.experiments.sweeps.execute import RunFailed
from commhooks.experiments.training.worker import Evaluated, RunDone, StepDone

_FLUSH_SECONDS = 2.0
_LAYERS = 16  # the largest have curves of their own
_TOTALS = ("loss_held_out", "accuracy_held_out", "MB_sent_by_a_rank", "ms_per_step")
"""The columns of the hyperparameters page: TensorBoard takes them from one of the runs, so all runs name the same."""


class LiveLogs:
    """A listener of `execute` that logs every run into `RunSettings.log_folder`, where TensorBoard can follow it.

    A run that begins replaces the log that an earlier, unfinished attempt at it left in its folder, and nothing else: a
    run with a result does not begin again, so its log stays. Writing happens on threads, one for each run in progress:
    neither the disk nor TensorBoard keeps the ranks waiting. A log that cannot be written, for example because the disk
    is full, ends with a warning; its run continues.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: dict[RunSettings, RunLog] = {}

    def __call__(self, settings: RunSettings, message: object) -> None:
        """Log the message."""
        try:
            self._log(settings, message)
        except OSError as error:
            self._give_up(settings, error)

    def close(self) -> None:
        """End the logs of the runs that are still in progress; TensorBoard shows them up to here."""
        for settings in list(self._logs):
            try:
                self._logs.pop(settings).end(None)
            except OSError as error:
                self._give_up(settings, error)

    def __enter__(self) -> LiveLogs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _log(self, settings: RunSettings, message: object) -> None:
        if isinstance(message, StepDone) and message.record.step == 1:
            if settings in self._logs:  # another run failed, and this one is made again
                self._logs.pop(settings).end(None)
            self._logs[settings] = RunLog(settings, self._folder)
        log = self._logs.get(settings)
        if log is None:  # given up, or failed before its first step
            return
        if isinstance(message, StepDone):
            log.step(message.record)
        elif isinstance(message, Evaluated):
            log.evaluated(message.evaluation, message.probe)
        elif isinstance(message, RunDone | RunFailed):
            self._logs.pop(settings).end("STATUS_SUCCESS" if isinstance(message, RunDone) else "STATUS_FAILURE")

    def _give_up(self, settings: RunSettings, error: OSError) -> None:
        self._logs.pop(settings, None)
        path = self._folder / settings.log_folder
        warnings.warn(f"{path}: the TensorBoard log ends here ({error}); the run itself continues", stacklevel=2)


class RunLog:
    """The log of one run, open for writing.

    Wall times are the training's. Because runs take turns, TensorBoard's "relative" axis counts the other runs' steps
    too: a run's own time and sent bytes are the steps of `loss_by_training_ms` and `loss_by_kB_sent`.
    """

    def __init__(self, settings: RunSettings, folder: Path) -> None:
        self.path: Path = folder / settings.log_folder
        for stale in self.path.glob("events.out.tfevents.*"):
            stale.unlink()
        self._settings = settings
        self._steps: list[StepRecord] = []
        self._clock = 0.0  # sum of the steps' seconds
        self._sent = 0
        self._ended = 0.0  # Unix time of the last step
        # A queue without a limit: with one, a slow disk would hold up the thread that reads the ranks' messages.
        self._writer = FileWriter(str(self.path), max_queue=0, flush_secs=_FLUSH_SECONDS)
        # Not add_hparams, which writes a second folder for every run, and only at its end.
        totals = {f"total/{name}": 0.0 for name in _TOTALS}
        for summary in hparams(_settings_of(settings), totals)[:2]:  # the third says that the run ended well
            self._writer.add_summary(summary)

    def step(self, record: StepRecord) -> None:
        """Log a step."""
        self._steps.append(record)
        self._clock += record.seconds
        self._sent += record.moved_bytes
        self._ended = record.ended
        values = {
            "loss/train": record.loss,
            "seconds_per_step/total": record.seconds,
            "seconds_per_step/compute": record.compute,
            "seconds_per_step/compression": record.compression,
            "seconds_per_step/waiting": record.waiting,
            "bytes_sent_by_a_rank/in_the_step": record.moved_bytes,
            "bytes_sent_by_a_rank/so_far": self._sent,
            "bytes_sent_by_a_rank/per_second": bytes_per_second([record]),
        }
        use = link_use([record], self._settings.link)
        self._write(values if use is None else values | {"link_use": use}, record.step)
        self._against_costs("train", record.loss)

    def evaluated(self, evaluation: EvaluationRecord, probe: ProbeRecord | None) -> None:
        """Log an evaluation after the last logged step, the errors that its probe measured, and the totals so far."""
        values = {
            "loss/held_out": evaluation.loss,
            **{f"{name}/held_out": value for name, value in evaluation.metrics.items()},
            "total/MB_sent_by_a_rank": self._sent / 1e6,
            "total/ms_per_step": 1e3 * Typical.of(unprobed(self._steps)).seconds,
        }
        found = {"loss": evaluation.loss} | dict(evaluation.metrics)
        values |= {f"total/{name}_held_out": value for name, value in found.items()}
        if probe is not None:
            values |= _probed(probe)
        self._write(values, evaluation.step)
        self._against_costs("held_out", evaluation.loss)

    def end(self, status: str | None) -> None:
        """Write the run's status by TensorBoard's name (None: interrupted, so none is written), and close the log."""
        if status is not None:
            ended = SessionEndInfo(status=Status.Value(status), end_time_secs=self._ended)
            metadata = create_summary_metadata(HParamsPluginData(session_end_info=ended))
            self._writer.add_summary(Summary(value=[Summary.Value(tag=SESSION_END_INFO_TAG, metadata=metadata)]))
        self._writer.close()

    def _write(self, values: Mapping[str, float], step: int) -> None:
        """Log all values as one event, which costs a fraction of one each."""
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._writer.add_summary(summary, step, walltime=self._ended)

    def _against_costs(self, which: str, loss: float) -> None:
        """Log a loss against time and bytes; the only axis that TensorBoard has for these is the step, an integer."""
        self._write({f"loss_by_training_ms/{which}": loss}, round(1e3 * self._clock))
        self._write({f"loss_by_kB_sent/{which}": loss}, round(self._sent / 1e3))


def _probed(probe: ProbeRecord) -> dict[str, float]:
    """Return the errors and residuals of all parameters together and of the largest ones."""
    largest = sorted(probe.layers, key=lambda layer: layer.elements, reverse=True)[:_LAYERS]
    found = [("all", probe.error, probe.residual), *((layer.name, layer.error, layer.residual) for layer in largest)]
    values: dict[str, float] = {}
    for name, error, residual in found:
        values[f"gradient_error/{name}"] = error
        if residual is not None:
            values[f"residual_over_gradient/{name}"] = residual
    return values


def _settings_of(settings: RunSettings) -> dict[str, bool | int | float | str]:
    """Return the columns of TensorBoard's hyperparameters page.

    It sorts them by name and at first shows five: hence "with" before settings in which runs seldom differ.
    """
    return {
        "task": settings.task.label,
        "hook": settings.hook.label,
        "optimizer": "the task's own" if settings.optimizer is None else settings.optimizer.label,
        "ranks": settings.ranks,
        "steps": settings.steps,
        "seed": settings.seed,
        "link": settings.link.label,
        "with_compute": settings.compute or "as measured",
        "with_ddp": settings.ddp,
        "with_bucket_cap_MiB": "the DDP's own" if settings.bucket_cap_mb is None else f"{settings.bucket_cap_mb:g}",
    }
