"""Compressors from text: `make_compressor("top-k", ratio=0.01)`, or "top-k:ratio=0.01", as `str` prints it."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import torch

from commhooks.compressors import COMPRESSORS, Codec, Registered, TwoHop
from commhooks.errors import SettingsError
from commhooks.importing import import_module
from commhooks.language.compressor import Compressor, takes_feedback
from commhooks.language.settings import kinds_in
from commhooks.language.text import DTYPES, Spelling, is_ours, lower_name, parse, value_in
from commhooks.scheduling.policy import POLICIES, PolicyName
from commhooks.wrappers import ErrorFeedback, StartAfter, WireDtype, WithoutFeedback
from commhooks.wrappers.error_feedback import brought_feedback

SUBPACKAGES = ("commhooks.compressors", "commhooks.compressors.codecs", "commhooks.wrappers")
"""The modules whose classes a specification may name."""
ENTRY_POINTS = "commhooks.compressors"
"""The entry-point group in which other packages register a class, a function that returns one, or a `Registered`."""
COMMON: dict[str, Any] = {"start_after": int, "wire": torch.dtype | str, "error_feedback": bool, "decay": float}
"""The settings that every name takes, and their types."""
DILOCO = "diloco"
"""The name in text of what trains instead of a hook: `commhooks.DiLoCo`."""


def make_compressor(
    name: str,
    *,
    start_after: int = 0,
    wire: torch.dtype | str | None = None,
    error_feedback: bool | None = None,
    decay: float | None = None,
    **settings: Any,
) -> Compressor:
    """Make the compressor called `name` with its `settings`, as `make_compressor("powersgd", rank=4)`.

    `name` is a key of `COMPRESSORS`, a name registered by another package under the entry points
    `commhooks.compressors`, a class such as "mypackage.module:TopK" or "folder/file.py:TopK" (a codec is sent in two
    hops), or a whole compressor as printed by `str`: "powersgd:rank=4,wire=bf16" or
    "error-feedback:inner=(top-k:ratio=0.1),decay=0.9".

    `start_after` is the number of initial steps with a plain all-reduce; `wire` is the dtype of messages, or its name;
    `error_feedback` keeps the part that is not sent for the next step (None: if losing it would cost accuracy), and
    `decay` is the fraction of it that is kept (None: all, or the value of the compressor's paper). Raises
    `SettingsError` (a `ValueError`) for a name or a setting that does not exist or is given twice, or a value that
    cannot work.
    """
    common = {"start_after": start_after or None, "wire": wire, "error_feedback": error_feedback, "decay": decay}
    settings |= {setting: value for setting, value in common.items() if value is not None}
    spelling = parse(name)
    for twice in sorted(settings.keys() & dict(spelling.settings).keys()):
        raise SettingsError(f"make_compressor({name!r}): {twice} is given twice, in the text and beside it.")
    return _Maker(imports=True).compressor(Spelling(spelling.name, (*spelling.settings, *settings.items())))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hook:
    """A compressor, and how an attachment uses it: what the text of a hook says."""

    compressor: Compressor
    policy: PolicyName | None = None
    """The order of collectives; None: that of the way in."""
    gather: str | None = None
    """The code or dtype in which a sharded model's parameters are gathered; None: uncompressed."""


def read_hook(text: str, *, seed: int | None = None) -> Hook:
    """Return what the text of a hook says: "powersgd:rank=4,policy=fused", or "int8:gather=int8" for sharded models.

    The compressor is `make_compressor`'s, with this seed if it draws random numbers and the text gives none. Raises
    `SettingsError` (a `ValueError`) as that does, and for a policy that does not exist.
    """
    spelling = parse(text, "hook")
    own = spelling.having(policy=None, gather=None)
    if seed is not None and not own.has("seed") and "seed" in settings_of(own.name):
        own = own.having(seed=seed)
    gather = dict(spelling.settings).get("gather")
    return Hook(
        compressor=_Maker(imports=True).compressor(own),
        policy=policy_in(spelling),
        gather=None if gather is None else str(gather),
    )


def policy_in(hook: Spelling) -> PolicyName | None:
    """Return the policy that a hook's text gives, or None; raise `SettingsError` if there is no such policy."""
    asked = dict(hook.settings).get("policy")
    for policy in POLICIES:
        if policy == asked:
            return policy
    if asked is None:
        return None
    raise SettingsError(f"hook '{hook}': policy must be one of {', '.join(POLICIES)} (got {asked}).")


def compressor_in_file(text: str) -> Compressor:
    """Make the compressor that a file names; unlike `make_compressor`, import no "module:Class" for it.

    Names of the registry are known, those that installed packages registered, and of modules that this program has
    imported compressors, codes, and dataclasses of the type that a setting has. Raises `SettingsError` (a `ValueError`)
    for any other, and as `make_compressor` does.
    """
    return _Maker(imports=False).compressor(parse(text))


def settings_of(name: str) -> list[str]:
    """Return the sorted settings that `make_compressor` takes for a name: its own, and those common to all names."""
    return sorted({*COMMON, *kind_of(name, [Compressor]).types()})


def kind_of(name: str, types_of_setting: Sequence[type] = (), *, imports: bool = True) -> Registered:
    """Return what a name stands for: a compressor, or in the place of a setting of these types something else.

    A class "module:Class" of another package is imported, unless only modules that are imported already count. In the
    place of a compressor, a codec stands for `TwoHop` with it. Raises `SettingsError` (a `ValueError`), naming the
    nearest name, if there is none.
    """
    if name == DILOCO:
        raise SettingsError(
            "DiLoCo averages models, not gradients, so it is no compressor: train the plain module with "
            'commhooks.DiLoCo(model, optimizer, every=30, compressor="int4"), or compare it with '
            "--hook diloco:every=30,compressor=int4; its compressor is a hook by itself, such as int4."
        )
    # In the place of a codec, "sign" is the codec, not the compressor that sends it in two hops.
    is_code = name in _classes() and any(issubclass(one, Codec) for one in types_of_setting)
    if name in COMPRESSORS and not is_code:
        return COMPRESSORS[name]
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in others:
        found = others[name].load()
    elif ":" in name:
        found = _class_named(name, types_of_setting, imports=imports)
    elif name in _classes():
        found = _classes()[name]
    elif name.endswith(".py"):
        raise SettingsError(f"compressor {name!r}: name the class in the file too, '{name}:Class'.")
    else:
        known = sorted({*COMPRESSORS, *others})
        raise SettingsError(f"compressor {name!r} is not known; known are {', '.join(known)}.{_nearest(name, known)}")
    if isinstance(found, Registered):
        return found
    is_codec = isinstance(found, type) and issubclass(found, Codec)
    if is_codec and any(issubclass(one, Compressor) for one in types_of_setting):
        return Registered(TwoHop, codec=found, feeds_back=True)
    return Registered(found)


@dataclasses.dataclass(frozen=True)
class _Maker:
    """A maker of what a text describes."""

    imports: bool
    """False: a class of another package must be imported already."""
    is_fed: bool = False
    """True inside what decides for all that it holds: `ErrorFeedback`, `WithoutFeedback`, classes of other packages."""

    def compressor(self, spelling: Spelling) -> Compressor:
        made = self.made(spelling, [Compressor])
        if not isinstance(made, Compressor):
            raise SettingsError(f"compressor {spelling.name!r}: expected a compressor (got {made!r}).")
        return made

    def made(self, spelling: Spelling, kinds: Sequence[type] = ()) -> Any:
        """Return a compressor, or in the place of a setting of these types something else, such as a codec."""
        name, registered = spelling.name, kind_of(spelling.name, kinds, imports=self.imports)
        own = registered.types()
        is_setting = isinstance(registered.make, type) and not issubclass(registered.make, Compressor)
        decides = registered.make in (ErrorFeedback, WithoutFeedback)
        inside = dataclasses.replace(self, is_fed=self.is_fed or decides or not is_ours(registered.make))
        values = inside.values(name, spelling.settings, own if is_setting else COMMON | own)
        around = {setting: values.pop(setting) for setting in COMMON if setting in values and setting not in own}
        if around.get("error_feedback") is False and "server_feedback" in own:
            values.setdefault("server_feedback", False)  # without feedback it has none at its server either
        made = _called(name, registered, values)
        if registered.codec is not None and not is_ours(registered.codec) and made.codec.is_unbiased:
            registered = dataclasses.replace(registered, feeds_back=False)  # what it loses averages out
        return made if is_setting else self.wrapped(name, registered, made, **around)

    def values(self, name: str, settings: Iterable[tuple[str, Any]], known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of settings; raise `SettingsError` for one that does not exist."""
        found = {}
        for setting, value in settings:
            if setting in ("policy", "gather"):
                raise SettingsError(
                    f"compressor {name!r}: {setting} is no setting of a compressor, but of attaching one: give it to "
                    "attach (policy) or attach_sharded (gather), as text or as an argument."
                )
            if setting not in known:
                takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
                raise SettingsError(
                    f"compressor {name!r} has no setting {setting!r}; {takes}.{_nearest(setting, sorted(known))}"
                )
            found[setting] = self.converted(value, known[setting], f"compressor {name!r}: {setting}")
        return found

    def converted(self, value: Any, kind: Any, where: str) -> Any:
        """Convert the text of a setting to its type: compressors, codecs, dtypes, tuples; return others unchanged."""
        kinds = kinds_in(kind)
        classes = [one for one in kinds if isinstance(one, type)]
        if isinstance(value, str) and any(issubclass(one, Compressor | Codec) for one in classes):
            value = parse(value)
        if isinstance(value, Spelling):
            return self.made(value, classes)
        if isinstance(value, tuple):
            return tuple(self.converted(one, Any, where) for one in value)
        if isinstance(value, str) and torch.dtype in kinds:
            return _dtype(value, where)
        of_tuple = next((typing.get_args(one) for one in kinds if typing.get_origin(one) is tuple), None)
        if isinstance(value, str | int) and of_tuple is not None:  # a comma would end the setting
            return tuple(one if str in of_tuple else value_in(one) for one in str(value).split("+"))
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return float(value) if is_whole and float in kinds and int not in kinds else value

    def wrapped(
        self,
        name: str,
        registered: Registered,
        made: Compressor,
        *,
        start_after: int | None = None,
        wire: torch.dtype | None = None,
        error_feedback: bool | None = None,
        decay: float | None = None,
    ) -> Compressor:
        """Return a compressor with the common settings, each of which is a wrapper."""
        if error_feedback not in (True, False, None):
            raise SettingsError(f"compressor {name!r}: error_feedback must be True or False (got {error_feedback!r}).")
        brought = brought_feedback(made)
        if brought is None and registered.feeds_back and takes_feedback(made):
            brought = registered.decay
        belongs = brought is not None and (decay is not None or not self.is_fed)
        if belongs if error_feedback is None else error_feedback:
            given = (one for one in (decay, brought, 1.0) if one is not None)
            made = ErrorFeedback(inner=made, decay=next(given))
        elif decay is not None:
            raise SettingsError(
                f"compressor {name!r} keeps no residual, so decay={decay!r} has no effect; leave it out."
            )
        elif error_feedback is False and brought is not None:
            made = WithoutFeedback(inner=made)
        if wire is not None:
            made = WireDtype(inner=made, dtype=wire)
        return StartAfter(inner=made, steps=start_after) if start_after else made


def _called(name: str, registered: Registered, values: Mapping[str, Any]) -> Any:
    missing = [setting for setting in registered.without_default() if setting not in values]
    if missing:
        raise SettingsError(
            f"compressor {name!r} has no default for {' and '.join(missing)}: write "
            f'"{name}:{",".join(f"{one}=..." for one in missing)}".'
        )
    try:
        made = registered(values)
    except TypeError as error:
        raise SettingsError(f"compressor {name!r} does not take these settings, {values}: {error}") from error
    if not isinstance(registered.make, type) and not isinstance(made, Compressor):
        raise SettingsError(f"compressor {name!r}: {registered.make} made {made!r}, which is not a Compressor.")
    return made


def _dtype(text: str, where: str) -> torch.dtype:
    dtype = DTYPES.get(text, vars(torch).get(text.removeprefix("torch.")))
    if not isinstance(dtype, torch.dtype):
        raise SettingsError(f"{where} must be one of {', '.join(DTYPES)}, or another torch.dtype (got {text!r}).")
    return dtype


def _class_named(name: str, types_of_setting: Sequence[type], *, imports: bool) -> Any:
    """Return a class of another package, and nothing else: a text must not be able to call arbitrary functions.

    Without imports, it is a compressor, a codec, or a dataclass of one of these types.
    """
    module, _, attribute = name.rpartition(":")
    found_in = import_module(module, f"compressor {name!r}") if imports else sys.modules.get(module)
    if found_in is None:
        raise SettingsError(
            f"compressor {name!r}: the name comes from a file, for which no module is imported, and {module} is not "
            f"imported yet; if you know it, import {module} in your program first."
        )
    # Not by getattr, unless imports are wanted: a module's own __getattr__ might import another one.
    found = getattr(found_in, attribute, None) if imports else vars(found_in).get(attribute)
    if found is None:
        raise SettingsError(
            f"compressor {name!r}: {module} has no {attribute!r}; write 'module:Class' or 'file.py:Class'."
        )
    own = [one for one in types_of_setting if one is not object and not getattr(one, "_is_protocol", False)]
    kinds = (object,) if imports else (Compressor, Codec, *own)
    if isinstance(found, type) and dataclasses.is_dataclass(found) and issubclass(found, kinds):
        return found
    if not isinstance(found, Registered):
        where = "" if imports else "the name comes from a file, and "
        raise SettingsError(f"compressor {name!r}: {where}{found!r} is not a dataclass, as compressors must be.")
    return found


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


@functools.cache
def _classes() -> dict[str, type]:
    """Return the classes of this package that a compressor's text may name, under both of their names."""
    found = [vars(package)[name] for package in map(importlib.import_module, SUBPACKAGES) for name in package.__all__]
    kinds = [one for one in found if isinstance(one, type) and dataclasses.is_dataclass(one) and one is not Registered]
    return {lower_name(one): one for one in kinds} | {one.__name__: one for one in kinds}
