"""The overlap of communication and the backward pass, as a ratio with a target."""

from __future__ import annotations

from commhooks.experiments.launch import Tell
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.specs import Spec
from experiments.studies.bench.overlap import OverlapSettings, measure_overlap
from experiments.studies.bench.rows import Row

SENTENCE = (
    "A step over the sum of its parts, compute alone and communication alone: 1 means that nothing overlaps. A GPT on "
    "2 ranks with an emulated link of 100 Mbit/s, with a batch for which both parts take about equally long."
)
TARGET = 0.8


def measure(quick: bool, tell: Tell) -> list[Row]:
    """Return the only row."""
    tell("hiding: compute, communication and both in turns")
    link = LinkSettings(bits_per_second=100e6, latency_seconds=2e-4)
    task, rounds = Spec.parse("gpt:size=tiny" if quick else "gpt", "task"), 2 if quick else 9
    result = measure_overlap(OverlapSettings(task=task, link=link, rounds=rounds))
    assert result is not None, "this is no rank of torchrun"
    name = f"{result.buckets} buckets, batch {result.batch_size}"
    return [
        Row(
            name="all-reduce under ddp_core",
            quantity="step over its parts",
            spread=result.ratio,
            target=TARGET,
            absolute=name,
        )
    ]
