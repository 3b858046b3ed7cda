"""Whole commands on the virtual device: ranks that they spawn have it too, and compute what they do on the CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commhooks.experiments.commands.cli import app
from commhooks.experiments.runs import RunResult
from tests.virtual_device import ranks, startup

pytestmark = [pytest.mark.virtual_device, pytest.mark.timeout(200)]

HOOKS = ("all-reduce", "int8", "torch.fp16", "diloco:compressor=int4,every=2")
COMPARE = ["compare", "--task", "digits:size=tiny", "--steps", "4", "--go-on", "1", "--quiet"]
ROOT = Path(__file__).parents[2]


def give(monkeypatch: pytest.MonkeyPatch, run: str | None, *words: str) -> str:
    """Give a command in this process, whose ranks have the device under a schedule; None: they do not."""
    folders = [str(Path(startup.__file__).parent)] if run is not None else []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*folders, str(ROOT)]))
    monkeypatch.setenv(ranks.RUN, run or "")
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def compared(monkeypatch: pytest.MonkeyPatch, run: str | None, out: Path, *words: str) -> Mapping[str, RunResult]:
    asked = [word for hook in HOOKS for word in ("--hook", hook)]
    give(monkeypatch, run, *COMPARE, *asked, *words, "--out", str(out))
    found = [RunResult.read(path) for path in (out / "results").glob("*.json")]
    return {one.settings.hook.label: one for one in found}


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, RunResult]:
    with pytest.MonkeyPatch.context() as patch:
        return compared(patch, None, tmp_path_factory.mktemp("cpu"), "--device", "cpu")


@pytest.mark.parametrize(
    ("run", "link", "backend", "said"),
    [
        ("late", "unlimited", "nccl", "on virtual device, over NCCL."),
        ("random:1", "1Gbit/s,latency=1ms", "gloo", "on virtual device, over Gloo: the emulation"),
    ],
)
def test_a_comparison_on_a_device_trains_as_on_the_cpu(
    run: str,
    link: str,
    backend: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_cpu: Mapping[str, RunResult],
) -> None:
    found = compared(monkeypatch, run, tmp_path, "--link", link)  # --device auto
    assert found.keys() == on_cpu.keys() == set(HOOKS)
    for hook, ours in found.items():
        theirs = on_cpu[hook]
        assert ours.settings.device == "cuda" and theirs.settings.device == "cpu"
        assert [step.loss for step in ours.steps] == [step.loss for step in theirs.steps], hook
        assert [step.moved_bytes for step in ours.steps] == [step.moved_bytes for step in theirs.steps], hook
        assert ours.evaluations == theirs.evaluations and ours.replicas_identical, hook
        assert (ours.machine["device"], ours.machine["backend"]) == ("virtual device", backend)
        assert ours.peak_memory is not None and ours.peak_memory > 4 * 2 * ours.parameters  # gradients too
        assert theirs.peak_memory is None and theirs.machine["device"] == "CPU"
    if backend == "gloo":  # the emulated link holds steps back on the device as it does on the CPU
        assert min(step.seconds for step in found["all-reduce"].steps) > 2e-3
    assert said in (tmp_path / "report.html").read_text()


def test_a_plan_on_a_device_is_profiled_and_probed_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["plan", "--task", "digits:size=tiny", "--hook", "fp16", "--seconds", "10"]
    give(monkeypatch, "late", *words, "--json", str(tmp_path / "plan.json"))
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["probe"]["backend"] == "nccl"
    parts = found["profile"]["noop"]
    assert parts["forward"] > 0 and parts["backward"] > 0 and parts["optimizer"] > 0
    assert found["profile"]["hooks"].keys() == {"noop", "allreduce", "fp16"}
