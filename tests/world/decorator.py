"""A test that runs on every rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from tests.world.launcher import run_world


def on_ranks(world_size: int | str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a module-level function: `run_world` calls it on every rank, as `function(rank, *arguments)`.

    The test has the function's name, marks and parameters, but for `rank`; fixtures and parametrized values must be
    picklable. What the function returns must be equal on all ranks.

    world_size: a number, or the name of the parameter that is the number of ranks.
    options: those of `run_world`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        _, *parameters = inspect.signature(function).parameters.values()

        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            ranks = arguments[world_size] if isinstance(world_size, str) else world_size
            in_order = [arguments[parameter.name] for parameter in parameters]
            first, *others = run_world(test, ranks, *in_order, **options)
            assert others == [first] * len(others)

        vars(test)["__signature__"] = inspect.Signature(parameters)
        return test

    return decorate
