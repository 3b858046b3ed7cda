"""The studies by name: promises measured again, speed of this package, costs and ranks of compressors, predictions."""

from __future__ import annotations

import typer

from commhooks.experiments.commands.terminal import EachOptionOnce
from experiments.studies.advice import advice
from experiments.studies.bench.command import bench
from experiments.studies.leaderboard.command import leaderboard
from experiments.studies.measured_costs import costs
from experiments.studies.predictions import predictions
from experiments.studies.reproduce.command import HELP, reproduce

app = typer.Typer(
    help=__doc__, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False
)
app.command(help=HELP, cls=EachOptionOnce)(reproduce)
for study in (advice, bench, costs, leaderboard, predictions):
    app.command(cls=EachOptionOnce)(study)


@app.callback()
def studies() -> None:
    """Run before every study; do nothing."""
