"""A small part of `make models`: what it trains and how it judges."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from tests.models.cells import Cell, cover, every_cell
from tests.models.judging import Results, page, verdict_on
from tests.models.kinds import KINDS
from tests.models.sizes import COMPRESSORS
from tests.models.ways import WAYS, trained

A_FEW = [Cell("mixture, separate", "FSDP2", "top-k"), Cell("LoRA", "DiLoCo", "int8")]


def test_the_cover_has_every_pair() -> None:
    cells = cover()
    assert len(cells) == 40 and len(every_cell()) == 112 and set(cells) < set(every_cell())
    for one, other in itertools.combinations(range(3), 2):
        values = [list(KINDS), list(WAYS), list(COMPRESSORS)]
        wanted = set(itertools.product(values[one], values[other])) - {("FSDP2", "PowerSGD")}
        assert {(cell[one], cell[other]) for cell in cells} == wanted


def test_a_few_cells_are_as_promised_and_faults_are_told(tmp_path: Path) -> None:
    results = Results(10, file=tmp_path / "models.json")
    for cell in A_FEW:
        for one in (cell.uncompressed, cell):
            results.add(one, [0], trained(one.kind, one.way, COMPRESSORS.get(one.compressor), [0], 10))
    kept = Results(10, file=tmp_path / "models.json")
    verdicts = [verdict_on(cell, kept, [0]) for cell in A_FEW]
    faults = itertools.chain.from_iterable(one.faults for one in verdicts)
    assert all("outside" in fault for fault in faults), "losses of one seed have no range"
    (good,) = kept.of(A_FEW[0], [0])
    kept.add(A_FEW[0], [0], [dataclasses.replace(good, after=good.before, payload=good.payload + 4, unequal=[3, 4])])
    told = verdict_on(A_FEW[0], kept, [0])
    apart, bytes_sent, loss = told.faults
    assert "replicas differ after step 3" in apart and "20,064.4 bytes a round in place of 20,064" in bytes_sent
    assert "the loss went from" in loss and apart in page([told], [0], 10)
