"""`python -m experiments.studies NAME` runs a study."""

from .app import app

app()
