"""Every registered compressor against a memory copy."""

from __future__ import annotations

import torch

from commhooks.compressors import COMPRESSORS
from experiments.hooks import make_hook
from experiments.launch import Tell
from experiments.leaderboard.contenders import SKIPPED, USUAL
from experiments.specs import Spec
from experiments.tasks import load_task
from experiments.training.lockstep import time_in_lockstep

from .rows import Row

SENTENCE = (
    "What a worker takes to compress and decompress the gradients of a GPT of 4.08 million parameters, on one thread "
    "and among 2 workers in one process, over the time of copying them: every registered compressor at its usual "
    "settings, with error feedback where that is the default."
)
WORKERS = 2


def measure(quick: bool, tell: Tell) -> list[Row]:
    """Return a row for each compressor."""
    task = load_task(Spec.parse("gpt:size=tiny" if quick else "gpt:size=base", "task"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    try:
        for text in names()[:3] if quick else names():
            tell(f"throughput: {text}")
            compressor = make_hook(Spec.parse(text))
            spread = time_in_lockstep(task, compressor, workers=WORKERS, rounds=2 if quick else 8)
            rows.append(Row(name=text, quantity="time over a copy", spread=spread))
    finally:
        torch.set_num_threads(threads)
    return rows


def names() -> list[str]:
    """Return every compressor that exchanges anything, with its settings."""
    return [text for name in sorted(COMPRESSORS) if name not in SKIPPED for text in USUAL.get(name, (name,))]
