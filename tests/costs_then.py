"""Costs of an earlier measurement: those of the package are measured anew, and tests hold figures of these."""

from pathlib import Path

from experiments.predicting.costs import Costs

FILE = Path(__file__).with_name("costs.json")
AS_THEN = Costs.read(FILE)
