"""TensorBoard logs of a run: curves over steps, training time and bytes sent, and the settings they belong to."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from statistics import median

from torch.utils.tensorboard.summary import hparams
from torch.utils.tensorboard.writer import SummaryWriter

from ..runs import RunResult, RunSettings


def write_logs(result: RunResult, folder: Path) -> Path:
    """Write one run's logs below the folder and return where.

    Wall times are those of the training. Because runs take turns, TensorBoard's "relative" axis counts the other runs'
    steps too: a run's own time, and what it sent, are the steps of `loss_by_training_ms` and `loss_by_kB_sent`.
    """
    target = folder / f"{result.settings.task}.{result.settings.hook.file_name}"
    clock = list(accumulate(step.seconds for step in result.steps))
    sent = list(accumulate(step.moved_bytes for step in result.steps))
    with SummaryWriter(str(target)) as writer:
        for step, seconds, total in zip(result.steps, clock, sent, strict=True):
            values = {
                "loss/train": step.loss,
                "seconds_per_step/total": step.seconds,
                "seconds_per_step/compute": step.compute,
                "seconds_per_step/compression": step.compression,
                "seconds_per_step/waiting": step.waiting,
                "bytes_sent_by_a_rank/in_the_step": step.moved_bytes,
                "bytes_sent_by_a_rank/so_far": total,
            }
            for tag, value in values.items():
                writer.add_scalar(tag, value, step.step, walltime=step.ended)
            _against_costs(writer, "train", step.loss, seconds, total, step.ended)
        for found in result.evaluations:
            place = found.step - 1
            ended = result.steps[place].ended
            writer.add_scalar("loss/held_out", found.loss, found.step, walltime=ended)
            writer.add_scalar("accuracy/held_out", found.accuracy, found.step, walltime=ended)
            _against_costs(writer, "held_out", found.loss, clock[place], sent[place], ended)
        totals = {
            "total/loss_held_out": result.evaluations[-1].loss,
            "total/accuracy_held_out": result.evaluations[-1].accuracy,
            "total/MB_sent_by_a_rank": sent[-1] / 1e6,
            "total/median_ms_per_step": 1e3 * median(step.seconds for step in result.steps),
        }
        # Not add_hparams, which writes a second folder for every run.
        for summary in hparams(_settings_of(result.settings), totals):
            writer.file_writer.add_summary(summary)
        for tag, value in totals.items():
            writer.add_scalar(tag, value, len(result.steps), walltime=result.steps[-1].ended)
    return target


def _against_costs(writer: SummaryWriter, which: str, loss: float, seconds: float, sent: int, ended: float) -> None:
    """Log a loss against time and bytes; the only axis that TensorBoard has for these is the step, an integer."""
    writer.add_scalar(f"loss_by_training_ms/{which}", loss, round(1e3 * seconds), walltime=ended)
    writer.add_scalar(f"loss_by_kB_sent/{which}", loss, round(sent / 1e3), walltime=ended)


def _settings_of(settings: RunSettings) -> dict[str, bool | int | float | str]:
    """Return the columns of TensorBoard's hyperparameters page."""
    rate = settings.link.bits_per_second
    return {
        "task": settings.task,
        "size": settings.size,
        "hook": settings.hook.label,
        "ranks": settings.ranks,
        "steps": settings.steps,
        "seed": settings.seed,
        "ddp": settings.ddp,
        "bucket_cap_MiB": settings.bucket_cap_mb or "the DDP's own",
        "link_Mbit_per_s": rate / 1e6 if rate else "unlimited",
        "link_latency_ms": 1e3 * settings.link.latency_seconds,
    }
