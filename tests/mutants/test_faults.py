"""Each seeded fault still applies: its function is there, and holds the old text once."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.fault import Fault, FaultError, file_of, span_of
from tests.mutants.faults import faults

ROOT = Path(__file__).parents[2]
ALL = list(faults())


def test_there_are_sixty_faults_over_all_subpackages_each_with_a_name_of_its_own() -> None:
    rooms = Counter(fault.subpackage for fault in ALL)
    assert len({fault.name for fault in ALL}) == rooms.total() == 60
    assert len(rooms) == 11 and min(rooms.values()) >= 4


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_each_fault_applies_and_leaves_a_program(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    changed = fault.applied(text)
    assert changed != text
    if fault.is_native:
        assert span_of(fault.seen_at, (ROOT / file_of(fault.seen_at)).read_text())
    else:
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


FUNCTIONS = """
def one(self):
    return 2


class Box:
    def one(self):
        return 1

    def two(self):
        one()
"""


@pytest.mark.parametrize(("name", "old"), [("one", "return 1"), ("Box.two", "return 1"), ("Box.three", "one()")])
def test_a_fault_whose_text_is_not_in_its_function_is_an_error(name: str, old: str) -> None:
    fault = Fault(name="gone", subpackage="", says="", at=f"package.module:{name}", old=old, new="")
    with pytest.raises(FaultError):
        fault.applied(FUNCTIONS)
