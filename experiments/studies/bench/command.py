"""The study `bench`: measure sections of the suite, write the pages, or compare with them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from commhooks.experiments.commands.terminal import errors_in_words
from commhooks.experiments.planning.worlds import check_place
from commhooks.experiments.stored import write_text
from commhooks.units import unknown
from experiments.studies.bench.gate import SAME, WORSE, changes, other_places
from experiments.studies.bench.page import pages, table, wide
from experiments.studies.bench.results import Results, measured_now, read, write
from experiments.studies.bench.sections import SECTIONS
from experiments.studies.blocks import print_blocks

_COMMAND = "python -m experiments.studies bench"


def bench(
    sections: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(SECTIONS)}; none: all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models and few rounds: shows that it runs.")] = False,
    results: Annotated[
        Path | None, typer.Option(help="Put what was measured into this JSON file, and write the pages beside it.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Compare what was measured with this file; exit with 1 if a ratio got worse.")
    ] = None,
    render_only: Annotated[
        bool, typer.Option("--render", help="Measure nothing: write the pages of --results again.")
    ] = False,
) -> None:
    """Measure ratios to PyTorch's own DDP and hooks, and to memory copies."""
    with errors_in_words() as console:
        chosen = list(dict.fromkeys(sections or SECTIONS))
        _check(chosen, quick, results, check, render_only)
        check_place(results)
        stored = read(check) if check else {}
        known = read(results) if results and results.exists() else {}
        found: Results = {}
        for name in [] if render_only else chosen:
            begun = time.perf_counter()
            rows = SECTIONS[name].measure(quick, typer.echo)
            found[name] = measured_now(rows, f"{_COMMAND} {name}", time.perf_counter() - begun)
            print_blocks([(wide if SECTIONS[name].is_wide else table)(name, rows)], console)
            if results:  # after every section, so that an interruption does not lose what is finished
                known[name] = found[name]
                write(results, known)
        if results:
            # As it was written: figures are rounded there, and the pages must be those of their file.
            for path, text in pages(read(results), results.stem).items():
                (results.parent / path).parent.mkdir(exist_ok=True)
                write_text(results.parent / path, text)
        if check:
            _report(stored, found)


def _check(sections: list[str], quick: bool, results: Path | None, check: Path | None, render_only: bool) -> None:
    """Raise `ValueError` if these do not go together."""
    for name in sections:
        if name not in SECTIONS:
            raise ValueError(unknown("section", name, SECTIONS))
    if quick and (results or check):
        raise ValueError("--quick shows that the suite runs; it is not comparable: leave out --results and --check")
    if render_only and results is None:
        raise ValueError("--render writes the pages of a file: name it with --results")


def _report(stored: Results, found: Results) -> None:
    """Print what changed, and exit with 1 if anything got worse."""
    for sentence in other_places(stored, found):
        typer.echo(f"note: {sentence}; ratios depend less on that than times do, but they depend on it")
    compared = changes(stored, found)
    for change in compared:
        if change.kind != SAME:
            typer.echo(change.text)
    worse = sum(change.kind == WORSE for change in compared)
    typer.echo(f"{worse} of {len(compared)} ratios got worse by more than the spread")
    if worse:
        raise typer.Exit(1)
