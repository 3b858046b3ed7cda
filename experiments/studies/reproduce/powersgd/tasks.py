"""What the reproductions of the PowerSGD paper's tables share: the two tasks, and the sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..ablation import Ablation

PAPER = "PowerSGD paper (Vogels et al., NeurIPS 2019)"
TASKS = ("digits:batch_size=8,channels=16,size=small,steps=80", "lstm:size=small,steps=300")
"""A CNN with batch norm under SGD with momentum, and an LSTM under AdamW: small models of the paper's two kinds. Both
keep their own optimizers, learning rates and schedules; nothing was tuned for any variant."""
TINY: Final[Mapping[str, Any]] = {"tasks": ("digits:size=tiny,steps=3",), "seeds": 2, "workers": 2, "processes": 1}


def sizes(variants: Mapping[str, str], against: Mapping[str, str] | None = None) -> dict[str, Ablation]:
    """Return the settings of an ablation by size."""
    return {
        "default": Ablation(tasks=TASKS, variants=variants, against=against or {}),
        "tiny": Ablation(variants=variants, against=against or {}, **TINY),
    }
