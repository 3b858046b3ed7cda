"""The wheel alone, in an environment that holds nothing else: what a user gets who has never seen a checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from commhooks.experiments.commands.needs import EXPERIMENTS, WITHOUT_EXTRA
from commhooks.experiments.commands.purpose import COMMANDS
from commhooks.native import compiled
from tests.world.launcher import ROOT

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]


class Environment:
    """A virtual environment that inherits nothing, and a folder outside of every checkout to run commands in."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "environment", with_pip=True)
        self.bin = folder / "environment" / "bin"
        self.folder = folder

    def run(self, *command: str | Path, exit_code: int = 0, timeout: float = 60) -> str:
        """Run a program of the environment; return what it printed."""
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ended = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=self.folder,
            env=variables | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert ended.returncode == exit_code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    def install(self, *what: str) -> None:
        """Install with pip, at the versions of constraints.txt."""
        self.run("python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *what, timeout=400)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel of this checkout, built in a copy: a `build` folder of an earlier build would end up in it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in ("commhooks", "ddp_core"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "_kernels.*"))
    for file in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "commhooks_command.py"):
        shutil.copy(ROOT / file, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        str(source),
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(target),
    ]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    environment = Environment(tmp_path_factory.mktemp("bare"))
    environment.install("torch")  # by itself first, so that the wheel cannot ask for another version
    environment.install(str(wheel))
    yield environment
    shutil.rmtree(environment.folder)  # several hundred megabytes


def test_the_wheel_alone_imports_without_a_warning_and_owns_no_other_name(bare: Environment) -> None:
    bare.run("python", "-W", "error", "-c", "import commhooks, ddp_core; assert commhooks.__version__")
    said = bare.run("python", "-c", "from commhooks import native; print(native.compiled().levels)")
    assert said == f"{compiled().levels}\n", "with compiled passes, as those who install it get it"
    said = bare.run("python", "-c", "import experiments", exit_code=1)
    assert "No module named 'experiments'" in said


def test_its_command_says_what_to_install_for_what(bare: Environment) -> None:
    said = bare.run("commhooks", "--help")
    install = " ".join(["pip install", *(one for one in EXPERIMENTS.values() if one != "jinja2")])  # torch has it
    assert [words for words in (*COMMANDS, install) if words not in said] == []
    assert "commhooks" in bare.run("commhooks", WITHOUT_EXTRA)
    for command in COMMANDS.keys() - {WITHOUT_EXTRA}:
        said = bare.run("commhooks", command, exit_code=2)
        assert re.fullmatch(rf"commhooks {command} needs .*: {re.escape(install)}\n", said)


def test_two_ranks_train_with_powersgd(bare: Environment) -> None:
    shutil.copy(ROOT / "docs" / "examples" / "plain_ddp.py", bare.folder)
    said = bare.run("torchrun", "--standalone", "--nproc-per-node", "2", "plain_ddp.py", "checkpoints")
    assert "steps 1 to 60" in said


def test_with_the_extra_the_command_compares_hooks(bare: Environment, wheel: Path) -> None:
    bare.install(f"{wheel}[experiments]")
    words = ["compare", "--task", "digits:size=tiny", "--steps", "4", "--rate", "unlimited"]
    words += ["--hook", "all-reduce", "--hook", "powersgd:rank=1,start_after=1"]
    bare.run("commhooks", *words, "--out", "here", timeout=120)
    joined = ["torchrun", "--standalone", "--nproc-per-node", "2", "--no-python", str(bare.bin / "commhooks")]
    bare.run(*joined, *words, "--out", "joined", timeout=120)
    for folder in ("here", "joined"):
        assert len(list((bare.folder / folder / "results").glob("*.json"))) == 2
        assert (bare.folder / folder / "report.html").exists()
