"""TensorBoard logs of a run: the same curves, over steps and over the run's own clock."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from torch.utils.tensorboard.writer import SummaryWriter

from ..runs import RunResult

_EPOCH = 1_600_000_000.0  # any date, the same for every run: TensorBoard's relative time counts from the first event


def write_logs(result: RunResult, folder: Path) -> Path:
    """Write one run's logs below the folder and return where; TensorBoard's "relative" axis is training time."""
    target = folder / f"{result.settings.task}.{result.settings.hook.file_name}"
    clock = list(accumulate(step.seconds for step in result.steps))
    moved = list(accumulate(step.moved_bytes for step in result.steps))
    with SummaryWriter(str(target)) as writer:
        for step, seconds, total in zip(result.steps, clock, moved, strict=True):
            values = {
                "loss/train": step.loss,
                "step/seconds": step.seconds,
                "step/compute": step.compute,
                "step/compression": step.compression,
                "step/waiting": step.waiting,
                "bytes/moved": step.moved_bytes,
                "bytes/moved_so_far": total,
            }
            for tag, value in values.items():
                writer.add_scalar(tag, value, step.step, walltime=_EPOCH + seconds)
        for found in result.evaluations:
            when = _EPOCH + clock[found.step - 1]
            writer.add_scalar("loss/held_out", found.loss, found.step, walltime=when)
            writer.add_scalar("accuracy/held_out", found.accuracy, found.step, walltime=when)
    return target
