"""Finding a task's function by name, calling it, and checking what it returns."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..specs import Spec, unknown
from .digits import digits
from .gpt import gpt
from .task import LoadedTask, Task

TASKS: dict[str, Callable[..., Task]] = {"digits": digits, "gpt": gpt}
"""The built-in tasks: each is a function like a user's own."""

_EXPECTED = "expected a Task, or a tuple (model, data, loss)"


def load_task(spec: Spec | str, seed: int = 0) -> LoadedTask:
    """Call the function that a task names, under a seed, and return its task.

    Args:
        spec: A built-in name, 'module:function' or 'file.py:function', with the function's keyword arguments as
            settings.
        seed: Of the model's initial parameters and of the data's order.

    Raises:
        ValueError: There is no such function, it does not accept the settings, or what it returns is no task.

    """
    spec = Spec.parse(spec, "task") if isinstance(spec, str) else spec
    function = task_function(spec.name)
    _check_settings(spec, function)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        returned = function(**dict(spec.settings))
    return LoadedTask(spec, seed, _task_of(returned, spec), _source_of(function))


def task_function(name: str) -> Callable[..., Any]:
    """Return the function that a task's name stands for.

    Raises:
        ValueError: There is none.

    """
    if name in TASKS:
        return TASKS[name]
    where, colon, attribute = name.rpartition(":")
    if not colon:
        raise ValueError(
            f"{unknown('task', name, TASKS)}; a task of your own is 'module:function' or 'file.py:function'"
        )
    module = _module(where, name)
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise ValueError(f"task {name!r}: {unknown('function', attribute, functions)}")
    return function  # type: ignore[no-any-return]  # getattr returns Any


def _module(where: str, name: str) -> ModuleType:
    """Import a module by name, or from a file; the current folder is searched first, as by `python -m`."""
    if where.endswith(".py"):
        return _module_from_file(Path(where), name)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not where.startswith(
            error.name
        ):  # the module is there, but imports another that is not
            raise ValueError(f"task {name!r}: importing {where} failed: {error}") from error
        raise ValueError(
            f"task {name!r}: there is no module {where!r} on the search path or in {here}; name a module that Python "
            "can import, or a file: 'folder/file.py:function'"
        ) from error


def _module_from_file(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"task {name!r}: there is no file {path}")
    path = path.resolve()
    known = f"commhooks_task_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if known in sys.modules:
        return sys.modules[known]
    specification = importlib.util.spec_from_file_location(known, path)
    assert specification is not None and specification.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(specification)
    sys.modules[known] = module  # before it runs: dataclasses and pickles look their module up by name
    sys.path.insert(0, str(path.parent))  # as for a script: its neighbours can be imported
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[known]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def _check_settings(spec: Spec, function: Callable[..., Any]) -> None:
    """Raise ValueError if the function has no parameter of a setting's name."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key, _ in spec.settings:
        if key not in parameters:
            has = f"it has {', '.join(sorted(parameters))}" if parameters else "it has none"
            raise ValueError(f"task {spec.label!r}: {spec.name} has no parameter {key!r}; {has}")
    missing = [key for key, one in parameters.items() if one.default is one.empty and key not in dict(spec.settings)]
    if missing:
        raise ValueError(
            f"task {spec.label!r}: {spec.name} needs {', '.join(missing)}; write '{spec.name}:{missing[0]}=...', or "
            "give the parameter a default"
        )


def _task_of(returned: Any, spec: Spec) -> Task:
    """Return what a function returned as a Task; raise ValueError if it is none."""
    if isinstance(returned, tuple) and len(returned) == 3:
        model, data, loss = returned
        returned = Task(model=model, data=data, loss=loss)
    where = f"task {spec.label!r}"
    if not isinstance(returned, Task):
        raise ValueError(f"{where}: {_EXPECTED} to be returned (got {_kind(returned)})")
    if not isinstance(returned.model, nn.Module):
        raise ValueError(f"{where}: model must be a torch.nn.Module (got {_kind(returned.model)})")
    if not callable(returned.loss):
        raise ValueError(f"{where}: loss must be a function loss(model, batch) (got {_kind(returned.loss)})")
    for name in ("data", "held_out"):
        _check_data(getattr(returned, name), f"{where}: {name}", may_be_drawn=name == "data")
    if returned.batch_size < 1 or returned.steps < 1:
        raise ValueError(
            f"{where}: batch_size and steps must be at least 1 (got {returned.batch_size} and {returned.steps})"
        )
    return returned


def _check_data(data: Any, where: str, *, may_be_drawn: bool) -> None:
    if data is None and not may_be_drawn:
        return
    if isinstance(data, DataLoader):
        raise ValueError(
            f"{where} is a DataLoader; pass its dataset, which is shuffled and divided among the ranks here"
        )
    if isinstance(data, IterableDataset):
        raise ValueError(
            f"{where} is an IterableDataset, which cannot be divided reproducibly; pass a dataset with a length, or a "
            "function (seed, step, rank, ranks) -> batch"
        )
    if isinstance(data, Dataset):
        if not hasattr(data, "__len__"):
            raise ValueError(f"{where} must have a length: define __len__ in {type(data).__name__}")
    elif not (may_be_drawn and callable(data)):
        drawn = ", or a function (seed, step, rank, ranks) -> batch" if may_be_drawn else ""
        raise ValueError(f"{where} must be a torch.utils.data.Dataset{drawn} (got {_kind(data)})")


def _kind(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def _source_of(function: Callable[..., Any]) -> str:
    """Return a hash of the file in which the function is written; empty for the built-in tasks and what has no file."""
    if function in TASKS.values():
        return ""
    try:
        return hashlib.sha256(Path(inspect.getfile(function)).read_bytes()).hexdigest()[:16]
    except (TypeError, OSError):
        return ""
