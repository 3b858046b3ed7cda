"""The page of results, made from the file alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress

from experiments.report.blocks import Block, Table, circumstances, markdown
from experiments.results.summary import Spread

from .results import Results
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
    blocks: list[Block] = [BEGINNING, *_summary(results)]
    for name, section in SECTIONS.items():
        if name in results:
            one = results[name]
            more = f", {one.machine['system']}, Gloo"
            made = circumstances(one.command, one.seconds, one.machine, one.versions, more=more, commit=one.commit)
            blocks += [
                f"## {section.title}",
                section.sentence,
                (wide if section.is_wide else table)("", one.rows),
                made,
            ]
    return markdown(blocks).rstrip() + "\n"


def _summary(results: Results) -> Iterator[str]:
    if absent := [section.title for name, section in SECTIONS.items() if name not in results]:
        yield f"Not measured yet: {', '.join(absent)}."
    aimed = [(name, row) for name in SECTIONS if name in results for row in results[name].rows if row.verdict]
    counts = {kind: sum(row.verdict == kind for _, row in aimed) for kind in (MET, WITHIN, MISSED)}
    yield (
        f"Of {len(aimed)} figures with a target, {counts[MET]} met it, {counts[WITHIN]} did so within the spread, and "
        f"{counts[MISSED]} missed it{':' if counts[MISSED] else '.'}"
    )
    missed = []
    for name, row in aimed:
        if row.verdict == MISSED:
            why = f" {row.note}" if row.note else ""
            missed.append(f"- {SECTIONS[name].title}: {row.key}: {figure(row.spread)}, target {row.target:.2f}.{why}")
    if missed:
        yield "\n".join(missed)


def table(title: str, rows: Sequence[Row]) -> Table:
    """Return the rows of a section, without columns that none of them needs."""
    headings = ["", "ratio", "noise", "target", "", "made of"]
    if all(row.unit == EXPONENT for row in rows):
        headings[1:3] = ["exponent", "a copy's"]
    has_target = any(row.target is not None for row in rows)
    has_noise = any(row.noise is not None for row in rows)
    shown = [True, True, has_noise, has_target, has_target, True]
    return Table(title, list(compress(headings, shown)), [list(compress(_cells(row), shown)) for row in rows])


def wide(title: str, rows: Sequence[Row]) -> Table:
    """Return a table with a line for each name and a column for each quantity, with targets in parentheses."""
    quantities = sorted({row.quantity for row in rows})
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        aim = "" if row.target is None else f", {row.verdict} ({row.target:g})"
        lines.setdefault(row.name, {})[row.quantity] = figure(row.spread) + aim
    return Table(
        title, ["", *quantities], [[name, *(cells.get(one, "") for one in quantities)] for name, cells in lines.items()]
    )


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
