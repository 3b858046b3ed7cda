"""`python -m experiments.studies NAME` runs a study."""

from experiments.studies.app import app

app()
