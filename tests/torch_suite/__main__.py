"""Command line: `python -m tests.torch_suite --help`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.torch_suite.running import Result


def main() -> int:
    """Run the suite; return 0 if ours passes all that PyTorch's passes, but for the tests excluded by name."""
    options = arguments()
    # The suite reads these when it is imported, here and in the fork server.
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(options.world_size),
        MASTER_ADDR="127.0.0.1",
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
        WORLD_PRELOAD="tests.torch_suite.suite",
    )
    from tests.torch_suite import running, suite
    from tests.torch_suite.exclusions import EXCLUDED

    tests = [test for test in suite.ddp_tests() if re.search(options.k, test)]
    unknown = sorted(set(EXCLUDED) - set(suite.ddp_tests()))
    if unknown:
        raise SystemExit(f"exclusions.py names tests that PyTorch {torch.__version__} does not have: {unknown}")
    classes = running.CLASSES[options.ddp]
    print(f"PyTorch {torch.__version__}: {len(tests)} DDP tests, Gloo, CPU, {options.world_size} ranks", flush=True)
    results: dict[str, dict[str, Result]] = {}
    verdicts: dict[str, str] = {}
    for test, pair in zip(tests, running.run_all(tests, classes, options.world_size, options.jobs), strict=True):
        results[test] = pair
        verdicts[test] = running.verdict(pair.get("ours"), pair.get("torch"))
        print_pair(test, pair, verdicts[test], options.verbose)
    print_summary(results, verdicts)
    return 1 if set(verdicts.values()) & {"MISSING", "STALE"} else 0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suite", description=__doc__)
    parser.add_argument(
        "--class",
        dest="ddp",
        choices=("ours", "torch", "both", "quick"),
        default="both",
        help="quick: ours, and PyTorch's only where ours does not pass (default both)",
    )
    parser.add_argument("-k", default="", metavar="PATTERN", help="run tests whose name this regular expression finds")
    parser.add_argument("--jobs", type=int, default=1, help="tests at the same time (default 1)")
    parser.add_argument("--world-size", type=int, default=2, help="ranks per test (default 2)")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the ranks' tracebacks")
    return parser.parse_args()


def print_pair(test: str, pair: dict[str, Result], verdict: str, verbose: bool) -> None:
    """Print one line for a test, and the reasons of what did not pass."""
    columns = "  ".join(f"{ddp}: {result.status:7} {result.seconds:5.1f} s" for ddp, result in pair.items())
    print(f"{verdict:8} {columns}  {test}", flush=True)
    for ddp, result in pair.items():
        if result.reason:
            print(f"         {ddp}: {result.reason}")
        if verbose and result.detail:
            print(result.detail)


def print_summary(results: dict[str, dict[str, Result]], verdicts: dict[str, str]) -> None:
    """Print how many tests each class passed, failed and skipped."""
    from tests.torch_suite.exclusions import EXCLUDED

    print()
    for ddp in ("ours", "torch"):
        counts = Counter(pair[ddp].status for pair in results.values() if ddp in pair)
        print(f"{ddp:6}" + "".join(f"{counts[status]:5} {status}" for status in ("passed", "failed", "skipped")))
    counts = Counter(verdicts.values())
    print(f"passed by PyTorch's class, not by ours, and not excluded: {counts['MISSING']}")
    print(f"excluded by name: {counts['excluded']}")
    for test, verdict in verdicts.items():
        if verdict in ("MISSING", "STALE"):
            print(f"  {verdict} {test}")
        if verdict == "excluded":
            print(f"  {verdict} {test}: {EXCLUDED[test]}")


if __name__ == "__main__":
    sys.exit(main())
