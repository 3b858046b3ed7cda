"""The study `leaderboard`: train two small tasks under every compressor, and rank them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from commhooks.experiments.commands.options import hook_option
from commhooks.experiments.commands.terminal import errors_in_words


def leaderboard(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/leaderboard"),
    task: Annotated[
        list[str] | None,
        typer.Option(help="The task: digits, gpt, lstm; default: the first two. Repeat for more."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each compressor; more: narrower intervals.")] = 3,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps per run; default: the task's own.")] = None,
    workers: Annotated[int, typer.Option(help="Workers that share each batch.")] = 4,
    hook: Annotated[list[str] | None, hook_option(" Default: all, at their usual settings.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results of an earlier leaderboard in that folder.")
    ] = False,
    docs: Annotated[Path | None, typer.Option(help="Folder for the tables of the documentation.")] = None,
    accuracy: Annotated[
        Path | None, typer.Option(help="File for the differences from dense that 'plan' shows.")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="The number of runs at a time; default: one per core.")] = None,
) -> None:
    """Train under every compressor, and report the costs of each."""
    with errors_in_words() as console:
        from commhooks.experiments.planning.worlds import check_place
        from experiments.studies.leaderboard.running import Leaderboard, run_leaderboard

        check_place(accuracy)
        board = Leaderboard(
            out=out,
            tasks=tuple(task or ("digits", "gpt")),
            seeds=seeds,
            steps=steps,
            workers=workers,
            only=None if hook is None else tuple(hook),
            overwrite=overwrite,
            docs=docs,
            accuracy=accuracy,
            processes=processes,
            command=shlex.join(["python", "-m", "experiments.studies", *sys.argv[1:]]),
        )
        run_leaderboard(board, console)
