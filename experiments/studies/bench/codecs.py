"""Every registered compressor against a memory copy, and those with compiled passes at every level of these."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from commhooks.compressors import COMPRESSORS
from commhooks.experiments.launch import Tell
from commhooks.experiments.results.summary import Spread
from commhooks.native import compiled
from experiments.studies.bench.copies import EAGER, MODELS, TINY, Worked, in_copies
from experiments.studies.bench.rows import Row
from experiments.studies.leaderboard.contenders import SKIPPED, USUAL

SENTENCE = (
    "What a step of one bucket takes a worker, among workers in one process, over the time of copying the gradients, "
    "which is the median of three copies just before it and three just after: "
    "CPU time on one thread, with what the workers' collectives copy and add. Every registered compressor at its "
    "usual settings, with error feedback where that is the default; the gradients are ResNet-18's, 11.2 million, among "
    "8 workers, and a GPT's, one layer of width 768, 7.1 million, among 2. *Eager* is without compiled passes, "
    "*compiled* with the highest level that the processor has, for the compressors that have such passes. The *floor* "
    "is what must be moved whatever the implementation, in copies of 8 bytes an element: 8 for the gradient, which is "
    "read, and the mean, which is written; 12 for each element of state, which is read, written, and kept as it was "
    "until all ranks have judged the step; what is sent, which is written, and what comes, which is read. So int8 "
    "among W workers moves 8 + 12 + 12/W bytes an element, and 3 + 1/W of codes. Exceptions: the gradient is an "
    "all-reduce's message, and PowerSGD moves 28 bytes, since it reads the gradient twice. The floor leaves out what "
    "the collectives themselves move, such as the sum of an all-reduce."
)
LEVELS = (
    "What a step takes a worker, in copies of the gradients of the section before: at each level of the compiled "
    "passes that this processor has, and without them, in turns, beside the target. Votes are "
    "`signum`'s, whose momentum is part of it."
)
CASES = (("ResNet-18", 8), ("GPT", 2))
"""Gradients, and the number of workers."""
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
COMPILED = frozenset(
    (
        *("dgc", "fp8", "int4", "int8", "mxfp4", "natural", "qsgd", "sign", "signum", "sparse-loco", "terngrad"),
        *("adaptive-rank", "powersgd", "powersgd-unbiased", "threshold", "top-k"),
    )
)
"""The names of compressors with compiled passes."""


def measure(quick: bool, tell: Tell) -> list[Row]:
    """Return a row for each compressor, case, and form."""
    level, rows = compiled().level, []
    for text in names()[:3] if quick else names():
        for model, workers in CASES:
            tell(f"throughput: {text}, {model}, {workers} workers")
            worked = Worked(text, TINY if quick else MODELS[model], workers)
            levels = {"eager": EAGER}
            if level is not None and text.partition(":")[0] in COMPILED:
                levels["compiled"] = level
            found = in_copies(worked, list(levels.values()), 2)
            spreads = {form: found[word] for form, word in levels.items()}
            spreads["floor"] = Spread.of([worked.floor()])
            for form, spread in spreads.items():
                rows.append(Row(name=text, quantity=f"{model}, {workers} workers, {form}", spread=spread))
    return rows


def names() -> list[str]:
    """Return every compressor that exchanges anything, with its settings."""
    return [text for name in sorted(COMPRESSORS) if name not in SKIPPED for text in USUAL.get(name, (name,))]


def measure_levels(quick: bool, tell: Tell) -> list[Row]:
    """Return a row for each compressor with compiled passes, number of workers, and level."""
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
