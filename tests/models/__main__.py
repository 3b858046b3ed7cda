"""Train kinds of model through the ways in with compressors, and judge it: `python -m tests.models`, `make models`.

A cell is a kind of model, a way in and a compressor. Each is trained with several seeds, beside the same training
without compression.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time

from tests.models.judging import cover, every_cell, verdict_on
from tests.models.sizes import COMPRESSORS
from tests.models.ways import trained


def main() -> int:
    """Return 0 if every cell ended as it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--every", action="store_true", help="all cells; otherwise a cover of pairs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    train, begun, wrong = functools.cache(trained), time.monotonic(), 0
    cells = every_cell() if given.every else cover()
    for cell in cells:
        ours, others = (
            train(one.kind, one.way, COMPRESSORS.get(one.compressor), tuple(range(given.seeds)), given.steps)
            for one in (cell, cell.uncompressed)
        )
        print(verdict := verdict_on(cell, ours, others), flush=True)
        wrong += bool(verdict.faults)
    print(f"{len(cells)} cells, {wrong} of them not as they should be, in {time.monotonic() - begun:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
