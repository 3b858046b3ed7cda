"""`python -m experiments` is `commhooks`."""

from experiments.cli import app

app()
