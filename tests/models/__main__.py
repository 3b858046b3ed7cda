"""Train kinds of model through the ways in with compressors, and judge it: `python -m tests.models`, `make models`.

It continues where it was stopped, as long as no code has changed. A cell is a kind of model, a way in and a compressor.
Each is trained with several seeds, beside the same training without compression.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.models.cells import cover, every_cell
from tests.models.judging import Results, Verdict, page, verdict_on
from tests.models.sizes import COMPRESSORS
from tests.models.ways import trained

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "kinds-of-model.md"


def main() -> int:
    """Return 0 if every cell ended as it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--every", action="store_true", help="all cells; otherwise a cover of pairs")
    parser.add_argument("--anew", action="store_true", help="train what has been trained, too")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    seeds, results, begun = range(given.seeds), Results(given.steps, anew=given.anew), time.monotonic()
    verdicts = list[Verdict]()
    for cell in every_cell() if given.every else cover():
        for one in (cell.uncompressed, cell):
            if missing := [seed for seed in seeds if not results.have(one, seed)]:
                compressor = COMPRESSORS.get(one.compressor)
                results.add(one, missing, trained(one.kind, one.way, compressor, missing, given.steps))
        verdicts.append(verdict_on(cell, results, seeds))
        print(verdicts[-1], flush=True)
    wrong = [one for one in verdicts if one.faults]
    print(f"{len(verdicts)} cells, {len(wrong)} of them not as they should be, in {time.monotonic() - begun:.0f} s")
    if given.page:
        PAGE.write_text(page(verdicts, seeds, given.steps), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
