"""Names of compressors: the making of a compressor from a name, and the name of a compressor."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from commhooks.language.spelling import Spelling, changed


class Registered(NamedTuple):
    """A maker of the compressors of a name."""

    make: Callable[..., Any]
    """Its class, a method of it that takes a codec's class first, or a function; some arguments may be given."""
    feeds_back: bool = False
    """True if `make_compressor` wraps it in `ErrorFeedback` by default, if it takes feedback."""
    decay: float = 1.0
    """The default decay of that `ErrorFeedback`."""


COMPRESSORS: dict[str, Registered] = {}
"""The registered makers, by name; `commhooks.compressors` fills it."""


def name_of(made: Any, takes_feedback: bool, decay: float | None) -> Spelling | None:
    """Return the shortest spelling by a registered name; None if there is none.

    `decay` is the decay of the `ErrorFeedback` around it (None: it has none). The compressor's own name is preferred:
    bf16 is not fp16 with another dtype.
    """
    found = []
    for name, registered in COMPRESSORS.items():
        settings = _settings(made, registered.make)
        if settings is not None:
            overridden = sum(key in _given(registered.make) for key in settings)
            settings |= _feedback(made, registered, settings, takes_feedback, decay)
            found.append((overridden, len(settings), Spelling(name, tuple(settings.items()))))
    return min(found, key=lambda one: one[:2])[2] if found else None


def _settings(made: Any, make: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the settings with which `make` makes this object; None if it makes something else."""
    inner = make.func if isinstance(make, functools.partial) else make
    if type(made) is not getattr(inner, "__self__", inner):
        return None
    if type(made) is inner:
        return changed(made, _given(make))
    assert isinstance(make, functools.partial), "a method is registered with the class of its codec"
    if type(made.codec) is not make.args[0]:
        return None
    defaults = {one.name: one.default for one in inspect.signature(make).parameters.values()}
    return changed(made.codec, _given(make)) | changed(made, defaults | {"codec": made.codec})


def _given(make: Callable[..., Any]) -> dict[str, Any]:
    return dict(make.keywords) if isinstance(make, functools.partial) else {}


def _feedback(
    made: Any, registered: Registered, settings: dict[str, Any], takes_feedback: bool, decay: float | None
) -> dict[str, Any]:
    """Return the settings of error feedback that differ from the name's defaults."""
    expected = registered.feeds_back and takes_feedback
    if decay is None:
        if not expected:
            return {}
        # Without error feedback a code has none at its server either, unless that is said.
        server = getattr(made, "server_feedback", None)
        settings.pop("server_feedback", None)
        return {"error_feedback": False} | ({"server_feedback": True} if server else {})
    found: dict[str, Any] = {} if expected else {"error_feedback": True}
    return found | ({"decay": decay} if decay != registered.decay else {})
