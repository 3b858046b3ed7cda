"""The extension that holds the device: compiled once for each source and version, into build/virtual_device."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).parent / "source"
BUILT = Path(__file__).parents[2] / "build" / "virtual_device"
_NAME = "virtual_device_of_commhooks"
_FLAGS = ("-std=c++20", "-O1", "-g0", "-DNDEBUG", "-w", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={_NAME}")


class BuildError(RuntimeError):
    """The device could not be compiled; the message has the compiler's words."""


@functools.cache  # also for processes that are forked from this one
def load() -> ModuleType:
    """Return the extension, compiled if need be. Raises `BuildError`."""
    library = _built()
    spec = importlib.util.spec_from_file_location(_NAME, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _built() -> Path:
    files = sorted(SOURCE.glob("[!.]*"))
    versions = f"{torch.__version__} {sysconfig.get_config_var('SOABI')} {_FLAGS}"
    digest = hashlib.sha256(versions.encode() + b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    library = BUILT / digest / f"{_NAME}.so"
    if not library.exists():
        _compile(library)
    return library


def _compile(library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")  # others may be compiling too
    include = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    libraries = cpp_extension.library_paths()
    command = [
        os.environ.get("CXX", "g++"),
        *_FLAGS,
        *(f"-isystem{path}" for path in include),
        str(SOURCE / "module.cpp"),
        *(f"-L{path}" for path in libraries),
        *("-lc10", "-ltorch_cpu", "-ltorch_python"),
        *("-o", str(unfinished)),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"the virtual device needs a C++ compiler, and {command[0]} did not start: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} could not compile the virtual device:\n{done.stderr[-4000:]}")
    unfinished.replace(library)
