"""What the recorder writes into the functions with faults: a note of each test that comes by.

It is written at once, since ranks may end by `os._exit`, and in every process, which inherit the test's name from
pytest.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence

from tests.mutants.fault import Fault, span_of

VARIABLE = "MUTANTS_REACHED"
"""The environment variable that names the file."""
_LINES = (
    "try:",
    "    from tests.mutants.probe import reached",
    "    reached({number})",
    "except ImportError:",
    "    pass",
)
_seen: set[tuple[int, str]] = set()


def reached(number: int) -> None:
    """Note that the current test has reached a fault."""
    test, _, _ = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")
    if (number, test) in _seen or VARIABLE not in os.environ:
        return
    _seen.add((number, test))
    file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, f"{number}\t{test}\n".encode())
    os.close(file)


def with_probes(text: str, faults: Sequence[tuple[int, Fault]]) -> str:
    """Return a file's text with a note before the statement of each fault, given with its number."""
    lines = text.splitlines(keepends=True)
    places = [(_line_of(text, fault), number) for number, fault in faults]
    for line, number in sorted(places, reverse=True):
        indent = lines[line][: len(lines[line]) - len(lines[line].lstrip())]
        lines.insert(line, "".join(f"{indent}{one.format(number=number)}\n" for one in _LINES))
    return "".join(lines)


def _line_of(text: str, fault: Fault) -> int:
    """Return the line, from 0 on, before which a fault's probe stands.

    It is that of the first statement which begins in the old text, or else of the innermost one around it.
    """
    span = span_of(fault.seen_at or fault.at, text)
    begin = span.begin if fault.seen_at else fault.place_in(text)
    begin += 0 if fault.seen_at else len(fault.old) - len(fault.old.lstrip())
    end = span.end if fault.seen_at else fault.place_in(text) + len(fault.old)
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found: list[tuple[bool, int, int]] = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        first = starts[node.lineno - 1] + len(lines[node.lineno - 1].encode()[: node.col_offset].decode())
        last = starts[node.end_lineno or node.lineno]
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not span.begin <= first < span.end or is_docstring or text.startswith("elif", first):
            continue
        if begin <= first < end:
            found.append((True, -first, node.lineno - 1))
        elif first <= begin < last:
            found.append((False, first, node.lineno - 1))
    return max(found)[2]
