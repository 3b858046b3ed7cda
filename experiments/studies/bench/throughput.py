"""Every registered compressor against a memory copy."""

from __future__ import annotations

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
CASES = (("ResNet-18", 8), ("GPT", 2))
"""Gradients, and the number of workers."""
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
