"""Which tests run when: `make test-fast`, `make test` and `make test-all`.

`thorough`, `in_turn` and `covering` mark what only `make test-all` runs; `a_row` a row, or a longer test, that
`make test-fast` leaves out. What starts a process `conftest.py` marks, by the names in a test's code, or a hand does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import subprocess
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import pytest

from commhooks.experiments import launch
from tests.world import launcher

THOROUGH = pytest.mark.thorough
A_ROW = pytest.mark.a_row
_INSIDE = ("fget", "func", "__func__")
_STARTERS = (
    subprocess.Popen,
    subprocess.run,
    subprocess.check_output,
    os.fork,
    launcher.run_world,
    launcher.run_world_outcomes,
    launch.run_world,
)


def thorough(values: Iterable[Any], unless: Callable[[Any], bool] = lambda _: False) -> list[Any]:
    """Return values for a test's parameters, all but some marked for `make test-all` alone."""
    return _marked(values, THOROUGH, unless)


def rows(values: Iterable[Any], unless: Callable[[Any], bool] = lambda _: False) -> list[Any]:
    """Return values for a test's parameters, all but some left out by `make test-fast`."""
    return _marked(values, A_ROW, unless)


def in_turn(
    first: Sequence[Any],
    second: Sequence[Any],
    whole: Callable[[Any], bool] = lambda _: False,
    fast: Callable[[Any], bool] = lambda _: True,
) -> list[Any]:
    """Return all pairs for a test's parameters, of which `make test` runs each of `first` with one of `second`.

    These take turns, so that each is run with many; those of `first` for which `whole` holds are run with all. Of what
    `make test` runs, `make test-fast` leaves out those of `first` for which `fast` does not hold.
    """
    return [
        pytest.param(
            one,
            other,
            marks=THOROUGH if not whole(one) and number % len(second) != place else () if fast(one) else A_ROW,
        )
        for number, one in enumerate(first)
        for place, other in enumerate(second)
    ]


def covering(*values: Sequence[Any], fast: int | None = None) -> list[Any]:
    """Return all tuples for a test's parameters, of which `make test` runs some in which all pairs of values occur.

    The next is always the one with the most pairs that have not occurred. `make test-fast` runs the first `fast`.
    """
    every = list(itertools.product(*values))
    places = itertools.product(*(range(len(one)) for one in values))
    pairs = [{*itertools.combinations(enumerate(of_one), 2)} for of_one in places]
    left = set().union(*pairs)
    chosen: list[int] = []
    while left:
        chosen.append(max(range(len(every)), key=lambda number: len(pairs[number] & left)))
        left -= pairs[chosen[-1]]
    marks = dict.fromkeys(chosen, A_ROW) | dict.fromkeys(chosen[:fast], ())
    return [pytest.param(*one, marks=marks.get(number, THOROUGH)) for number, one in enumerate(every)]


def _marked(values: Iterable[Any], mark: pytest.MarkDecorator, unless: Callable[[Any], bool]) -> list[Any]:
    of_test = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*one, marks=() if unless(one if len(one) > 1 else one[0]) else mark) for one in of_test]


def starts_processes(item: pytest.Function) -> bool:
    """Return whether a test, or a fixture that it asks for, can come to start a process, by the names in its code."""
    fixtures = [one.func for ones in item._fixtureinfo.name2fixturedefs.values() for one in ones]
    return any(_reaches_a_start(one) for one in (item.function, *fixtures))


def refuse_processes() -> None:
    """Make starting a process an error: that the names in a test's code do not say so, a mark has to."""
    subprocess.Popen.__init__ = _refuse  # type: ignore[method-assign]  # for the rest of this process
    BaseProcess.start = _refuse  # type: ignore[method-assign]
    os.fork = _refuse


def _refuse(*_: object, **__: object) -> NoReturn:
    raise AssertionError("make test-fast starts no process: mark this test `processes`")


@functools.cache
def _reaches_a_start(function: object) -> bool:
    seen: set[int] = set()
    left = [function]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if any(one is starter for starter in _STARTERS):
            return True
        if str(getattr(one, "__module__", "")).startswith(("tests.", "commhooks.experiments.", "experiments.")):
            left += _used_by(one)
    return False


def _used_by(one: Any) -> Iterator[Any]:
    """Return what the names in a function's code, or in a class's, stand for."""
    if isinstance(one, type):
        for value in vars(one).values():  # a property, or a method of the class, is no function itself
            yield next((inner for name in _INSIDE if (inner := getattr(value, name, None))), value)
    elif not isinstance(one, types.FunctionType):
        yield type(one)
    yield getattr(one, "__wrapped__", None)
    yield from _enclosed(one)
    if isinstance(one, types.FunctionType):
        names = set(_names(one.__code__))
        found = [one.__globals__[name] for name in names if name in one.__globals__]
        yield from found
        for module in found:
            if isinstance(module, types.ModuleType):
                yield from (vars(module)[name] for name in names if name in vars(module))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _enclosed(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty one
            yield cell.cell_contents
