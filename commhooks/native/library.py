"""The shared library of compiled passes: found, checked, and asked for what this processor has.

It is plain C called through `ctypes`, so that it depends on no version of PyTorch or Python, and calls release Python's
lock. It has each function once per level, such as `commhooks_send_avx2`; all levels compute the same bits. Without it
everything works, eagerly: the environment variable `COMMHOOKS_COMPILED` names a level to use, or `off`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import struct
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from commhooks.errors import SettingsError

VARIABLE = "COMMHOOKS_COMPILED"
PATH = Path(__file__).with_name("_kernels.dll" if sys.platform == "win32" else "_kernels.so")
VERSION = 5
"""The version of the functions' arguments; library.c has the same."""
LEVELS = ("plain", "sse42", "avx2", "avx512")
"""The levels, from the lowest to the highest, as library.c numbers them."""
PASSES = ("uniform", "qsgd", "sign", "vote", "fp8", "natural", "mxfp4")
"""The kinds of code that have compiled passes, as passes.h numbers them."""
SEARCHES = ("top-k", "sparse-loco")
"""The compressors whose searches run compiled (largest.h)."""
PRODUCTS = ("powersgd",)
"""The compressors whose products run compiled (low_rank.h)."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiled passes in use, or the reason why there are none."""

    level: str | None
    """The level in use: `"avx512"`, `"avx2"`, `"sse42"` or `"plain"`; None: everything runs eagerly."""
    levels: tuple[str, ...]
    """The levels that the library and this processor have, from the highest to the lowest."""
    kinds: tuple[str, ...]
    """The codes and compressors that run compiled, on a CPU."""
    reason: str
    """The reason why no level is in use, or why this one is."""

    def __str__(self) -> str:
        """Return one sentence."""
        if self.level is None:
            return f"compiled passes: none, since {self.reason}"
        return f"compiled passes: {self.level} ({self.reason}; of {', '.join(self.levels)}) for {', '.join(self.kinds)}"


def compiled() -> Compiled:
    """Return the compiled passes in use in this process, or the reason why there are none; `str` gives one sentence.

    They take the place of eager ones with the same results, on CPUs, where commhooks was built with a C compiler. The
    environment variable `COMMHOOKS_COMPILED` chooses a level (`avx512`, `avx2`, `sse42` or `plain`), or `off`. Raises
    `SettingsError` if it says something else, or names a level that the library or this processor does not have.
    """
    found = opened(PATH)
    there = () if isinstance(found, str) else levels_of(found)
    level = chosen()
    if level is not None:
        reason = f"{VARIABLE} says so" if os.environ.get(VARIABLE) else "the highest that this processor has"
        return Compiled(level, there, (*PASSES, *SEARCHES, *PRODUCTS), reason)
    return Compiled(None, there, (), found if isinstance(found, str) else f"{VARIABLE} is off")


def chosen() -> str | None:
    """Return the level to use, or None for eager passes; warn once if that is because the library cannot be used.

    Raises `SettingsError` as `compiled` does.
    """
    level = in_use()
    if level is None and os.environ.get(VARIABLE) != "off" and isinstance(found := opened(PATH), str):
        _warn(found)
    return level


def in_use() -> str | None:
    """Return the level to use, or None, without a warning. Raises `SettingsError` as `compiled` does."""
    word = os.environ.get(VARIABLE, "")
    if word == "off":
        return None
    if word and word not in LEVELS:
        raise SettingsError(f"{VARIABLE} must be {', '.join(reversed(LEVELS))} or off (got {word!r}).")
    found = opened(PATH)
    if isinstance(found, str):
        if word:
            raise SettingsError(f"{VARIABLE} is {word!r}, but {found}.")
        return None
    there = levels_of(found)
    if word and word not in there:
        raise SettingsError(
            f"{VARIABLE} is {word!r}, but this processor, or the compiler of {PATH}, has only {', '.join(there)}."
        )
    return word or there[0]


@functools.cache
def function(name: str, level: str, arguments: Sequence[Any]) -> Callable[..., int]:
    """Return the library's function of a name at a level, which takes arguments of these C types and returns an int.

    Raises `SettingsError` if there is none.
    """
    found = opened(PATH)
    if isinstance(found, str) or level not in levels_of(found):
        raise SettingsError(f"there is no level {level!r}: {found if isinstance(found, str) else levels_of(found)}.")
    called = getattr(found, f"commhooks_{name}_{level}")
    called.argtypes = arguments
    called.restype = ctypes.c_int32
    return called  # type: ignore[no-any-return]  # "Returning Any": ctypes' functions have no type


@functools.cache
def opened(path: Path) -> ctypes.CDLL | str:
    """Return the library in a file, or say why it cannot be used."""
    if not path.exists():
        return f"they are not built ({path} does not exist)"
    if not _is_whole(path):
        return f"{path} is damaged: it is shorter than it says"
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path} cannot be loaded: {error}"
    try:
        version = found.commhooks_version()
    except AttributeError:
        return f"{path} is another library"
    if version != VERSION:
        return f"{path} has version {version} and this commhooks needs {VERSION}: install it again"
    return found


@functools.cache
def levels_of(library: ctypes.CDLL) -> tuple[str, ...]:
    """Return the levels that the library and this processor have, from the highest to the lowest."""
    found = [
        level
        for number, level in enumerate(LEVELS)
        if hasattr(library, f"commhooks_send_{level}") and library.commhooks_has_level(number)
    ]
    return tuple(reversed(found))


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"commhooks has no compiled passes, since {reason}. Everything works without them, but compression on a CPU "
        f"takes longer. {VARIABLE}=off silences this.",
        stacklevel=3,
    )


def _is_whole(path: Path) -> bool:
    """Return whether a file is as long as its ELF header says; the loader would map missing pages, and crash."""
    with path.open("rb") as file:
        header = file.read(64)
    if header[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
        return len(header) == 64
    (start,), (size, number) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return bool(start + size * number <= path.stat().st_size)  # the table of sections comes last
