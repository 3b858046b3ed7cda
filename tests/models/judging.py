"""What was trained, kept in a file; what a cell's must show; and the page that presents it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tests.models.cells import Cell
from tests.models.kinds import KINDS, made
from tests.models.sizes import COMPRESSORS, payload_of
from tests.models.ways import EVERY, RANKS, Trained

ROOT = Path(__file__).parents[2]
FILE = ROOT / "runs" / "models.json"
QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for a two-sided interval of 95 %, by the number of seeds."""


class Results:
    """The trainings of the present code, by cell and seed; a file keeps them for the next run."""

    def __init__(self, steps: int, *, anew: bool = False, file: Path = FILE) -> None:
        self._steps, self._file, self._code = steps, file, _digest_of_code()
        self._kept: dict[str, Trained] = {}
        if file.exists() and not anew:
            read = json.loads(file.read_text(encoding="utf-8"))
            if read["code"] == self._code:
                self._kept = {key: Trained(**one) for key, one in read["trained"].items()}

    def _key(self, cell: Cell, seed: int) -> str:
        return f"{', '.join(cell)}, seed {seed}, {self._steps} steps"

    def have(self, cell: Cell, seed: int) -> bool:
        """Return whether this was trained already."""
        return self._key(cell, seed) in self._kept

    def of(self, cell: Cell, seeds: Iterable[int]) -> list[Trained]:
        """Return a cell's trainings, by seed."""
        return [self._kept[self._key(cell, seed)] for seed in seeds]

    def add(self, cell: Cell, seeds: Iterable[int], trained: Sequence[Trained]) -> None:
        """Keep a cell's trainings."""
        self._kept |= {self._key(cell, seed): one for seed, one in zip(seeds, trained, strict=True)}
        self._file.parent.mkdir(exist_ok=True)
        kept = {key: dataclasses.asdict(one) for key, one in self._kept.items()}
        self._file.write_text(json.dumps({"code": self._code, "trained": kept}, indent=1), encoding="utf-8")


def _digest_of_code() -> str:
    digest = hashlib.sha256()
    for pattern in ("commhooks/**/*.py", "ddp_core/**/*.py", "tests/models/kinds.py", "tests/models/ways.py"):
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a cell."""

    cell: Cell
    uncompressed: Sequence[float]
    """The losses without compression, by seed."""
    losses: Sequence[float]
    sent: float
    """Bytes in a round."""
    dense: int
    """Bytes of the gradients."""
    faults: Sequence[str]

    @property
    def difference(self) -> tuple[float, float]:
        """The loss compared with that without compression, and half the interval of 95 %, over pairs of one seed."""
        pairs = [own - other for own, other in zip(self.losses, self.uncompressed, strict=True)]
        spread = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan
        return statistics.mean(pairs), QUANTILES.get(len(pairs), math.nan) * spread

    def __str__(self) -> str:
        mean, half = self.difference
        row = f"{', '.join(self.cell):45} {statistics.mean(self.losses):.3f} ({mean:+.3f} ± {half:.3f})"
        return "\n  ".join([f"{row}, {self.sent:,.0f} of {self.dense:,} bytes", *self.faults])


def verdict_on(cell: Cell, results: Results, seeds: Sequence[int]) -> Verdict:
    """Compare a cell's trainings with what the papers promise, and with those without compression."""
    ours, others = results.of(cell, seeds), results.of(cell.uncompressed, seeds)
    losses, uncompressed = [one.after for one in ours], [one.after for one in others]
    kind, model = KINDS[cell.kind], made(KINDS[cell.kind], 0)
    wanted = payload_of(kind, cell.way, cell.compressor, model, RANKS)
    faults = []
    for seed, one in zip(seeds, ours, strict=True):
        if one.unequal:
            faults.append(f"seed {seed}: replicas differ after step {one.unequal[0]} ({len(one.unequal)} steps in all)")
        if one.payload != wanted * one.rounds:
            faults.append(f"seed {seed}: {one.payload / one.rounds:,.1f} bytes a round in place of {wanted:,}")
        if not one.after < one.before:
            faults.append(f"seed {seed}: the loss went from {one.before:.3f} to {one.after:.3f}")
    if cell.compressor == "int8" and not min(uncompressed) <= statistics.mean(losses) <= max(uncompressed):
        faults.append(f"the mean loss {statistics.mean(losses):.4f} is outside {_range(uncompressed)}")
    dense = 4 * sum(one.numel() for one in model.parameters() if one.requires_grad)
    return Verdict(cell, uncompressed, losses, statistics.mean(one.payload / one.rounds for one in ours), dense, faults)


def page(verdicts: Sequence[Verdict], seeds: Sequence[int], steps: int) -> str:
    """Return the page of results, in Markdown."""
    rows = []
    for one in verdicts:
        mean, half = one.difference
        rows.append(
            f"| {one.cell.kind} | {one.cell.way} | {one.cell.compressor} | {_range(one.uncompressed)} | "
            f"{statistics.mean(one.losses):.3f} | {mean:+.3f} ± {half:.3f} | {one.sent:,.0f} of {one.dense:,} | "
            f"{'; '.join(one.faults) or 'as promised'} |"
        )
    named = ", ".join(f"`{name}`" for name in COMPRESSORS.values())
    return TEXT.format(
        cells=len(verdicts),
        kinds=len({one.cell.kind for one in verdicts}),
        ways=len({one.cell.way for one in verdicts}),
        compressors=named,
        seeds=len(seeds),
        steps=steps,
        every=EVERY,
        torch=torch.__version__.partition("+")[0],
        wrong=sum(bool(one.faults) for one in verdicts),
        rows="\n".join(rows),
    )


def _range(losses: Sequence[float]) -> str:
    return f"{min(losses):.3f} to {max(losses):.3f}"


TEXT = """# Kinds of model

`make models` trains {kinds} kinds of model through {ways} ways in, on 2 ranks, in {cells} combinations that contain
every pair of a kind, a way in and a compressor: {compressors}. Each
runs {steps} steps of AdamW with {seeds} seeds, beside the same training without compression. For that, DDP stands for
all ways but DiLoCo: two ranks train bit for bit alike. All 112 combinations are tried by `python -m tests.models
--every`. `attach_sharded` refuses PowerSGD, so FSDP2 lacks it. The models are small and learn made-up tasks
(`tests/models/kinds.py`), so the losses say whether a combination trains, not what it costs on yours. These are from
PyTorch {torch}, on a CPU.

Each combination must show that

- replicas are equal, bit for bit, after every step, and with DiLoCo after every round of {every} steps. FSDP2 has none;
- a rank hands in exactly the bytes that the paper and the layout of messages give (`tests/models/sizes.py`);
- the loss on held-out data falls, and int8's average is within the range of the seeds' losses without compression.

The difference is that of pairs with one seed, with its 95 % interval. {wrong} of {cells} combinations were not as
promised.

| model | way in | compressor | loss without compression | loss | difference | bytes in a round | verdict |
| --- | --- | --- | ---: | ---: | ---: | ---: | --- |
{rows}
"""
