"""The recorder and the runner, without running anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.fault import Fault
from tests.mutants.probe import VARIABLE, with_probes
from tests.mutants.record import in_order

BRANCHES = """
def sign(number):
    \"\"\"Say whether it is negative.\"\"\"
    if number > 0:
        return 1
    elif number == 0:
        return 0
    return -1


sign({number})
"""


@pytest.mark.parametrize(
    ("old", "reached_by"),
    [("return 1", [2]), ("return 0", [0]), ("number == 0", [-1, 0, 2]), ("    return -1", [-1]), ("> 0", [-1, 0, 2])],
)
def test_a_probe_notes_the_tests_that_reach_a_statement(
    old: str, reached_by: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(name="", subpackage="", says="", at="tests.nowhere:sign", old=old, new="")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "notes"))
    monkeypatch.setattr("tests.mutants.probe._seen", set())
    for number in (-1, 0, 2):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", f"test_sign[{number}] (call)")
        for _ in range(2):
            exec(with_probes(BRANCHES.format(number=number), [(7, fault)]), {})
    assert (tmp_path / "notes").read_text() == "".join(f"7\ttest_sign[{number}]\n" for number in reached_by)


def test_short_tests_of_other_functions_and_files_come_first() -> None:
    seconds = {"x.py::a[1]": 0.1, "x.py::a[2]": 0.1, "x.py::a[3]": 0.1, "x.py::b": 0.125, "y.py::c": 0.15}
    assert in_order(seconds, seconds) == ["x.py::a[1]", "y.py::c", "x.py::a[2]", "x.py::b", "x.py::a[3]"]
