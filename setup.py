"""Builds the library of compiled passes, where there is a C compiler; everything else is in pyproject.toml.

It is plain C: not bound to a version of Python, so its file has no ABI tag, and a wheel with it is
`py3-none-<platform>`. Without a compiler the wheel is `py3-none-any`, and all passes are eager.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("commhooks/native")
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # each operation rounds once, so that all levels compute the same bits
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-wrapv",  # Python's own flags have -fwrapv, with which loops over numbers of a block are not vectorised
]


def each_alone(compiled: Callable[..., list[str]], sources: Sequence[str], **settings: object) -> list[str]:
    """Compile the sources at the same time, each by a call of the compiler's method; return the objects in order."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = pool.map(lambda source: compiled([source], **settings), sources)
        return [name for of_one in objects for name in of_one]


class BuildLibrary(build_ext):
    """Builds a library that is no module, and goes on without it if it cannot."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return its place, without an ABI tag."""
        return str(Path(*fullname.split("."))) + (".dll" if os.name == "nt" else ".so")

    def build_extension(self, ext: Extension) -> None:
        """Build it anew: an earlier one may be of other sources."""
        self.built(ext).unlink(missing_ok=True)
        self.compiler.compile = functools.partial(each_alone, self.compiler.compile)
        try:
            super().build_extension(ext)
        except Exception:
            self.warn(
                "commhooks gets no compiled passes, since its C files could not be compiled; it works without them"
            )
            raise  # `optional` turns a compiler's error into a warning

    def copy_extensions_to_source(self) -> None:
        """Put it beside the sources at once and whole: running processes have the earlier one mapped."""
        for ext in self.extensions:
            built, place = self.built(ext), Path(self.get_ext_filename(ext.name))
            if built.exists():
                unfinished = place.with_suffix(f".{os.getpid()}")
                self.copy_file(str(built), str(unfinished))
                unfinished.replace(place)
            else:
                place.unlink(missing_ok=True)

    def built(self, ext: Extension) -> Path:
        """Return where it is after the build, if it could be built."""
        return Path(self.build_lib, self.get_ext_filename(ext.name))


class Wheel(bdist_wheel):
    """A wheel of a platform if it has the library, and otherwise of any."""

    def run_command(self, command: str) -> None:
        """Decide after the build which of both this is."""
        super().run_command(command)
        if command == "build" and not self.get_finalized_command("build_ext").built(LIBRARY).exists():
            self.distribution.ext_modules = []
            self.root_is_pure = True

    def get_tag(self) -> tuple[str, str, str]:
        """Return a tag without a version of Python."""
        _, _, platform = super().get_tag()
        return "py3", "none", platform


LIBRARY = Extension(
    "commhooks.native._kernels",
    sources=sorted(map(str, SOURCES.glob("*.c"))),
    depends=sorted(map(str, SOURCES.glob("*.h"))),
    extra_compile_args=FLAGS,
    libraries=[] if os.name == "nt" else ["m"],
    optional=True,
)

if __name__ == "__main__":
    setup(ext_modules=[LIBRARY], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel})
