"""All tasks and hooks: their names, settings and descriptions, read from the code itself."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import torch

from commhooks.compressors import COMPRESSORS
from commhooks.experiments.diloco import DiLoCoSpec
from commhooks.experiments.specs import DILOCO, Spec, is_diloco
from commhooks.experiments.tasks import TASKS
from commhooks.experiments.tasks.loading import task_function
from commhooks.experiments.training.stock import PREFIX, check_stock, is_stock, stock_names, stock_settings
from commhooks.language.text import short_name
from commhooks.making import ENTRY_POINTS, kind_of, settings_of

_OF_ALL_HOOKS = {
    "start_after": ("0", "Steps of plain all-reduce first."),
    "wire": ("none", "The dtype in which messages are sent: bf16, fp16, ..."),
    "error_feedback": (
        "none",
        "true: unsent values are kept for the next step; none: if losing them costs accuracy.",
    ),
    "decay": ("none", "The fraction of unsent values that is kept; none: all, or the value of the compressor's paper."),
    "policy": ("fifo", "fifo: bucket by bucket; fused: one collective for each round of all buckets."),
    "gather": (
        "none",
        "For a sharded model: the code or dtype of gathered parameters (int8, bf16); none: uncompressed.",
    ),
}
_LABEL = r"[A-Z][\w ]*:"  # of a paragraph, such as 'Bytes on the wire:'


@dataclass(frozen=True)
class Setting:
    """One setting of a hook or a task."""

    name: str
    default: str
    about: str = ""


@dataclass(frozen=True)
class Card:
    """The description of a hook or a task, and its settings."""

    name: str
    about: str
    settings: tuple[Setting, ...]

    @property
    def summary(self) -> str:
        """The first line of the description, without a leading name or verb."""
        return re.sub(r"^(Return|[A-Z][^.:]*:) ", "", self.about.partition("\n")[0])


def hook_names() -> list[str]:
    """Return the names of all hooks: compressors (other packages' too), DiLoCo, and PyTorch's own."""
    registered = (point.name for point in entry_points(group=ENTRY_POINTS))
    return [*sorted({*COMPRESSORS, *registered}), DILOCO, *stock_names()]


def hook_card(name: str) -> Card:
    """Return a hook's card.

    Raises:
        ValueError: There is no such hook.

    """
    spec = Spec.parse(name)
    if is_stock(spec):
        check_stock(spec)
        found = tuple(Setting(each, _in_words(default)) for each, default in stock_settings(spec.name).items())
        return Card(spec.name, f"PyTorch's own {spec.name.removeprefix(PREFIX)}, to compare with.", found)
    if is_diloco(spec):
        about, defaults = _documented(DiLoCoSpec), _defaults_of(DiLoCoSpec)
        return Card(
            DILOCO,
            inspect.getdoc(DiLoCoSpec) or "",
            tuple(Setting(each, _in_words(default), about[each]) for each, default in defaults.items()),
        )
    kind = kind_of(spec.name)
    about = {each: text for owner in kind.owners for each, text in _documented(owner).items()}
    defaults = {each: default for owner in kind.owners for each, default in _defaults_of(owner).items()}
    defaults |= kind.given
    own = (each for each in settings_of(spec.name) if each not in _OF_ALL_HOOKS)
    settings = [Setting(each, _in_words(defaults.get(each)), about.get(each, "")) for each in own]
    settings += [Setting(each, *rest) for each, rest in _OF_ALL_HOOKS.items()]
    text = inspect.getdoc(sys.modules[kind.owners[0].__module__]) or ""
    return Card(spec.name, re.sub(rf"(?<!\n)\n(?!\n|{_LABEL})", " ", text), tuple(settings))


def task_names() -> list[str]:
    """Return the names of the built-in tasks."""
    return sorted(TASKS)


def task_card(name: str) -> Card:
    """Return a task's card.

    Raises:
        ValueError: There is no such task.

    """
    name = Spec.parse(name, "task").name
    function = task_function(name)
    settings = tuple(Setting(each, _in_words(default)) for each, default in _defaults_of(function).items())
    return Card(name, inspect.getdoc(function) or "", settings)


def _defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        name: one.default for name, one in inspect.signature(function).parameters.items() if one.kind not in variable
    }


def _documented(owner: Any) -> dict[str, str]:
    """Return the docstrings of the fields of a class and its bases, by the field's name."""
    found = {}
    for base in reversed(inspect.getmro(owner)[:-1]) if inspect.isclass(owner) else ():
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef), "the source of a class is a class"
        for field, below in itertools.pairwise(tree.body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def _in_words(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    if isinstance(default, torch.dtype):
        return short_name(default)
    return "none" if default is None else str(default)
