"""The sections of the suite, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from commhooks.experiments.launch import Tell
from experiments.studies.bench import codecs, ddp, hooks, powersgd, real_step
from experiments.studies.bench.rows import Row


@dataclass(frozen=True)
class Section:
    """Figures of one kind."""

    title: str
    sentence: str  # what is compared
    measure: Callable[[bool, Tell], list[Row]]  # quick: a trial of seconds
    is_wide: bool = False  # whether rows of one name stand side by side


SECTIONS = {
    "ddp": Section("`ddp_core` and PyTorch's DDP", ddp.SENTENCE, ddp.measure),
    "hooks": Section("Hooks and their twins in PyTorch", hooks.SENTENCE, hooks.measure),
    "powersgd": Section("PowerSGD and its memory traffic", powersgd.SENTENCE, powersgd.measure, is_wide=True),
    "real-step": Section("PowerSGD in a real step", real_step.SENTENCE, real_step.measure),
    "throughput": Section("Compressors and a memory copy", codecs.SENTENCE, codecs.measure, is_wide=True),
    "levels": Section("Compiled passes and a memory copy", codecs.LEVELS, codecs.measure_levels, is_wide=True),
}
