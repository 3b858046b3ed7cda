"""The cells that are tried: a kind of model, a way in and a compressor each."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from tests.models.kinds import KINDS
from tests.models.sizes import COMPRESSORS
from tests.models.ways import WAYS


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
