"""The form of saved data: one check, from a description, of everything that is read from a file."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from commhooks.errors import CheckpointError, SettingsError
from commhooks.language.entries import Entry
from commhooks.version import VERSION

LAYOUT = 4
"""The version of the layout; data of another one are refused."""

Form = Any
"""A type; [form], a list of such items; {str: form}, a dictionary with any names; {"name": form}, one with these names,
of which "name?" may be missing, and with others if it has `...`; or a `Condition`."""


class Condition(NamedTuple):
    """A form that is a condition."""

    expected: str
    holds: Callable[[Any], bool]


def check_layout(what: str, data: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for anything saved in another layout than this version of commhooks writes."""
    if data.get("layout") != LAYOUT:
        by = f"commhooks {data['commhooks']}" if "commhooks" in data else "an earlier commhooks"
        raise CheckpointError(
            f"{what} was saved in layout {data.get('layout', data.get('format_version'))!r} by {by}; this one "
            f"({VERSION}) reads layout {LAYOUT}. Resume it with the version that saved it."
        )


def faults_of(value: object, form: Form, where: str = "") -> Iterator[str]:
    """Yield every fault in the form of a value."""
    expected = _expected(value, form)
    if expected:
        yield f"{where}: expected {expected}, got {kind_of(value)}"
    elif isinstance(form, list):
        assert isinstance(value, list), "_expected says so"
        for number, one in enumerate(value):
            yield from faults_of(one, form[0], f"{where}[{number}]")
    elif isinstance(form, dict):
        assert isinstance(value, Mapping), "_expected says so"
        named = {str(name).removesuffix("?"): own for name, own in form.items() if isinstance(name, str)}
        if str in form:
            named = dict.fromkeys(value, form[str])
        elif ... not in form and (others := value.keys() - named.keys()):
            yield f"{where}: expected {', '.join(named)} alone, got {', '.join(sorted(map(repr, others)))}"
        for name, own in named.items():
            if name in value or f"{name}?" not in form:
                yield from faults_of(value.get(name), own, f"{where}[{name!r}]" if where else str(name))


def _expected(value: object, form: Form) -> str:
    """Return what was expected if a value itself has the wrong form; empty if it has the right one."""
    if isinstance(form, Condition):
        return "" if form.holds(value) else form.expected
    kind = form if isinstance(form, type) else type(form)
    is_right = isinstance(value, Mapping if kind is dict else kind) and isinstance(value, bool) is (kind is bool)
    return "" if is_right else kind.__name__


def entry_of(described: Mapping[str, Any]) -> Entry:
    """Return the `Entry` of a description; its shape is None if it is element-wise or in blocks, else empty."""
    settings = dict(described)
    by_element = settings.pop("by_element", not settings.get("block"))
    return Entry(**settings, shape=None if by_element or settings.get("block") else ())


def description_of(entry: Entry) -> dict[str, Any]:
    """Return a description of an entry as plain data: its kind, and the fields that differ from their defaults."""
    described: dict[str, Any] = {"kind": entry.kind}
    if entry.power != 1:
        described["units"] = entry.power
    if entry.block:
        described["block"] = entry.block
    elif not entry.by_element:
        described["by_element"] = False
    if entry.holders > 1:
        described["holders"] = entry.holders
    return described


def _is_described(described: Any) -> bool:
    try:
        entry_of(described)
    except (TypeError, ValueError, SettingsError):
        return False
    return True


def kind_of(value: object) -> str:
    """Describe the type of a value, for a message."""
    return "nothing" if value is None else f"{type(value).__name__} {reprlib.repr(value)}"[:80]


NAMES = [str]
ENTRIES = {str: {str: Tensor}}
STATE: Form = {
    "commhooks": str,
    "step": Condition("a whole number of at least 0", lambda step: type(step) is int and step >= 0),
    "world_size": Condition("a whole number of at least 1", lambda size: type(size) is int and size >= 1),
    "policy": str,
    "grad_scale": Condition("a number above 0", lambda scale: type(scale) is float and 0 < scale < math.inf),
    "settings": {str: str},
    "shapes": {str: [int]},
    "orders": {str: [int]},
    "bucket_plan": {
        "handed_in?": [NAMES],
        "ddp_core?": {"rebuilt": bool, "limits": [int], "buckets": [NAMES]},
    },
    "kinds": {str: {str: Condition("the description of an entry", _is_described)}},
    "replicated": ENTRIES,
    "local": {str: ENTRIES},
    "inventory?": {str: NAMES},
    ...: Any,
}
"""The form of a state_dict; `commhooks.saving.saved` describes its fields."""
