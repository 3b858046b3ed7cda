"""Try the seeded faults, or record which tests come by them.

`python -m tests.mutants try [--fast | --marks EXPRESSION] [--all] [--minutes N] [FAULT ...]` continues where it was
stopped, as long as neither code nor tests have changed. `python -m tests.mutants record [pytest's options]` runs the
whole suite.
"""

from __future__ import annotations

import argparse
import sys

from tests.mutants.copies import RUNS
from tests.mutants.faults import faults
from tests.mutants.record import record
from tests.mutants.trying import Options, Trial, keep_found, table


def main() -> int:
    """Run one of the two commands, and return the exit code: 0 if every fault was found."""
    every = list(faults())
    if sys.argv[1:2] == ["record"]:
        return record(every, sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("command", choices=["try", "record"])
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="names; none: all")
    parser.add_argument("--fast", action="store_true", help="only the tests of make test-fast")
    parser.add_argument("--marks", default="", help="only tests that this expression of pytest's -m selects")
    parser.add_argument("--all", action="store_true", help="run the rest of the suite for what its own tests miss")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no fault after so long")
    given = parser.parse_intermixed_args()  # names may come after options
    if unknown := {*given.faults} - {fault.name for fault in every}:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    chosen = [fault for fault in every if not given.faults or fault.name in given.faults]
    selection = ["--fast"] * given.fast + (["-m", given.marks] if given.marks else [])
    options = Options(selection, given.all, given.minutes)
    trial = Trial(chosen, options)
    trial.run()
    results = {fault.name: trial.results[fault.name] for fault in chosen if fault.name in trial.results}
    text = table(chosen, results)
    print(text)
    (RUNS / "table.md").write_text(text)
    if not options.selection:
        keep_found(results)
    return int(any(fault.name not in results or not results[fault.name].found_by for fault in chosen))


if __name__ == "__main__":
    sys.exit(main())
