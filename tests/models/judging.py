"""The cells that are tried, a kind of model, a way in and a compressor each, and what each must show."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from tests.models.kinds import KINDS, made
from tests.models.sizes import COMPRESSORS, payload_of
from tests.models.ways import RANKS, WAYS, Trained

QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for a two-sided interval of 95 %, by the number of seeds."""


class Cell(NamedTuple):
    """A kind of model, a way in and a compressor; "": none."""

    kind: str
    way: str
    compressor: str

    @property
    def uncompressed(self) -> Cell:
        """The same without compression: two ranks train bit for bit alike through all ways but DiLoCo."""
        return Cell(self.kind, "DiLoCo" if self.way == "DiLoCo" else "DDP", "")


def every_cell() -> list[Cell]:
    """Return all cells but those of FSDP2 with PowerSGD, which cannot return shards and is refused."""
    every = itertools.starmap(Cell, itertools.product(KINDS, WAYS, COMPRESSORS))
    return [cell for cell in every if (cell.way, cell.compressor) != ("FSDP2", "PowerSGD")]


def cover() -> list[Cell]:
    """Return as many cells as there are pairs of a kind and a way, in which every other pair occurs, too."""
    cells = []
    ways = sorted(WAYS, key="FSDP2".__eq__)  # last, so that the others take turns among all compressors
    for (number, kind), (place, way) in itertools.product(enumerate(KINDS), enumerate(ways)):
        usable = [name for name in COMPRESSORS if (way, name) != ("FSDP2", "PowerSGD")]
        cells.append(Cell(kind, way, usable[(number + place) % len(usable)]))
    return sorted(cells, key=lambda cell: [*WAYS].index(cell.way))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a cell."""

    row: str
    faults: Sequence[str]

    def __str__(self) -> str:
        return "\n  ".join([self.row, *self.faults])


def verdict_on(cell: Cell, ours: Sequence[Trained], others: Sequence[Trained]) -> Verdict:
    """Compare a cell's trainings, by seed, with what the papers promise, and with those without compression."""
    losses, uncompressed = [one.after for one in ours], [one.after for one in others]
    kind, model = KINDS[cell.kind], made(KINDS[cell.kind], 0)
    wanted = payload_of(kind, cell.way, cell.compressor, model, RANKS)
    faults = []
    for seed, one in enumerate(ours):
        if one.unequal:
            faults.append(f"seed {seed}: replicas differ after step {one.unequal[0]} ({len(one.unequal)} steps in all)")
        if one.payload != wanted * one.rounds:
            faults.append(f"seed {seed}: {one.payload / one.rounds:,.1f} bytes a round in place of {wanted:,}")
        if not one.after < one.before:
            faults.append(f"seed {seed}: the loss went from {one.before:.3f} to {one.after:.3f}")
    mean, least, most = statistics.mean(losses), min(uncompressed), max(uncompressed)
    if cell.compressor == "int8" and not least <= mean <= most:
        faults.append(f"the mean loss {mean:.4f} is outside {least:.4f} to {most:.4f}")
    pairs = [own - other for own, other in zip(losses, uncompressed, strict=True)]
    spread = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan
    half = QUANTILES.get(len(pairs), math.nan) * spread
    dense = 4 * sum(one.numel() for one in model.parameters() if one.requires_grad)
    row = f"{', '.join(cell):45} {mean:.3f} ({statistics.mean(pairs):+.3f} ± {half:.3f}), {wanted:,} of {dense:,} bytes"
    return Verdict(row, faults)
