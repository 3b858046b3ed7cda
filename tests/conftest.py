"""What every test starts from: one thread of mathematics, examples that repeat, and files in any order."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Generator, Iterable

# Ranks share few cores: read by torch in this process when it is imported, and in every rank that is spawned from it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("COMMHOOKS_CHECK_TILES", "1")

import hypothesis
import pytest
import torch

from tests.tiers import refuse_processes, starts_processes

# A shell lets what it starts in the background ignore Ctrl-C, and what a test starts inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run: a failure seen in CI is the failure seen at home. No deadline: machines are busy.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("repeatable")
torch.set_num_threads(1)

# Workers inherit it, who must agree on the order.
SEED = os.environ.setdefault("TESTS_SEED", str(random.SystemRandom().randrange(10_000)))


def in_any_order(files: Iterable[str], seed: str) -> list[str]:
    """Return test files in an order that the seed decides: one that is always the same hides what two of them share."""
    return random.Random(seed).sample(ordered := sorted(files), len(ordered))


def pytest_report_header() -> str:
    """Return the line by which the same order can be had again."""
    return f"files in the order of TESTS_SEED={SEED}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make test-fast`."""
    parser.addoption("--fast", action="store_true", help="only tests without processes, and one row of each form")


def pytest_configure(config: pytest.Config) -> None:
    """Leave out what `make test-fast` does not run."""
    if config.getoption("--fast"):
        config.option.markexpr = f"({config.option.markexpr}) and not processes and not a_row"


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle the files, and give soaks time; skip tests marked `gpu` where there is no GPU."""
    for item in items:
        if isinstance(item, pytest.Function) and starts_processes(item):
            item.add_marker("processes")
    files = [item.nodeid.partition("::")[0] for item in items]
    place = {file: number for number, file in enumerate(in_any_order(set(files), SEED))}
    items.sort(key=lambda item: place[item.nodeid.partition("::")[0]])
    for item in items:
        if item.get_closest_marker("soak") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


KNOWN_SKIPS = (
    "needs a CUDA device",
    "PyTorch reconfigures groups from 2.14 on",
    "this PyTorch's FSDP2 does not ask parameters for their grad_dtype",
    "FSDP2 always ends a backward pass itself",
    "no variable gives a process other kernels here",
    "test_commands.py has whole commands on that device",
)
"""Reasons that a machine of CI may have to skip a test; with TESTS_SKIPS=known any other is a failure."""


def reason_unknown(reason: str) -> str | None:
    """Return why a skip is an error where all that tests need should be there; None if it is none."""
    return None if any(known in reason for known in KNOWN_SKIPS) else f"skipped, which must not be here: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a skip fail whose reason is not known."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("TESTS_SKIPS") == "known":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if complaint := reason_unknown(reason):
            report.outcome, report.longrepr = "failed", complaint
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hide from the garbage collector what collection made: it is no garbage, and each collection would walk it."""
    if session.config.getoption("--fast"):
        refuse_processes()
    gc.collect()
    gc.freeze()
