"""Task functions: found by name, and called under a seed."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import commhooks.hooks.powersgd  # noqa: F401  # "imported but unused": a user's module may `torch.load` a saved hook
from commhooks.experiments.devices import CPU
from commhooks.experiments.specs import SettingValue, Spec
from commhooks.experiments.tasks.batches import place_of
from commhooks.experiments.tasks.checks import task_of
from commhooks.experiments.tasks.digits import digits
from commhooks.experiments.tasks.gpt import gpt
from commhooks.experiments.tasks.lstm import lstm
from commhooks.experiments.tasks.task import LoadedTask, Task, seeded
from commhooks.importing import import_module
from commhooks.units import unknown

TASKS: dict[str, Callable[..., Task]] = {"digits": digits, "gpt": gpt, "lstm": lstm}
"""The built-in tasks: each is a function like a user's own."""

_SEED_OF_IMPORTS = 0


def load_task(spec: Spec | str, seed: int = 0, device: torch.device = CPU) -> LoadedTask:
    """Call the function that a task names, under a seed, and return its task.

    Args:
        spec: A built-in name, 'module:function' or 'file.py:function', with the function's keyword arguments as
            settings.
        seed: The seed of the model's initial parameters and of the data's order.
        device: Where the model and its batches are to be; the function makes them on the CPU.

    Raises:
        ValueError: There is no such function, it does not accept the settings or fails, or its result is not a task.

    """
    spec = Spec.parse(spec, "task") if isinstance(spec, str) else spec
    function = _imported(spec)
    settings = _checked_settings(spec, function)
    with seeded(seed):
        try:
            returned = function(**settings)
        except Exception as error:  # whatever somebody else's code raises
            if function in TASKS.values() and isinstance(error, ValueError | FileNotFoundError):
                raise ValueError(f"task {spec.label!r}: {error}") from error
            raise ValueError(
                f"task {spec.label!r}: its function failed: {type(error).__name__}: {error}{place_of(error)}"
            ) from error
    task = task_of(returned, f"task {spec.label!r}")
    task.model.to(device)
    return LoadedTask(spec, seed, task, _source_of(function), device)


def source_of(spec: Spec) -> str:
    """Return a hash of the file in which a task's function is written; the function is not called.

    It is empty for the built-in tasks, and for functions without a file.

    Raises:
        ValueError: There is no such function.

    """
    return _source_of(_imported(spec))


def _imported(spec: Spec) -> Callable[..., Any]:
    with seeded(_SEED_OF_IMPORTS):  # a module is imported once: what it draws meanwhile must not depend on the run
        return task_function(spec.name)


def task_function(name: str) -> Callable[..., Any]:
    """Return the function that a task's name stands for.

    Raises:
        ValueError: There is no such function.

    """
    if name in TASKS:
        return TASKS[name]
    where, colon, attribute = name.rpartition(":")
    if name.endswith(".py"):
        raise ValueError(f"task {name!r} is a file; name its function, too: '{name}:function'")
    if not colon:
        raise ValueError(
            f"{unknown('task', name, TASKS)}; a task of your own is 'module:function' or 'file.py:function'"
        )
    if where in TASKS:
        raise ValueError(f"task {name!r}: settings of a built-in task have names, such as '{where}:size=small'")
    module = import_module(where, f"task {name!r}")
    function = getattr(module, attribute, None)
    if not callable(function):
        found = inspect.getmembers(module, inspect.isfunction)
        functions = [key for key, value in found if value.__module__ == module.__name__ and key[0] != "_"]
        raise ValueError(f"task {name!r}: {unknown('function', attribute, functions)}")
    return function  # type: ignore[no-any-return]  # getattr returns Any


def _checked_settings(spec: Spec, function: Callable[..., Any]) -> dict[str, SettingValue]:
    """Return the settings as arguments; raise ValueError if the function lacks one of them, or requires another."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is inspect.Parameter.POSITIONAL_ONLY for one in parameters.values()):
        raise ValueError(f"task {spec.label!r}: {spec.name} must accept its arguments by name, without a '/'")
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {key: one for key, one in parameters.items() if one.kind not in variable}
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    for key, _ in spec.settings:
        if key not in named and not takes_any:
            has = f"it has {', '.join(sorted(named))}" if named else "it has none"
            raise ValueError(f"task {spec.label!r}: {spec.name} has no parameter {key!r}; {has}")
    missing = [key for key, one in named.items() if one.default is one.empty and key not in dict(spec.settings)]
    if missing:
        raise ValueError(
            f"task {spec.label!r}: {spec.name} needs {', '.join(missing)}; write '{spec.name}:{missing[0]}=...', or "
            "give the parameter a default"
        )
    return {
        key: _of_type(value, named[key].annotation, f"task {spec.label!r}: {key}") if key in named else value
        for key, value in spec.settings
    }


def _of_type(value: SettingValue, annotation: object, where: str) -> SettingValue:
    """Return a setting as the type in a parameter's annotation; raise ValueError if it is of another type."""
    match annotation if isinstance(annotation, str) else getattr(annotation, "__name__", ""):
        case "str":
            return str(value)
        case "int" if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{where} must be a whole number (got {value})")
        case "float" if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{where} must be a number (got {value})")
        case "bool" if not isinstance(value, bool):
            raise ValueError(f"{where} must be true or false (got {value})")
    return value


def _source_of(function: Callable[..., Any]) -> str:
    """Return a hash of the function's file; empty for the built-in tasks and functions without a file."""
    if function in TASKS.values():
        return ""
    try:
        return hashlib.sha256(Path(inspect.getfile(function)).read_bytes()).hexdigest()[:16]
    except (TypeError, OSError):
        return ""
