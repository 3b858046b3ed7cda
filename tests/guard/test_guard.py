"""One cell of each silent situation, and of some sound ones; `make guard` runs all of them everywhere."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.guard.running import Cell, Verdict, judge
from tests.guard.silent import silent
from tests.guard.situations import OPTIMIZERS, WRAPPERS, Situations
from tests.guard.sound import sound
from tests.tiers import THOROUGH

pytestmark = pytest.mark.timeout(240)  # a fixture runs several worlds, each of which has a limit of its own

EVERY = 3
"""Of so many sound situations, one is tried here."""


def one_cell_each(situations: Situations, every: int = 1) -> list[Cell]:
    """Return a cell of every so many situations; wrappers and optimizers take turns, so that all pairs of them meet."""
    names = list(situations)[::every]
    turns = [(wrapper, optimizer) for optimizer in OPTIMIZERS for wrapper in WRAPPERS]
    return [Cell(name, *turns[number % len(turns)]) for number, name in enumerate(names)]


CELLS = one_cell_each(silent)
SAMPLE, COMPILED = (
    [cell for cell in one_cell_each(sound, EVERY) if ("compiled" in cell.situation) is compiled]
    for compiled in (False, True)
)


@pytest.fixture(scope="module")
def verdicts() -> Mapping[Cell, Verdict]:
    return {verdict.cell: verdict for verdict in judge(CELLS, a_world=16)}


@pytest.fixture(scope="module")
def verdicts_of_sound() -> Mapping[Cell, Verdict]:
    return {verdict.cell: verdict for verdict in judge(SAMPLE, a_world=16)}


@pytest.mark.parametrize("cell", CELLS, ids=[cell.situation for cell in CELLS])
def test_replicas_do_not_drift_apart_without_a_word(verdicts: Mapping[Cell, Verdict], cell: Cell) -> None:
    assert verdicts[cell].is_expected, str(verdicts[cell])


@pytest.mark.parametrize("cell", SAMPLE, ids=[cell.situation for cell in SAMPLE])
def test_a_sound_program_runs_as_it_would_without_a_guard(
    verdicts_of_sound: Mapping[Cell, Verdict], cell: Cell
) -> None:
    assert verdicts_of_sound[cell].is_expected, str(verdicts_of_sound[cell])


@THOROUGH  # the compiler takes a third of the time of all cells
@pytest.mark.parametrize("cell", COMPILED, ids=[cell.situation for cell in COMPILED])
def test_a_sound_program_that_is_compiled_runs_as_it_would_without_a_guard(cell: Cell) -> None:
    (verdict,) = judge([cell])
    assert verdict.is_expected, str(verdict)
