"""What `commhooks env` tells and must not tell, and the choice of a device and a backend, which needs no device."""

from __future__ import annotations

import getpass
import json
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import commhooks
from commhooks.experiments.commands.cli import app
from commhooks.experiments.commit import commit_of_code
from commhooks.experiments.devices import NCCL, backend_for, chosen
from commhooks.experiments.environment import BACKENDS, environment, in_words
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.sweeps.yaml_file import read_sweep
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


GPUS: dict[str, Any] = {"is_available": lambda: True, "device_count": lambda: 2}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error(tmp_path: Path) -> None:
    assert chosen("auto") == chosen(None) == "cpu"
    with pytest.raises(
        ValueError, match=r"device 'cuda': there is no GPU for use here.*leave --device out to train on"
    ):
        chosen("cuda")
    with pytest.raises(ValueError, match="device 'gpu' is not known: expected cpu, cuda or auto"):
        chosen("gpu")
    (file := tmp_path / "sweep.yaml").write_text("task: digits:size=tiny\nsteps: 2\ndevice: auto\n")
    assert [run.device for run in read_sweep(file).runs] == ["cpu"]
    file.write_text("task: digits:size=tiny\nsteps: 2\ndevice: [cpu, cuda]\n")
    with pytest.raises(ValueError, match="there is no GPU for use here"):
        read_sweep(file)
    assert [run.device for run in read_sweep(file, "cpu").runs] == ["cpu"]  # the command's replaces the file's


@pytest.mark.parametrize(
    ("device", "link", "ranks", "backend"),
    [
        ("cuda", "unlimited", 2, NCCL),
        ("cuda", "real", 2, NCCL),
        ("cuda", "real", 3, "gloo"),
        ("cuda", "1Gbit/s", 2, "gloo"),
        ("cuda", "latency=1ms", 2, "gloo"),
        ("cuda", "hosts:1Gbit/s", 2, "gloo"),
        ("cpu", "real", 2, "gloo"),
    ],
)
def test_nccl_is_for_ranks_with_a_gpu_of_their_own_and_links_that_nobody_slows(
    device: str, link: str, ranks: int, backend: str
) -> None:
    with mock.patch.multiple(torch.cuda, **GPUS):
        assert backend_for(device, LinkSettings.parse(link), ranks) == backend
