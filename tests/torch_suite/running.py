"""Run selected tests on a class, each in its own world, and report the outcomes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.torch_suite import suite
from tests.torch_suite.exclusions import EXCLUDED
from tests.world import Outcome, run_world_outcomes

TIMEOUT_SECONDS = 120.0
IF_NEEDED = "if needed"
CLASSES = {
    "ours": ("ours",),
    "torch": ("torch",),
    "both": ("ours", "torch"),
    "quick": ("ours", IF_NEEDED),
}
LAST_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Warning|Exit|Interrupt)\b.*", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one class did in one test."""

    test: str
    ddp: str  # "ours" or "torch"
    status: str  # "passed", "failed", "skipped"
    reason: str = ""
    detail: str = ""  # tracebacks of all ranks
    seconds: float = 0.0


def run_all(tests: Sequence[str], classes: Sequence[str], world_size: int, jobs: int) -> Iterator[dict[str, Result]]:
    """Yield the results of every test by class, in the order of the tests.

    classes: "ours", "torch"; with ("ours", "if needed") PyTorch's class runs only the tests that ours does not pass.
    """

    def run_pair(test: str) -> dict[str, Result]:
        pair = {ddp: run_one(test, ddp, world_size) for ddp in classes if ddp != IF_NEEDED}
        if IF_NEEDED in classes and pair["ours"].status != "passed" and test not in EXCLUDED:
            pair["torch"] = run_one(test, "torch", world_size)
        return pair

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(run_pair, tests)


def run_one(test: str, ddp: str, world_size: int) -> Result:
    """Run one test on "ours" or "torch"."""
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as folder:
        outcomes = run_world_outcomes(
            suite.run_test,
            world_size,
            test,
            ddp,
            folder,
            timeout=TIMEOUT_SECONDS,
            check_exit=ddp == "ours",  # PyTorch's own DDP aborts in about 6 % of exits
            environment=suite.make_folders(folder),
        )
    seconds = round(max(outcome.seconds for outcome in outcomes), 2)
    return Result(test=test, ddp=ddp, seconds=seconds, **_judge(outcomes))


def _judge(outcomes: list[Outcome]) -> dict[str, str]:
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        detail = "\n".join(outcome.describe() for outcome in outcomes)
        return {"status": "failed", "reason": _reason(failed[0]), "detail": detail}
    skips = [why for status, why in (outcome.value for outcome in outcomes) if status == "skipped"]
    return {"status": "skipped", "reason": skips[0]} if skips else {"status": "passed"}


def _reason(outcome: Outcome) -> str:
    """Return the end of a rank's traceback, where the exception is, in one line."""
    text = outcome.traceback or ""
    last = text[text.rfind('\n  File "') :]
    found = LAST_ERROR.search(last)
    return " ".join(found.group().split())[:400] if found else outcome.describe().splitlines()[0].strip("- ")


def verdict(ours: Result | None, theirs: Result | None) -> str:
    """Classify a pair of results: "ok", "excluded", "MISSING" (only PyTorch's passes), "-" (nothing to compare).

    An exclusion whose test passes is "STALE": it must be taken off the list.
    """
    if ours is None:
        return "-"
    if ours.status == "passed":
        return "STALE" if ours.test in EXCLUDED else "ok"
    if ours.test in EXCLUDED:
        return "excluded"
    return "MISSING" if theirs is not None and theirs.status == "passed" else "-"
