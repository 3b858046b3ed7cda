"""Trying faults: each in a copy of the tree, with the tests that come by it, until one fails.

A test that also fails without the fault finds nothing, and neither does a run that hangs: a test's own timeout does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.mutants.copies import ROOT, RUNS, Copy, names_of_files
from tests.mutants.fault import Fault
from tests.mutants.plugin import CHOSEN, LEFT_OUT, LOG
from tests.mutants.record import Record

FOUND = Path(__file__).with_name("found.json")
"""The tests that found the faults last time, which are tried first."""
AT_ONCE = 2
SECONDS = 300.0
"""A fault's tests are ended after so long."""
SUITE_SECONDS = 5400.0
MOST_UNSOUND = 5
"""Tests that fail without the fault too, after which it is given up."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a fault."""

    found_by: str
    """The test; empty: none found it."""
    seconds: float
    remark: str = ""


@dataclasses.dataclass(frozen=True)
class Options:
    """How faults are tried."""

    marks: str = ""
    """A pytest expression that replaces the default one of `-m`."""
    rest: bool = False
    """Whether the rest of the suite is run for what the tests that come by miss."""
    minutes: float = 60.0
    """No fault is begun after so long."""


class Trial:
    """Faults, two at a time, each result written down at once."""

    def __init__(self, faults: Sequence[Fault], options: Options) -> None:
        self._options = options
        self._record = Record.read()
        self._faults = faults
        self._key = _key_of(options)
        self._state = RUNS / "state.json"
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self.results: dict[str, Result] = {}
        if self._state.exists() and (held := json.loads(self._state.read_text()))["key"] == self._key:
            self.results = {name: Result(**own) for name, own in held["results"].items()}

    def run(self) -> None:
        """Try every fault that has no result yet."""
        RUNS.mkdir(exist_ok=True)
        left = [fault for fault in self._faults if fault.name not in self.results]
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
            copies = [Copy(Path(folder, str(number))) for number in range(AT_ONCE)]
            running = [pool.submit(self._take, copy, left) for copy in copies]
            for one in running:
                one.result()

    def _take(self, copy: Copy, left: list[Fault]) -> None:
        while True:
            with self._lock:
                if not left or time.monotonic() - self._begun > 60 * self._options.minutes:
                    return
                fault = left.pop(0)
            result = self._try(copy, fault)
            with self._lock:
                self.results[fault.name] = result
                written = {name: dataclasses.asdict(own) for name, own in self.results.items()}
                self._state.write_text(json.dumps({"key": self._key, "results": written}, indent=1))
                by = result.found_by or "NOT FOUND"
                print(f"{fault.room}: {fault.name}: {by} ({result.seconds:.0f} s)", flush=True)

    def _try(self, copy: Copy, fault: Fault) -> Result:
        begun = time.monotonic()
        last = json.loads(FOUND.read_text()).get(fault.name, {}).get("found_by", "") if FOUND.exists() else ""
        chosen = [*dict.fromkeys([last] if last else []), *(t for t in self._record.tests[fault.name] if t != last)]
        found, remark = self._first_failure(copy, fault, chosen, SECONDS)
        if not found and self._options.rest:
            found, remark = self._first_failure(copy, fault, chosen, SUITE_SECONDS, are_left_out=True)
        return Result(found, round(time.monotonic() - begun, 1), remark)

    def _first_failure(
        self, copy: Copy, fault: Fault, tests: Sequence[str], seconds: float, *, are_left_out: bool = False
    ) -> tuple[str, str]:
        """Return the first test that fails with the fault and passes without it, and a remark."""
        unsound: list[str] = []
        while tests or are_left_out:
            copy.seed(fault)
            try:
                failed, remark = self._run(copy, fault, tests, seconds, are_left_out=are_left_out)
            finally:
                copy.mend(fault)
            (RUNS / f"{_file_name(fault)}.out").replace(RUNS / f"{_file_name(fault)}.found")  # the next run has its own
            if not failed or self._run(copy, fault, [failed], SECONDS)[0] != failed:
                return failed, remark
            unsound.append(failed)
            if len(unsound) > MOST_UNSOUND:
                return "", f"given up: without the fault, too, {', '.join(unsound)} fail"
            tests = [*tests, failed] if are_left_out else tests[tests.index(failed) + 1 :]
        return "", "no test is left that comes by"

    def _run(
        self, copy: Copy, fault: Fault, tests: Sequence[str], seconds: float, *, are_left_out: bool = False
    ) -> tuple[str, str]:
        """Return the first test that fails in a copy, or during which pytest dies; and a remark."""
        name = _file_name(fault)
        listed, log = RUNS / f"{name}.tests", RUNS / f"{name}.log"
        listed.write_text("\n".join(tests))
        log.write_text("")
        files = [] if are_left_out else sorted({test.partition("::")[0] for test in tests})
        command = [sys.executable, "-m", "pytest", "-p", "tests.mutants.plugin", "-p", "no:cacheprovider", "-x", "-q"]
        command += ["-m", self._options.marks] if self._options.marks else []
        variables = {LEFT_OUT if are_left_out else CHOSEN: str(listed), LOG: str(log)}
        with (RUNS / f"{name}.out").open("w") as output:
            code = copy.run([*command, *files], seconds, variables, output)
        events: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
        failed = [event["ended"] for event in events if event.get("failed")]
        if failed:
            return failed[0], ""
        if code is None:
            return "", f"hung, or took longer than {seconds:.0f} s"
        if code not in (0, 1, 5) and events and "begun" in events[-1]:
            return events[-1]["begun"], f"pytest ended with {code}"
        return "", "" if code in (0, 5) else f"pytest ended with {code} outside a test"


def _file_name(fault: Fault) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in fault.name)


def _key_of(options: Options) -> str:
    """Return a text that changes with the code, the tests and what is asked."""
    digest = hashlib.sha256(f"{options.marks} {options.rest}".encode())
    for name in names_of_files("*.py", "*.h", "*.c", "*.toml"):
        if (ROOT / name).is_file():
            digest.update(name.encode() + (ROOT / name).read_bytes())
    return digest.hexdigest()


def table(faults: Sequence[Fault], results: Mapping[str, Result]) -> str:
    """Return the results as a table in Markdown."""
    rows = ["| room | fault | found by | seconds |", "| --- | --- | --- | --- |"]
    for fault in faults:
        own = results.get(fault.name)
        by = "not tried" if own is None else (own.found_by or f"**not found** {own.remark}").replace("|", "\\|")
        rows.append(f"| {fault.room} | {fault.name} | {by} | {own.seconds if own else ''} |")
    found = sum(bool(own.found_by) for own in results.values())
    return "\n".join([*rows, "", f"{found} of {len(faults)} found."]) + "\n"


def keep_found(results: Mapping[str, Result]) -> None:
    """Write down which tests found the faults."""
    before = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    now = {name: {"found_by": own.found_by, "seconds": own.seconds} for name, own in results.items() if own.found_by}
    FOUND.write_text(json.dumps(before | now, indent=1) + "\n")
