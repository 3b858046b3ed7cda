"""The import of a user's module, by name or from a file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from .errors import SettingsError


def import_module(where: str, what: str) -> ModuleType:
    """Import a module by name, or from a file; the current folder is searched first, as by `python -m`.

    Args:
        where: The module's name, or a path that ends in ".py".
        what: What it is imported for, in words for messages.

    Raises:
        SettingsError: There is no such module or file, or it fails while it is imported.

    """
    if where.endswith(".py"):
        return _from_file(Path(where).expanduser(), what)
    if where == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise SettingsError(f"{what}: the ranks are new processes, which do not see a notebook; write it into a file")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.util.find_spec(where) if where not in sys.modules else True
    except ModuleNotFoundError:  # a package in which it would be
        found = None
    if found is None:
        raise SettingsError(
            f"{what}: there is no module {where!r} on the search path or in {here}; name a module that Python can "
            "import, or a file: 'folder/file.py:name'"
        )
    with failures_in_words(f"{what}: importing {where}"):
        return importlib.import_module(where)


def _from_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise SettingsError(f"{what}: there is no file {path} (the current folder is {Path.cwd()})")
    path = path.resolve()
    name = f"commhooks_file_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # before it runs: dataclasses and pickles look their module up by name
    if (folder := str(path.parent)) not in sys.path:
        sys.path.insert(0, folder)  # as for a script: its neighbours can be imported, in its functions too
    try:
        with failures_in_words(f"{what}: importing {path}"):
            specification.loader.exec_module(module)
    except SettingsError:
        del sys.modules[name]
        raise
    return module


@contextmanager
def failures_in_words(what: str) -> Iterator[None]:
    """Raise `SettingsError` with the file and line if somebody else's code fails."""
    try:
        yield
    except SystemExit as error:
        raise SettingsError(
            f"{what} ended the program (exit code {error.code}); put what a script runs under "
            "`if __name__ == '__main__':`"
        ) from error
    except Exception as error:  # whatever somebody else's code raises
        text = " ".join(line.strip() for line in traceback.format_exception_only(error))
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
        place = "" if isinstance(error, SyntaxError) else f" ({frames[-1].filename}, line {frames[-1].lineno})"
        hint = ""
        if isinstance(error, ImportError) and "relative import" in str(error):
            hint = "; a file has no package: import its neighbours by name, or write 'package.module:name'"
        raise SettingsError(f"{what} failed: {text}{place}{hint}") from error
