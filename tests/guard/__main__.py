"""Run every situation under every wrapper and optimizer, and print what is not as expected: `python -m tests.guard`."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections import Counter

from tests.guard.running import Cell, Verdict, judge
from tests.guard.silent import silent
from tests.guard.situations import OPTIMIZERS, WRAPPERS
from tests.guard.sound import sound


def main() -> int:
    """Return 0 if everything ended as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.guard", description=__doc__)
    parser.add_argument("-k", default="", metavar="PATTERN", help="situations whose name this regular expression finds")
    parser.add_argument("--wrapper", choices=WRAPPERS, action="append", help="default: all")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, action="append", help="default: both")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what was said in every cell")
    options = parser.parse_args()
    begun = time.monotonic()
    judged: list[Verdict] = []
    for wrapper, optimizer in itertools.product(options.wrapper or WRAPPERS, options.optimizer or OPTIMIZERS):
        names = [name for name in silent | sound if re.search(options.k, name)]
        for verdict in judge(Cell(name, wrapper, optimizer) for name in names):
            judged.append(verdict)
            if options.verbose or not verdict.is_expected:
                print(verdict, *(f"  {said}" for said in verdict.said if options.verbose), sep="\n", flush=True)
    for title, table in (("Silent without the guard", silent), ("Sound", sound)):
        kinds = Counter(one.kind for one in judged if one.cell.situation in table)
        print(f"{title}: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}")
    wrong = [verdict for verdict in judged if not verdict.is_expected]
    print(f"{len(judged)} cells, {len(wrong)} of them not as expected, in {time.monotonic() - begun:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
