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
FIRST = 8
"""The tests of a fault that are tried by themselves at first: to collect the files of all takes longer."""


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

    selection: Sequence[str] = ()
    """Options of pytest that choose tests, such as `--fast`; none: the tests of `make test`."""
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
        self._sound, self._unsound = set[str](), set[str]()
        """Tests that pass without a fault, and that do not."""
        if self._state.exists() and (held := json.loads(self._state.read_text()))["key"] == self._key:
            self.results = {name: Result(**own) for name, own in held["results"].items()}
            self._sound, self._unsound = {*held["sound"]}, {*held["unsound"]}

    def run(self) -> None:
        """Try every fault that has no result yet, and those again whose tests fail without them."""
        RUNS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
            copies = [Copy(Path(folder, str(number))) for number in range(AT_ONCE)]
            while True:
                left = self._left()
                running = [pool.submit(self._take, copy, left) for copy in copies]
                for one in running:
                    one.result()
                self._doubt(copies[0])
                if self._is_over or not self._left():
                    return

    @property
    def _is_over(self) -> bool:
        return time.monotonic() - self._begun > 60 * self._options.minutes

    def _left(self) -> list[Fault]:
        return [fault for fault in self._faults if fault.name not in self.results]

    def _take(self, copy: Copy, left: list[Fault]) -> None:
        while True:
            with self._lock:
                if not left or self._is_over:
                    return
                fault = left.pop(0)
            result = self._try(copy, fault)
            with self._lock:
                self.results[fault.name] = result
                self._write()
                by = result.found_by or "NOT FOUND"
                print(f"{fault.subpackage}: {fault.name}: {by} ({result.seconds:.0f} s)", flush=True)

    def _write(self) -> None:
        written = {name: dataclasses.asdict(own) for name, own in self.results.items()}
        held = {"key": self._key, "results": written, "sound": sorted(self._sound), "unsound": sorted(self._unsound)}
        self._state.write_text(json.dumps(held, indent=1))

    def _doubt(self, copy: Copy) -> None:
        """Run what found faults without any: what fails then has found nothing."""
        doubtful = sorted({own.found_by for own in self.results.values()} - self._sound - {""})
        if not doubtful:
            return
        failed, _ = self._run(copy, "no-fault", doubtful, SUITE_SECONDS)
        self._sound |= {*doubtful} - {*failed}
        self._unsound |= {*failed}
        self.results = {name: own for name, own in self.results.items() if own.found_by not in self._unsound}
        self._write()

    def _try(self, copy: Copy, fault: Fault) -> Result:
        begun = time.monotonic()
        last = json.loads(FOUND.read_text()).get(fault.name, {}).get("found_by", "") if FOUND.exists() else ""
        chosen = [*dict.fromkeys([last, *self._record.tests[fault.name]])]
        chosen = [test for test in chosen if test and test not in self._unsound]
        alone = int(last in chosen)  # what found it last time, from one file
        stages = [chosen[:alone], chosen[alone : alone + FIRST], chosen[alone + FIRST :]]
        failed, remark = list[str](), ""
        copy.seed(fault)
        try:
            for stage in filter(None, stages):
                if not failed:
                    failed, remark = self._run(copy, _file_name(fault), stage, SECONDS, stops=True)
            if not failed and self._options.rest:
                left_out = [*chosen, *self._unsound]
                failed, remark = self._run(
                    copy, _file_name(fault), left_out, SUITE_SECONDS, stops=True, are_left_out=True
                )
        finally:
            copy.mend(fault)
        return Result(failed[0] if failed else "", round(time.monotonic() - begun, 1), remark)

    def _run(
        self,
        copy: Copy,
        name: str,
        tests: Sequence[str],
        seconds: float,
        *,
        stops: bool = False,
        are_left_out: bool = False,
    ) -> tuple[list[str], str]:
        """Return the tests that fail in a copy, or during which pytest dies, and a remark; `stops` at the first."""
        listed, log = RUNS / f"{name}.tests", RUNS / f"{name}.log"
        listed.write_text("\n".join(tests))
        log.write_text("")
        files = [] if are_left_out else sorted({test.partition("::")[0] for test in tests})
        files = [one for one in files if (ROOT / one).is_file()]  # the record may be older
        command = [sys.executable, "-m", "pytest", "-p", "tests.mutants.plugin", "-p", "no:cacheprovider", "-q"]
        command += ["-x"] * stops + [*self._options.selection]
        variables = {LEFT_OUT if are_left_out else CHOSEN: str(listed), LOG: str(log)}
        with (RUNS / f"{name}.out").open("w") as output:
            code = copy.run([*command, *files], seconds, variables, output)
        events: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
        failed = [event["ended"] for event in events if event.get("failed")]
        if failed:
            return failed, ""
        if code is None:
            return [], f"hung, or took longer than {seconds:.0f} s"
        if code not in (0, 1, 5) and events and "begun" in events[-1]:
            return [events[-1]["begun"]], f"pytest ended with {code}"
        return [], "" if code in (0, 5) else f"pytest ended with {code} outside a test"


def _file_name(fault: Fault) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in fault.name)


def _key_of(options: Options) -> str:
    """Return a text that changes with the code, the tests and what is asked."""
    digest = hashlib.sha256(f"{options.selection} {options.rest}".encode())
    for name in names_of_files("*.py", "*.h", "*.c", "*.toml"):
        if (ROOT / name).is_file():
            digest.update(name.encode() + (ROOT / name).read_bytes())
    return digest.hexdigest()


def table(faults: Sequence[Fault], results: Mapping[str, Result]) -> str:
    """Return the results as a table in Markdown."""
    rows = ["| subpackage | fault | found by | seconds |", "| --- | --- | --- | --- |"]
    for fault in faults:
        own = results.get(fault.name)
        by = "not tried" if own is None else (own.found_by or f"**not found** {own.remark}").replace("|", "\\|")
        rows.append(f"| {fault.subpackage} | {fault.name} | {by} | {own.seconds if own else ''} |")
    found = sum(bool(own.found_by) for own in results.values())
    return "\n".join([*rows, "", f"{found} of {len(faults)} found."]) + "\n"


def keep_found(results: Mapping[str, Result]) -> None:
    """Write down which tests found the faults."""
    before = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    now = {name: {"found_by": own.found_by, "seconds": own.seconds} for name, own in results.items() if own.found_by}
    FOUND.write_text(json.dumps(before | now, indent=1) + "\n")
