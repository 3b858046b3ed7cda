"""The pages of results, made from the file alone: an overview, and one page for each section."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress

from commhooks.experiments.results.summary import Spread
from experiments.studies.bench.results import Measured, Results
from experiments.studies.bench.rows import MET, MISSED, WITHIN, Row
from experiments.studies.bench.sections import SECTIONS, Section
from experiments.studies.blocks import Block, Table, circumstances, markdown

BEGINNING = """---
measured: {commits}
measures: [commhooks/compressors, commhooks/engine, commhooks/native, commhooks/scheduling, ddp_core]
---

# Benchmarks

How fast this package is, as ratios. Each figure is divided by a peer that was measured in turns with it, in the same
run: PyTorch's own class or hook, a memory copy, or the time of another hook. Lower is better throughout. The times
beside the ratios show what they are made of; they depend on the machine, and nothing is concluded from them.

- **Ratio**: the median over rounds, with the quartiles. In each round every contender has one turn, in random order.
  With several ranks, the slowest rank's turn counts.
- **Copies**: where the peer is a memory copy, three are timed just before each turn and three just after it, and their
  median is the turn's unit. Bytes are not counted: virtual machines seldom have the processor's counters.
- **Noise**: the peer against itself, in the same rounds.
- **Target**: *met* if the median is at most the target. *Within the spread* if the median exceeds the target by at most
  the noise, the distance from 1 to the farther of its quartiles; this applies only to step times of `ddp_core`,
  `allreduce_hook` and `fp16_compress_hook`. *Missed* otherwise.

`make bench` measures the sections below, writes [the file]({name}.json) and renders these pages from it; `python -m
experiments.studies bench ddp hooks` measures some. `make bench-check` measures them again and compares the ratios with
those in the file: it fails if a median got worse by more than the interquartile ranges of both together. It says so if
the file is from another machine.

The file also has sections that are frozen, each with its page: [Gloo's event loop]({name}/wakeups.md), [the cost as the
work grows]({name}/growth.md), [`fused` and `fifo`]({name}/policies.md), [checkpoints]({name}/checkpoints.md),
[communication behind the backward pass]({name}/hiding.md) and [the guard]({name}/guard.md).
"""


def pages(results: Results, name: str) -> dict[str, str]:
    """Return the pages of the file `name`.json in Markdown, by their paths from its folder."""
    results = {key: results[key] for key in SECTIONS if key in results}  # without those that are frozen
    commits = sorted({measured.commit for measured in results.values()})
    overview = [BEGINNING.format(name=name, commits=commits), *_summary(results, name)]
    sections = {
        f"{name}/{key}.md": markdown(_section(section, results[key])).rstrip() + "\n"
        for key, section in SECTIONS.items()
        if key in results
    }
    return {f"{name}.md": markdown(overview).rstrip() + "\n", **sections}


def _section(section: Section, measured: Measured) -> list[Block]:
    """Return what the page of a section consists of."""
    system = f", {measured.machine['system']}, Gloo"
    made = circumstances(
        measured.command, measured.seconds, measured.machine, measured.versions, more=system, commit=measured.commit
    )
    rows = (wide if section.is_wide else table)("", measured.rows)
    return [f"# {section.title}", section.sentence, rows, made]


def _summary(results: Results, name: str) -> Iterator[Block]:
    """Yield how many targets each section met, and what missed its target."""
    yield Table(
        "",
        ["", "figures", "targets", MET, WITHIN, MISSED, "commit"],
        [
            [
                f"[{section.title}]({name}/{key}.md)",
                str(len(results[key].rows)),
                *map(str, _counts(results[key].rows)),
                f"`{results[key].commit[:8]}`",
            ]
            for key, section in SECTIONS.items()
            if key in results
        ],
    )
    if absent := [section.title for key, section in SECTIONS.items() if key not in results]:
        yield f"Not measured yet: {', '.join(absent)}."
    targets, met, within, missed = _counts([row for measured in results.values() for row in measured.rows])
    yield (
        f"Of {targets} figures with a target, {met} met it, {within} did so within the spread, and {missed} missed it."
    )
    for key, section in SECTIONS.items():
        found = [row for row in results[key].rows if row.verdict == MISSED] if key in results else []
        lines = [
            f"- {row.key}: {figure(row.spread)}, target {row.target:.2f}.{f' {row.note}' if row.note else ''}"
            for row in found
            if row.target is not None
        ]
        if lines:
            yield f"## Missed: {section.title}"
            yield "\n".join(lines)


def _counts(rows: Sequence[Row]) -> tuple[int, int, int, int]:
    """Return how many rows have a target, met it, did so within the spread, and missed it."""
    met, within, missed = (sum(row.verdict == kind for row in rows) for kind in (MET, WITHIN, MISSED))
    return met + within + missed, met, within, missed


def table(title: str, rows: Sequence[Row]) -> Table:
    """Return the rows of a section, without columns that none of them needs."""
    headings = ["", "ratio", "noise", "target", "", "made of"]
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
