"""Run situations on two ranks, several to a world, and judge what became of each."""

from __future__ import annotations

import gc
import hashlib
import json
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch.distributed as dist

from ddp_core.guard import NotAveragedError, NotAveragedWarning
from tests.guard.silent import silent
from tests.guard.situations import LOCAL, MISSED, OTHER_ERROR, RAISES, RIGHT, WARNS, Run
from tests.guard.sound import sound
from tests.world import run_world_outcomes

RANKS = 2
DIED = "died or hung"
A_WORLD = 12  # situations, as long as each ends in the same way on both ranks
SECONDS = 60.0  # for all of a world's, some of which compile; also the group's timeout, for a rank whose peer has left
BEGUN, ENDED = "situation begun: ", "situation ended: "


class Cell(NamedTuple):
    """A situation under a wrapper and an optimizer."""

    situation: str
    wrapper: str
    optimizer: str

    @property
    def expected(self) -> str:
        """What the guard should make of it."""
        return (silent | sound)[self.situation].expected[self.wrapper]


@dataclass(frozen=True)
class Ended:
    """How a cell ended on one rank."""

    kind: str
    said: str = ""  # the error, or the guard's first warning
    parameters: str = ""  # a digest of what was trained


@dataclass(frozen=True)
class Verdict:
    """How a cell ended, on all ranks together."""

    cell: Cell
    kind: str
    said: Sequence[str]  # by rank

    @property
    def is_expected(self) -> bool:
        """Whether it ended as it should."""
        return self.kind == self.cell.expected or (self.kind, self.cell.expected) == (RIGHT, LOCAL)

    def __str__(self) -> str:
        """Return a row of a table, with what was said if it was not expected."""
        name, wrapper, optimizer = self.cell
        row = f"{name:82} {wrapper:16} {optimizer:12} {self.kind}"
        if self.is_expected:
            return row
        words = [f"rank {rank}: {said or 'no word'}" for rank, said in enumerate(self.said)]
        return "\n  ".join([f"{row}, expected: {self.cell.expected}", *words])


def judge(cells: Iterable[Cell], a_world: int = A_WORLD) -> Iterable[Verdict]:
    """Yield a verdict for each cell; one that takes its world down costs the others a new world, not their verdicts."""
    left = list(cells)
    while left:
        outcomes = run_world_outcomes(run_cells, RANKS, left[:a_world], timeout=SECONDS, check_exit=False)
        ranks = [_ended(outcome.output) for outcome in outcomes]
        reached = max(1, *(outcome.output.count(BEGUN) for outcome in outcomes))
        for number, cell in enumerate(left[:reached]):
            missing = [outcome.describe() for outcome, ends in zip(outcomes, ranks, strict=True) if number not in ends]
            yield Verdict(cell, DIED, missing) if missing else _verdict(cell, [ends[number] for ends in ranks])
        left = left[reached:]


def _ended(output: str) -> Mapping[int, Ended]:
    """Return what a rank printed of each cell, by its number in this world."""
    lines = [line.removeprefix(ENDED) for line in output.splitlines() if line.startswith(ENDED)]
    return {number: Ended(**json.loads(line)) for number, line in enumerate(lines)}


def _verdict(cell: Cell, ranks: Sequence[Ended]) -> Verdict:
    kinds = {rank.kind for rank in ranks}
    equal = len({rank.parameters for rank in ranks}) == 1
    no_word = RIGHT if equal else LOCAL if cell.situation in sound else MISSED
    kind = next((kind for kind in (RAISES, OTHER_ERROR, WARNS) if kind in kinds), no_word)
    return Verdict(cell, kind, [rank.said for rank in ranks])


def run_cells(rank: int, cells: Sequence[Cell]) -> None:
    """Run cells in turn, and print how each ends here; stop where it ends otherwise on another rank."""
    for cell in cells:
        print(f"{BEGUN}{cell.situation}", flush=True)
        ended = _run_cell(rank, cell)
        print(f"{ENDED}{json.dumps(asdict(ended))}", flush=True)
        gc.collect()  # models, with their guards, before the next one
        kinds: list[str] = [""] * RANKS
        dist.all_gather_object(kinds, ended.kind)
        if len(set(kinds)) > 1:
            return  # what one rank still waits for, the others do not know


def _run_cell(rank: int, cell: Cell) -> Ended:
    run = Run(cell.wrapper, cell.optimizer, rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            (silent | sound)[cell.situation].program(run)
        except NotAveragedError as error:
            return Ended(RAISES, str(error))
        except Exception as error:
            return Ended(OTHER_ERROR, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    words = [str(warning.message) for warning in caught if issubclass(warning.category, NotAveragedWarning)]
    return Ended(WARNS if words else RIGHT, "".join(words[:1]), _digest(run))


def _digest(run: Run) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for module in run.trained:
        for parameter in module.parameters():
            digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()
