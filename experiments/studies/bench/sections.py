"""The sections of the suite, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from experiments.studies.bench import (
    ddp,
    hooks,
    levels,
    powersgd,
    real_step,
    throughput,
)
from experiments.studies.bench.rows import Row


@dataclass(frozen=True)
class Section:
    """Figures of one kind."""

    title: str
    sentence: str  # what is compared
    measure: Callable[..., list[Row]]  # (quick, tell) -> rows; (quick, tell, only) if it can be limited
    is_wide: bool = False  # whether rows of one name stand side by side
    is_limited: bool = False  # whether it can measure only the rows that contain given words


SECTIONS = {
    "ddp": Section("`ddp_core` and PyTorch's DDP", ddp.SENTENCE, ddp.measure),
    "hooks": Section("Hooks and their twins in PyTorch", hooks.SENTENCE, hooks.measure),
    "powersgd": Section(
        "PowerSGD and its memory traffic", powersgd.SENTENCE, powersgd.measure, is_wide=True, is_limited=True
    ),
    "real-step": Section("PowerSGD in a real step", real_step.SENTENCE, real_step.measure, is_limited=True),
    "throughput": Section("Compressors and a memory copy", throughput.SENTENCE, throughput.measure, is_wide=True),
    "levels": Section("Compiled passes and a memory copy", levels.SENTENCE, levels.measure, is_wide=True),
}
