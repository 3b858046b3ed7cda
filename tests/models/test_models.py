"""A small part of `make models`: what it trains and how it judges."""

from __future__ import annotations

import dataclasses
import itertools

from tests.models.judging import Cell, cover, every_cell, verdict_on
from tests.models.kinds import KINDS
from tests.models.sizes import COMPRESSORS
from tests.models.ways import WAYS, Trained, trained


def test_the_cover_has_every_pair() -> None:
    cells = cover()
    assert len(cells) == 40 and len(every_cell()) == 112 and set(cells) < set(every_cell())
    for one, other in itertools.combinations(range(3), 2):
        values = [list(KINDS), list(WAYS), list(COMPRESSORS)]
        wanted = set(itertools.product(values[one], values[other])) - {("FSDP2", "PowerSGD")}
        assert {(cell[one], cell[other]) for cell in cells} == wanted


def train(cell: Cell) -> list[Trained]:
    return trained(cell.kind, cell.way, COMPRESSORS.get(cell.compressor), [0], 10)


def test_a_few_cells_are_as_promised_and_faults_are_told() -> None:
    for cell in (Cell("LoRA", "DiLoCo", "int8"), Cell("mixture, separate", "FSDP2", "top-k")):
        ours, others = train(cell), train(cell.uncompressed)
        faults = verdict_on(cell, ours, others).faults
        assert all("outside" in fault for fault in faults), "losses of one seed have no range"
    (good,) = ours
    spoilt = dataclasses.replace(good, after=good.before, payload=good.payload + 4, unequal=[3, 4])
    apart, bytes_sent, loss = verdict_on(cell, [spoilt], others).faults
    assert "replicas differ after step 3" in apart and "20,064.4 bytes a round in place of 20,064" in bytes_sent
    assert "the loss went from" in loss
