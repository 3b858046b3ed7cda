"""Hooks, tasks and optimizers in the form of the command line and of files: 'powersgd:rank=4'."""

from __future__ import annotations

import re
from typing import Any, Self

from commhooks.language.text import NAME, Spelling, parse

DILOCO = "diloco"
SettingValue = bool | int | float | str

# What a name may look like before its settings: 'fp16', 'package.module:Class' (a hook), 'module:function' or
# 'folder/file.py:function' (a task).
_NAMES = {
    "hook": NAME,
    "task": re.compile(r".+?\.py:[A-Za-z_]\w*(?=:|$)|[\w.]+:[A-Za-z_]\w*(?=:|$)|[^:]+", re.DOTALL),
    "optimizer": re.compile(r"[^:]+"),
}


class Spec(Spelling):
    """A hook, a task or an optimizer by name, with the settings that differ from its defaults."""

    @classmethod
    def parse(cls, text: str, what: str = "hook") -> Self:
        """Return the spec described by a text such as 'powersgd:rank=4,start_after=10'.

        A hook is written as `commhooks.make_compressor` reads it. A task may be a function,
        'mypackage.module:function:width=64' or 'folder/file.py:function'.

        Args:
            text: The name, and after a colon the settings, separated by commas.
            what: "hook", "task" or "optimizer".

        Raises:
            ValueError: The text does not have that form. The name itself is checked later, where it is used.

        """
        found = parse(text, what, _NAMES[what])
        plain = _plain if found.name == DILOCO else lambda value: value
        return cls(found.name, tuple((key, plain(value)) for key, value in found.settings))

    @property
    def label(self) -> str:
        """The spec in the form of the command line."""
        return str(self)

    @property
    def file_name(self) -> str:
        """The label without characters that are special in file names, shortened if it is long."""
        return re.sub(r"[^A-Za-z0-9.]+", "-", self.label).strip("-")[:80]


def _plain(value: Any) -> Any:
    """Return a name in parentheses without settings, such as '(int4)', as the text 'int4': both mean the same."""
    return value.name if isinstance(value, Spelling) and not value.settings else value


def is_diloco(hook: Spec) -> bool:
    """Return True if a hook's name is DiLoCo's, which trains a plain module (`commhooks.experiments.diloco`)."""
    return hook.name == DILOCO


def steps_of_a_round(hook: Spec) -> int:
    """Return the number of steps after which a hook's communication repeats: 1, unless it is DiLoCo."""
    every = dict(hook.settings).get("every", 1) if is_diloco(hook) else 1
    return every if isinstance(every, int) and every > 0 else 1


def steps_under_way(hook: Spec) -> int:
    """Return the number of later steps in which an exchange may continue: 0, unless it is DiLoCo with a delay."""
    delay = dict(hook.settings).get("delay", 0) if is_diloco(hook) else 0
    return delay if isinstance(delay, int) and delay > 0 else 0
