"""Checks of the result of a task's function, before anything is trained."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset

from commhooks.experiments.tasks.task import HELD_OUT_EVERY, Task, is_dataset

_MODELS: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # all that were returned and still exist
_SHAPES = "expected a Task, or a tuple (model, data, loss)"


def task_of(returned: Any, where: str) -> Task:
    """Return the result of a task's function as a `Task`.

    Args:
        returned: A Task, or a tuple (model, data, loss).
        where: The task's name, for messages.

    Raises:
        ValueError: `returned` is neither, or a part of it cannot work.

    """
    if isinstance(returned, tuple) and len(returned) == 3:
        model, data, loss = returned
        returned = Task(model=model, data=data, loss=loss)
    if not isinstance(returned, Task):
        raise ValueError(f"{where}: {_SHAPES} to be returned (got {_kind(returned)})")
    _check_model(returned.model, where)
    _check_loss(returned.loss, where)
    _check_both_data(returned, where)
    for name in ("evaluate", "optimizer", "schedule", "collate"):
        value = getattr(returned, name)
        if value is not None and not callable(value):
            raise ValueError(f"{where}: {name} must be a function (got {_kind(value)})")
    for name in ("batch_size", "steps"):
        value = getattr(returned, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{where}: {name} must be a whole number of at least 1 (got {value!r})")
    return returned


def _check_model(model: Any, where: str) -> None:
    if isinstance(model, type):
        raise ValueError(f"{where}: model is the class {model.__name__}; return an object, {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise ValueError(f"{where}: model must be a torch.nn.Module (got {_kind(model)})")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{where}: parameter {name!r} has no shape yet; pass one batch through the model")
        if parameter.device.type != "cpu":
            raise ValueError(
                f"{where}: parameter {name!r} is on {parameter.device}; return the model on the CPU; --device moves it"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"{where}: model {_kind(model)} has no parameter that requires a gradient")
    if model in _MODELS:
        raise ValueError(
            f"{where}: it returned a model that it has returned before; make it in the function, new each time"
        )
    _MODELS.add(model)


def _check_loss(loss: Any, where: str) -> None:
    own = "write `lambda model, batch: ...`, which calls the model: its batches are what the data returns"
    if not callable(loss):
        raise ValueError(f"{where}: loss must be a function loss(model, batch) (got {_kind(loss)})")
    if isinstance(loss, nn.Module | type) or getattr(loss, "__module__", "") == "torch.nn.functional":
        name = loss.__name__ if hasattr(loss, "__name__") else _kind(loss)
        raise ValueError(f"{where}: loss is called as loss(model, batch), which {name} does not accept; {own}")


def _check_both_data(task: Task, where: str) -> None:
    """Raise ValueError if the data or the held-out data cannot be used, or has too few examples."""
    data: Any = task.data
    if is_dataset(data) or isinstance(data, type) or not callable(data):  # not a function that draws batches
        _check_data(data, f"{where}: data", ", or a function (seed, step, rank, ranks) -> batch")
        least = 1 if task.held_out is not None else HELD_OUT_EVERY
        if len(data) < least:
            held_out = "" if least == 1 else f", of which one in {HELD_OUT_EVERY} is held out; or return `held_out`"
            raise ValueError(f"{where}: data has {len(data)} examples; expected at least {least}{held_out}")
    held_out_data: Any = task.held_out
    if held_out_data is not None:
        _check_data(held_out_data, f"{where}: held_out", "")
        if len(held_out_data) == 0:
            raise ValueError(f"{where}: held_out has no examples")


def _check_data(data: Any, where: str, otherwise: str) -> None:
    """Raise ValueError if the data is not a dataset with a length."""
    if isinstance(data, DataLoader):
        raise ValueError(
            f"{where} is a DataLoader; return its dataset, which is shuffled and divided among the ranks here"
        )
    if isinstance(data, IterableDataset):
        raise ValueError(
            f"{where} is an IterableDataset, which cannot be divided reproducibly; return a dataset with a length, or "
            "a function (seed, step, rank, ranks) -> batch"
        )
    if isinstance(data, type):
        raise ValueError(f"{where} is the class {data.__name__}; return an object, {data.__name__}(...)")
    if isinstance(data, tuple) and all(isinstance(part, Tensor) for part in data):
        raise ValueError(f"{where} is a tuple of tensors; return torch.utils.data.TensorDataset(*tensors)")
    if not is_dataset(data) or isinstance(data, Mapping | str | tuple):
        raise ValueError(f"{where} must be a torch.utils.data.Dataset{otherwise} (got {_kind(data)})")
    if not hasattr(data, "__len__"):
        raise ValueError(f"{where} must have a length: define __len__ in {_kind(data)}")


def _kind(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
