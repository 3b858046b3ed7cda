"""What `pip install` installs, and what the command says without the packages that only its commands need."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from setuptools import Distribution

import commhooks
from commhooks.experiments.commands import front, needs, purpose
from commhooks.experiments.commands.cli import app
from commhooks.native import compiled
from tests.tiers import THOROUGH

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Return the files of a wheel, as setuptools finds them."""
    monkeypatch.chdir(ROOT)
    distribution = Distribution({"script_name": "setup.py"})
    distribution.parse_config_files()
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    outputs: list[str] = build.get_outputs(include_bytecode=False)
    return {Path(path).relative_to(build.build_lib) for path in outputs}


def test_a_wheel_holds_every_module_and_takes_no_name_but_its_own_three(installed: set[Path]) -> None:
    """A new folder of modules must be added to `packages` in pyproject.toml."""
    expected = {
        path.relative_to(ROOT)
        for folder in ("commhooks", "ddp_core")
        for pattern in ("*.py", "py.typed", "*.j2", "*.schema.json", "costs.json", "accuracy.json", "versions.json")
        for path in (ROOT / folder).rglob(pattern)
    }
    assert installed == expected | {Path("commhooks_command.py")}
    assert {path.parts[0] for path in installed} == {"commhooks", "commhooks_command.py", "ddp_core"}


def test_every_package_lies_where_its_name_says_so_that_an_editable_install_is_one_path() -> None:
    """Type checkers follow a path, and no import hook, which setuptools would install if one package lay elsewhere."""
    setuptools = PROJECT["tool"]["setuptools"]
    assert setuptools["package-dir"] == {"": "."}
    assert not [name for name in setuptools["packages"] if not (ROOT / name.replace(".", "/") / "__init__.py").exists()]


class Built(NamedTuple):
    """A wheel made from the source distribution, unpacked."""

    name: str
    folder: Path
    said: str

    def run(self, program: str) -> str:
        """Return what a program prints that imports the wheel's commhooks, under warnings that are errors."""
        command = [sys.executable, "-W", "error::UserWarning", "-c", program]
        environment = os.environ | {"PYTHONPATH": str(self.folder)}
        environment.pop("COMMHOOKS_COMPILED", None)
        ended = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        return ended.stdout + ended.stderr[-1000:]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the source distribution, made from a copy of this checkout without what was built in it, and unpacked."""
    copied, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("sdist")
    for name in ("commhooks", "ddp_core"):
        built = shutil.ignore_patterns("_kernels.*", "__pycache__")
        shutil.copytree(ROOT / name, copied / name, ignore=built)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copied)
    (archive,) = made_by("build_sdist", copied, out)[0]
    with tarfile.open(archive) as opened:
        opened.extractall(out, filter="data")
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


def made_by(hook: str, folder: Path, out: Path, **environment: str) -> tuple[list[Path], str]:
    """Return the files that a hook of setuptools' build backend makes, and what it prints."""
    program = f"import sys, setuptools.build_meta as backend; backend.{hook}(sys.argv[1])"
    command = [sys.executable, "-c", program, str(out)]
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [*out.glob("*.tar.gz"), *out.glob("*.whl")], ended.stdout + ended.stderr


def built_with(compiler: dict[str, str], sources: Path, folder: Path) -> Built:
    wheels, said = made_by("build_wheel", sources, folder, **compiler)
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)
    return Built(wheels[0].name, folder, said)


def test_a_source_distribution_has_all_that_the_library_is_built_from(sources: Path) -> None:
    own = {path.name for path in (ROOT / "commhooks" / "native").glob("*.[ch]")}
    assert {path.name for path in (sources / "commhooks" / "native").glob("*.[ch]")} == own
    assert (sources / "setup.py").exists() and not [*sources.rglob("_kernels.*")]


@THOROUGH
def test_a_wheel_without_a_compiler_is_pure_and_says_why_its_passes_are_eager(sources: Path, tmp_path: Path) -> None:
    built = built_with({"CC": "false"}, sources, tmp_path)
    assert built.name == f"commhooks-{commhooks.__version__}-py3-none-any.whl"
    assert "commhooks gets no compiled passes, since its C files could not be compiled" in built.said
    assert not [*built.folder.rglob("_kernels.*")] and not [*built.folder.rglob("*.[ch]")]
    assert "UserWarning: commhooks has no compiled passes, since they are not built" in built.run(
        "import commhooks; commhooks.native.compiled()"
    )


@THOROUGH
@pytest.mark.skipif(not compiled().levels, reason=str(compiled()))
def test_a_wheel_with_a_compiler_is_of_a_platform_and_of_any_python(sources: Path, tmp_path: Path) -> None:
    built = built_with({}, sources, tmp_path)
    assert re.fullmatch(rf"commhooks-{commhooks.__version__}-py3-none-(?!any)\w+\.whl", built.name)
    assert [path.parent for path in built.folder.rglob("_kernels.*")] == [built.folder / "commhooks" / "native"]
    assert (
        built.run(
            "import commhooks, pathlib\n"
            "from commhooks.native.library import opened\n"
            "assert not opened.cache_info().currsize, 'loaded on use'\n"
            "print(pathlib.Path(commhooks.__file__).parents[1], commhooks.native.compiled().levels)"
        )
        == f"{built.folder} {compiled().levels}\n"
    )


def test_the_version_has_one_source() -> None:
    assert PROJECT["tool"]["setuptools"]["dynamic"] == {"version": {"attr": "commhooks.version.VERSION"}}
    assert re.fullmatch(r"\d+\.\d+\.\d+", commhooks.__version__)


def test_the_command_looks_for_what_its_extra_installs() -> None:
    assert list(needs.EXPERIMENTS.values()) == PROJECT["project"]["optional-dependencies"]["experiments"]
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert commands | {group.name for group in app.registered_groups} == purpose.COMMANDS.keys()


def test_help_without_the_extra_names_every_command_and_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in {"typer", "sklearn"} else there(name))

    def bare(*words: str) -> tuple[object, str]:
        monkeypatch.setattr("sys.argv", ["commhooks", *words])
        with pytest.raises(SystemExit) as ended:
            front.main()
        said = capsys.readouterr()
        return ended.value.code, said.out + said.err

    code, said = bare("--help")
    assert code == 0
    for words in (*purpose.COMMANDS, *purpose.COMMANDS.values(), needs.not_installed()):
        assert words in said
    assert bare() == (2, said)
    assert bare("--version") == (0, purpose.version() + "\n")
