"""The page of results, made from the file alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commhooks.units import seconds_in_words
from experiments.report.table import markdown_table
from experiments.results.summary import Spread

from .results import Measured, Results
from .rows import EXPONENT, MET, MISSED, WITHIN, Row
from .sections import SECTIONS

BEGINNING = """# Benchmarks

How fast this package is, as ratios. Each figure is divided by a peer that was measured in turns with it, in the same
run: PyTorch's own class or hook, a memory copy, or what another hook takes. Lower is better throughout. The times
beside the ratios show what they are made of; they depend on the machine, and nothing is concluded from them.

- **Ratio**: the median over rounds, with the quartiles. In a round every contender has one turn, in an order that is
  drawn anew. If there are several ranks, a turn counts as it was on the slowest.
- **Noise**: the peer against itself, in the same rounds.
- **Target**: *met* if the median is at most the target. *Within the spread*, if the target allows for that (step times
  of `ddp_core`, `allreduce_hook` and `fp16_compress_hook`): the median is above it by no more than the farther
  quartile of the noise is from 1. *Missed* otherwise.

`make bench` measures all sections, writes [the file](benchmarks.json) and renders this page from it; `python -m
experiments.studies bench ddp hooks` measures some. `make bench-check` measures them again and compares the ratios with
those in the file: it fails if a median got worse by more than the interquartile ranges of both together. It says so if
the file is from another machine.

"""


def render(results: Results) -> str:
    """Return the page, in Markdown."""
    lines = [BEGINNING, *_summary(results)]
    for name, section in SECTIONS.items():
        if name in results:
            lines += [f"## {section.title}", "", section.sentence, "", *_body(results[name])]
    return "\n".join(lines).rstrip() + "\n"


def _summary(results: Results) -> Iterator[str]:
    if absent := [section.title for name, section in SECTIONS.items() if name not in results]:
        yield f"Not measured yet: {', '.join(absent)}."
        yield ""
    aimed = [(name, row) for name in SECTIONS if name in results for row in results[name].rows if row.verdict]
    counts = {kind: sum(row.verdict == kind for _, row in aimed) for kind in (MET, WITHIN, MISSED)}
    yield (
        f"Of {len(aimed)} figures with a target, {counts[MET]} met it, {counts[WITHIN]} did so within the spread, and "
        f"{counts[MISSED]} missed it{':' if counts[MISSED] else '.'}"
    )
    yield ""
    missed = [(name, row) for name, row in aimed if row.verdict == MISSED]
    for name, row in missed:
        why = f" {row.note}" if row.note else ""
        yield f"- {SECTIONS[name].title}: {row.key}: {figure(row.spread)}, target {row.target:.2f}.{why}"
    yield ""


def _body(measured: Measured) -> list[str]:
    headings = ["", "ratio", "noise", "target", "", "made of"]
    if all(row.unit == EXPONENT for row in measured.rows):
        headings[1:3] = ["exponent", "a copy's"]
    has_target = any(row.target is not None for row in measured.rows)
    has_noise = any(row.noise is not None for row in measured.rows)
    shown = [True, True, has_noise, has_target, has_target, True]
    rows = [[cell for cell, show in zip(_cells(row), shown, strict=True) if show] for row in measured.rows]
    table = markdown_table([heading for heading, show in zip(headings, shown, strict=True) if show], rows)
    return [*table, _circumstances(measured), ""]


def _cells(row: Row) -> Sequence[str]:
    return [
        f"{row.name}: {row.quantity}",
        figure(row.spread),
        figure(row.noise) if row.noise else "",
        "" if row.target is None else f"{row.target:.2f}",
        row.verdict,
        row.absolute,
    ]


def figure(spread: Spread) -> str:
    """Return a median with its quartiles: '1.02 (1.00–1.05)'."""
    if spread.low == spread.high:
        return f"{spread.median:.2f}"
    return f"{spread.median:.2f} ({spread.low:.2f}–{spread.high:.2f})"


def _circumstances(measured: Measured) -> str:
    here = measured.machine
    versions = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    return (
        f"`{measured.command}` took {seconds_in_words(measured.seconds)} on {here['processor']}, {here['cores']} "
        f"cores, {here['system']}, Gloo, with {versions}, at commit {measured.commit}; {here['load']} processes wanted "
        "to run in the minute before the end."
    )
