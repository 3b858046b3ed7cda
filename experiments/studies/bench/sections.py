"""The sections of the suite, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from experiments.studies.bench import (
    checkpoints,
    ddp,
    growth,
    guard,
    hiding,
    hooks,
    levels,
    policies,
    powersgd,
    real_step,
    throughput,
    wakeups,
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
    "wakeups": Section("Gloo's event loop in a real step", wakeups.SENTENCE, wakeups.measure),
    "throughput": Section("Compressors and a memory copy", throughput.SENTENCE, throughput.measure, is_wide=True),
    "levels": Section("Compiled passes and a memory copy", levels.SENTENCE, levels.measure, is_wide=True),
    "growth": Section("The cost as the work grows", growth.SENTENCE, growth.measure),
    "policies": Section("`fused` and `fifo`", policies.SENTENCE, policies.measure),
    "checkpoints": Section("Checkpoints and `torch.save`", checkpoints.SENTENCE, checkpoints.measure),
    "hiding": Section("Communication behind the backward pass", hiding.SENTENCE, hiding.measure),
    "guard": Section("The guard against gradients that were not averaged", guard.SENTENCE, guard.measure),
}
