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

How fast is this package? Each figure is a ratio to a peer, measured in the same run, interleaved with it: PyTorch's own
class or hook, a memory copy, or another hook. Lower is better.

- **Ratio**: the median over rounds, with the quartiles. In each round every contender runs once, in random order. With
  several ranks, the slowest counts.
- **Copies**: a memory copy is timed three times just before and after each run; the median is the unit.
- **Noise**: the peer against itself, in the same rounds.
- **Target**: *met* if the median is at most the target; *within the spread* if it exceeds the target by at most the
  noise (only for step times of `ddp_core`, `allreduce_hook` and `fp16_compress_hook`); *missed* otherwise.

`make bench` measures the sections below, and writes [the file]({name}.json) and these pages; `python -m
experiments.studies bench ddp hooks` measures two of them. `make bench-check` measures them again, and fails if a median
got worse by more than the interquartile ranges of both together.

Frozen sections of the file, each with a page: [Gloo's event loop]({name}/wakeups.md), [the cost as the work
grows]({name}/growth.md), [`fused` and `fifo`]({name}/policies.md), [checkpoints]({name}/checkpoints.md), [communication
behind the backward pass]({name}/hiding.md) and [the guard]({name}/guard.md).
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
    furthest = [_furthest(section, results[key].rows) for key, section in SECTIONS.items() if key in results]
    if lines := [line for line in furthest if line]:
        yield "In each section, what missed its target by most:"
        yield "\n".join(lines)


def _furthest(section: Section, rows: Sequence[Row]) -> str:
    """Return a line about the row that missed its target by the largest factor; "" if none missed."""
    missed = [(row.spread.median / row.target, row) for row in rows if row.verdict == MISSED and row.target is not None]
    if not missed:
        return ""
    _, row = max(missed, key=lambda one: one[0])
    note = f" {row.note}" if row.note else ""
    return f"- {section.title}: {row.key}: {figure(row.spread)}, target {row.target:.2f}.{note}"


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
