"""The normalised squared error of a round: what it is, and the figures in the guide."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

import commhooks
from commhooks import make_compressor
from commhooks.lockstep import average_in_lockstep, lockstep_connections
from experiments.studies.lockstep import train_in_lockstep, vnmse
from tests.experiments.test_lockstep_training import digits
from tests.flat_cost import two_hop_names

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "hooks.md"
RANKS, ELEMENTS = 4, 1 << 17


def printed() -> dict[str, float]:
    """Return the last column of the guide's table of errors, by compressor."""
    rows = re.findall(r"^\| (`.+) \|$", GUIDE.read_text(encoding="utf-8"), re.M)
    found: dict[str, float] = {}
    for cells in (row.split(" | ") for row in rows):
        if len(cells) == 6:
            specs = re.findall(r"`([^`]+)`", cells[0])
            found |= dict(zip(specs, map(float, cells[-1].split(", ")), strict=True))
    return found


@pytest.mark.parametrize(("name", "figure"), printed().items())
def test_a_round_of_normal_gradients_has_the_error_that_the_guide_says(name: str, figure: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [{"w": torch.randn(ELEMENTS, generator=generator)} for _ in range(RANKS)]
    connections = lockstep_connections(RANKS)
    workers = [
        commhooks.Exchanger(gradients[0], make_compressor(name), connection=connection) for connection in connections
    ]
    means = [{"w": own["w"].clone()} for own in gradients]
    average_in_lockstep(workers, means)
    assert vnmse(means[0], gradients) == pytest.approx(figure, rel=0.06)  # as printed, with two digits


def test_every_code_of_the_guide_has_a_figure() -> None:
    assert {name.partition(":")[0] for name in printed()} == set(two_hop_names()) - {"signum"}


def test_the_error_of_a_round_is_of_all_parameters_together() -> None:
    gradients = [{"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([1.0])}, {"a": torch.zeros(2), "b": torch.ones(1)}]
    mean = {"a": torch.tensor([1.5, 0.0]), "b": torch.ones(1)}
    assert vnmse(mean, gradients) == 0
    # Off by (0.5, 1, 1), of (1.5, 0, 1).
    assert vnmse({"a": torch.tensor([1.0, 1.0]), "b": torch.zeros(1)}, gradients) == pytest.approx(2.25 / 3.25)
    nothing = [{"a": torch.zeros(2)}] * 2
    assert vnmse(nothing[0], nothing) == 0 and vnmse({"a": torch.ones(2)}, nothing) == math.inf


@pytest.mark.parametrize("feedback", [False, True])
def test_a_run_reports_that_of_its_first_step(feedback: bool) -> None:
    compressor = make_compressor("int4", block=32, stochastic=False, error_feedback=feedback)
    of_one, of_two = (train_in_lockstep(digits(), compressor, steps=steps, workers=2).vnmse for steps in (1, 2))
    assert of_one == of_two and 0.001 < of_one < 2 * 0.39
    assert train_in_lockstep(digits(), make_compressor("all-reduce"), steps=2, workers=2).vnmse < 1e-12
