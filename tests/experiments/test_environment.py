"""What `commhooks env` tells, and what it must not tell."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import commhooks
from commhooks.experiments import versions
from commhooks.experiments.commands.cli import app
from commhooks.experiments.commit import commit_of_code
from commhooks.experiments.environment import BACKENDS, environment, in_words
from commhooks.native import compiled, library


def told() -> str:
    found = environment()
    return json.dumps(found) + in_words(found)


@pytest.mark.processes
def test_the_text_and_the_json_tell_versions_processors_backends_and_compiled_passes() -> None:
    text, plain = (CliRunner().invoke(app, ["env", *words]) for words in ([], ["--json", "-"]))
    assert (text.exit_code, plain.exit_code) == (0, 0)
    found = json.loads(plain.stdout)
    assert found["commhooks"]["version"] == commhooks.__version__
    torch_version = metadata.version("torch")  # torch.__version__ may name a build too
    assert found["packages"]["torch"] == torch_version
    assert {name for name in BACKENDS if found["backends"][name]} == {
        *filter(torch.distributed.is_backend_available, BACKENDS)
    }
    assert found["processor"]["usable_cores"] >= 1
    assert found["compiled_passes"] == str(compiled()).replace(f"{Path(commhooks.__file__).parent}/", "")
    for words in (torch_version, found["processor"]["name"], "gloo", found["compiled_passes"].split(": ")[1]):
        assert words in text.stdout


def test_versions_are_told_with_the_promise_the_trial_and_the_private_names_that_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = environment()["versions"]
    assert found["promise"].endswith("Python 3.11 to 3.13, PyTorch 2.6 to 2.15, FSDP2 2.13 to 2.15")
    has_fsdp2 = metadata.version("torch") in versions.FSDP2
    assert not any(has_fsdp2 or "sharded" not in file for file in found["missing"])
    monkeypatch.setattr(versions, "private_names", lambda: {"commhooks/a.py": ("torch:_gone", "torch:Tensor")})
    row = {"torch": "9.9.0", "python": "3.11.7", "date": "2026-11-27", "parts": {"a": [3, 1, 0], "b": [2, 0, 1]}}
    monkeypatch.setattr(versions, "tried", lambda torch, python: row)
    monkeypatch.setattr(torch, "__version__", "9.9.0+cpu")
    words = in_words(environment())
    assert "PyTorch 9.9.0+cpu is newer than promised: Python 3.11 to 3.13, PyTorch 2.6 to 2.15" in words
    assert "on 2026-11-27 with Python 3.11.7: 5 tests passed, 1 failed" in words
    assert "this PyTorch lacks torch:_gone (commhooks/a.py)" in words
    monkeypatch.setattr(versions, "tried", lambda torch, python: None)
    assert "no, see docs/versions.md for those that were" in in_words(environment())


@pytest.mark.processes
def test_the_json_goes_into_a_file_and_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["env", "--json", str(tmp_path / "env.json")]).exit_code == 0
    assert json.loads((tmp_path / "env.json").read_text())["format"] == 1
    ended = CliRunner().invoke(app, ["env", "--json", str(tmp_path / "missing" / "env.json")])
    assert ended.exit_code == 1 and "missing" in ended.stderr


def test_variables_that_may_hold_a_name_or_a_folder_are_only_said_to_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TOPO_FILE", "/home/lovelace/topology.xml")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lovelace0")
    monkeypatch.setenv("COMMHOOKS_FOLDER", "/home/lovelace")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("LOVELACES_TOKEN", "lovelace")
    found = environment()["variables"]
    names = ("NCCL_TOPO_FILE", "GLOO_SOCKET_IFNAME", "COMMHOOKS_FOLDER", "OMP_NUM_THREADS")
    assert [found.get(name, "not told") for name in names] == [None, None, None, "3"]
    assert "lovelace" not in told().lower()


def test_no_host_user_or_folder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "a-host-that-is-nowhere-else"
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(getpass, "getuser", lambda: name)
    monkeypatch.setattr("platform.node", lambda: name)
    monkeypatch.delenv("COMMHOOKS_COMPILED", raising=False)
    monkeypatch.setattr(library, "_warn", lambda reason: None)
    package = f"{Path(commhooks.__file__).parent}/"
    problem = (
        f"/lib/libm.so.6: version missing (required by /home/{name}/libx.so), {package}native/kernels.so is damaged"
    )
    monkeypatch.setattr(library, "opened", lambda path: problem)
    said = "libm.so.6: version missing (required by libx.so), native/kernels.so is damaged"
    assert environment()["compiled_passes"] == f"compiled passes: none, since {said}"
    assert package not in told() and "/home" not in told() and name not in told()


def test_a_torch_that_cannot_be_imported_is_told_with_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = environment()
    assert found["error"].startswith("import torch: ")
    assert "processor" not in found and "numpy" in in_words(found) and found["error"] in in_words(found)


def test_cuda_devices_are_told_by_kind_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(name="A GPU", major=9, minor=0, total_memory=80_000_000_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: device)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    found = environment()
    assert found["cuda"]["devices"] == [{"name": "A GPU", "capability": "9.0", "memory_bytes": 80_000_000_000}] * 2
    assert found["cuda"]["nccl"] == "2.27.3"
    assert "A GPU, 80.0 GB, compute capability 9.0" in in_words(found) and "2 devices" in in_words(found)


def test_the_commit_is_that_of_the_checkout_that_tracks_the_file(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        own = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(own, capture_output=True, text=True, check=True).stdout.strip()

    tracked, installed = tmp_path / "tracked.py", tmp_path / "site-packages.py"
    for file in (tracked, installed):
        file.write_text("1\n")
    assert commit_of_code(tmp_path / "before.py") is None
    git("init", "--quiet")
    git("add", tracked.name)
    git("commit", "--quiet", "--message", "one")
    assert commit_of_code(tracked) == git("rev-parse", "--short=12", "HEAD")
    assert commit_of_code(installed) is None, "an environment inside somebody's checkout"
    commit_of_code.cache_clear()
    tracked.write_text("2\n")
    assert commit_of_code(tracked) == git("rev-parse", "--short=12", "HEAD") + "+changes"
