"""The record of the tests that come by each fault, and their order: `python -m tests.mutants record`."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.mutants.copies import RUNS, Copy
from tests.mutants.fault import Fault, file_of
from tests.mutants.plugin import LOG
from tests.mutants.probe import VARIABLE, with_probes

FILE = Path(__file__).with_name("record.json")
MOST = 100
"""The tests that are kept of each fault; `--all` tries the rest of the suite."""


@dataclasses.dataclass(frozen=True)
class Record:
    """The tests that come by each fault, in the order in which they are tried."""

    tests: Mapping[str, list[str]]

    @classmethod
    def read(cls) -> Record:
        """Read the committed one."""
        content = json.loads(FILE.read_text())
        names = content["tests"]
        return cls({fault: [names[number] for number in numbers] for fault, numbers in content["faults"].items()})

    def write(self) -> None:
        """Write it, each test's name once."""
        names = sorted({test for tests in self.tests.values() for test in tests})
        number = {test: place for place, test in enumerate(names)}
        rows = [f"  {json.dumps(fault)}: {[number[test] for test in tests]}" for fault, tests in self.tests.items()]
        listed = ",\n".join(f"  {json.dumps(name)}" for name in names)
        FILE.write_text(f'{{"tests": [\n{listed}\n],\n"faults": {{\n' + ",\n".join(rows) + "\n}}\n")


def in_order(tests: Iterable[str], seconds: Mapping[str, float]) -> list[str]:
    """Return tests, the shortest first, of many functions and files: rows of one mostly find the same faults.

    A test counts its seconds as many times as it is the shortest, second shortest and so on of its function, and that
    as many times as its function is the first, second and so on of its file.
    """
    rows, functions = Counter[str](), dict[str, list[str]]()
    found = []
    for test in sorted(tests, key=lambda test: (seconds[test], test)):
        function, file = test.partition("[")[0], test.partition("::")[0]
        rows[function] += 1
        of_file = functions.setdefault(file, [])
        of_file += [function] * (function not in of_file)
        times = rows[function] * (of_file.index(function) + 1)
        found.append((times * max(seconds[test], 0.01), test))
    return [test for _, test in sorted(found)]


def record(faults: list[Fault], options: list[str]) -> int:
    """Run tests once, with a probe at each fault, and write what came by; return pytest's exit code.

    What was recorded before stays, so that the suite may be run in parts; remove `.mutants` to begin again.
    """
    RUNS.mkdir(exist_ok=True)
    log, notes = RUNS / "record.log", RUNS / "record.notes"
    for one in (log, notes):
        one.touch()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder))
        of_files: dict[Path, list[tuple[int, Fault]]] = defaultdict(list)
        for number, fault in enumerate(faults):
            of_files[file_of(fault.seen_at or fault.at)].append((number, fault))
        for file, own in of_files.items():
            copy.write(file, with_probes((copy.folder / file).read_text(), own))
        variables = {LOG: str(log), VARIABLE: str(notes)}
        command = [sys.executable, "-m", "pytest", "-p", "tests.mutants.plugin", "-q", *options]
        code = copy.run(command, 4 * 3600.0, variables, None)
    return write(faults, log, notes) or code or 0


def write(faults: list[Fault], log: Path, notes: Path) -> int:
    """Write the record of what a run noted; return 0 if some test comes by each fault."""
    seconds = {}
    for line in log.read_text().splitlines():
        event = json.loads(line)
        if "ended" in event and not event["failed"]:
            seconds[event["ended"]] = event["seconds"]
    came_by: dict[int, set[str]] = defaultdict(set)
    for line in notes.read_text().splitlines():
        number, _, test = line.partition("\t")
        if test in seconds:
            came_by[int(number)].add(test)
    found = {fault.name: in_order(came_by[number], seconds) for number, fault in enumerate(faults)}
    for name, tests in found.items():
        print(f"{len(tests):6} tests come by: {name}")
    Record({name: tests[:MOST] for name, tests in found.items()}).write()
    return int(not all(found.values()))
