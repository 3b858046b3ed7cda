"""A pytest plugin that runs chosen tests in a given order, and writes down what it runs at once."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

CHOSEN, LEFT_OUT, LOG = "MUTANTS_CHOSEN", "MUTANTS_LEFT_OUT", "MUTANTS_LOG"
"""Environment variables with paths: tests to run, in order, or not to run, one a line; and a file of events."""
_seconds: dict[str, float] = defaultdict(float)
_failed: set[str] = set()
_is_worker = False


def pytest_configure(config: pytest.Config) -> None:
    global _is_worker
    _is_worker = hasattr(config, "workerinput")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if CHOSEN in os.environ:
        place = {name: number for number, name in enumerate(Path(os.environ[CHOSEN]).read_text().splitlines())}
        kept = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])
    elif LEFT_OUT in os.environ:
        names = set(Path(os.environ[LEFT_OUT]).read_text().splitlines())
        kept = [item for item in items if item.nodeid not in names]
    else:
        return
    config.hook.pytest_deselected(items=[*{*items} - {*kept}])
    items[:] = kept


def pytest_runtest_logstart(nodeid: str) -> None:
    if not _is_worker:
        _note(begun=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _is_worker:
        return
    _seconds[report.nodeid] += report.duration
    if report.failed:
        _failed.add(report.nodeid)
    if report.when == "teardown":
        own = report.nodeid
        _note(ended=own, failed=own in _failed, seconds=round(_seconds.pop(own), 3))


def _note(**event: object) -> None:
    if LOG in os.environ:
        with Path(os.environ[LOG]).open("a") as file:
            file.write(json.dumps(event) + "\n")
