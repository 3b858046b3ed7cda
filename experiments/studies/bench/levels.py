"""Compressors with compiled passes against a memory copy, at every level."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from commhooks.experiments.launch import Tell
from commhooks.native import compiled
from experiments.studies.bench.copies import EAGER, MODELS, TINY, Worked, in_copies
from experiments.studies.bench.rows import Row

SENTENCE = (
    "What a step takes a worker, in copies of the gradients of the section before: at each level of the compiled "
    "passes that this processor has, and without them, in turns, beside the target. Votes are "
    "`signum`'s, whose momentum is part of it."
)
WORKERS = (2, 8)
TITLES: Mapping[str, str] = {"avx512": "AVX-512", "avx2": "AVX2", "sse42": "SSE4.2", EAGER: "eager"}
_BYTES = {"avx512": 8, "avx2": 10, "sse42": 14, EAGER: 22}
_BITS = _BYTES | {EAGER: 26}
TARGETS: Mapping[str, Mapping[str, float]] = {
    **dict.fromkeys(("int8", "fp8", "qsgd", "natural"), _BYTES),
    **dict.fromkeys(("int4", "sign", "terngrad", "signum", "mxfp4"), _BITS),
    "top-k:ratio=0.01": {"avx512": 10, "avx2": 11, EAGER: 30},
    "sparse-loco": {"avx512": 12, "avx2": 14, EAGER: 45},
}
"""The targets of each compressor and level, in copies."""


def measure(quick: bool, tell: Tell) -> list[Row]:
    """Return a row for each compressor, number of workers, and level."""
    levels = [level for level in TITLES if level == EAGER or level in compiled().levels]
    rows = []
    models = {"tiny": TINY} if quick else MODELS
    for text, targets in list(TARGETS.items())[: 2 if quick else None]:
        for (model, shapes), workers in itertools.product(models.items(), WORKERS):
            name = f"{text}, {model}, {workers} workers"
            tell(f"levels: {name}")
            for level, spread in in_copies(Worked(text, shapes, workers), levels, 2 if quick else 3).items():
                rows.append(Row(name=name, quantity=TITLES[level], spread=spread, target=targets.get(level)))
    return rows
