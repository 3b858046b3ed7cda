"""`commhooks compare` from end to end, on a small model: what it writes, that it goes on, repeats itself, and ends."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from commhooks.experiments.commands.cli import app
from commhooks.experiments.results.summary import steps_to, total_seconds
from commhooks.experiments.runs import RunResult, RunSettings
from commhooks.experiments.specs import Spec
from tests.experiments.odd_task import ELEMENTS
from tests.experiments.on_two_ranks import PATIENCE, train_on_two_ranks
from tests.tiers import THOROUGH
from tests.waiting import has_ended, until

pytestmark = [pytest.mark.timeout(500), pytest.mark.processes]  # the command starts ranks

STEPS = 12
HOOKS = ("all-reduce", "fp16", "powersgd:rank=1,start_after=2")
ODD = Spec.parse(f"{Path(__file__).parent / 'odd_task.py'}:task", "task")
ODD_HOOKS = (
    "all-reduce",
    "torch.none",
    "powersgd:rank=2,start_after=2",
    "torch.powersgd:matrix_approximation_rank=2,min_compression_rate=1,start_powerSGD_iter=2",
    "powersgd:policy=fused,rank=2,start_after=2",
    "fp16",
)
COMPARE = [sys.executable, "-m", "commhooks.experiments", "compare", "--task", "digits:size=small"]
LINK = ["--link", "10Mbit/s"]
ASKED = [*LINK, "--steps", str(STEPS)]
ALL_HOOKS = [word for hook in HOOKS for word in ("--hook", hook)]
HALF_WRITTEN = '{\n "format": 2,\n "par'  # by a process that was killed


def settings(hook: str, ddp: str = "core") -> RunSettings:
    return RunSettings.from_dict(
        {"task": "digits:size=small", "hook": hook, "steps": STEPS, "ddp": ddp, "link": "10Mbit/s"}
    )


def compare(out: Path, *words: str) -> str:
    """Give the command, in this process, and return what it printed."""
    ended = CliRunner().invoke(app, [*COMPARE[3:], *ASKED, *words, "--out", str(out)])
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def kept_in(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "results").iterdir()}


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes], str]:
    """Return a comparison's folder, the result that it had at first, and what the command that went on printed."""
    out = tmp_path_factory.mktemp("compare")
    compare(out, "--hook", HOOKS[0])
    kept = kept_in(out)
    (out / "results" / "digits.json.part").write_text(HALF_WRITTEN)
    return out, kept, compare(out, *ALL_HOOKS)


@pytest.fixture(scope="module")
def results(continued: tuple[Path, dict[str, bytes], str]) -> dict[str, RunResult]:
    found = [RunResult.read(path) for path in (continued[0] / "results").glob("*.json")]
    return {result.settings.hook.label: result for result in found}


@pytest.fixture(scope="module")
def made() -> list[RunResult]:
    """Return runs from Python: fp16 again, all-reduce and PowerSGD on PyTorch's DDP, and an odd task."""
    runs = [settings(HOOKS[1]), *(settings(hook, ddp="torch") for hook in (HOOKS[0], HOOKS[2]))]
    runs += [dataclasses.replace(settings(hook), task=ODD, steps=6, evaluate_every=2) for hook in ODD_HOOKS]
    return train_on_two_ranks(runs)


@pytest.fixture(scope="module")
def odd(made: list[RunResult]) -> dict[str, RunResult]:
    return dict(zip(ODD_HOOKS, made[3:], strict=True))


def test_a_comparison_goes_on_with_what_it_has(continued: tuple[Path, dict[str, bytes], str]) -> None:
    out, kept, printed = continued
    assert f"{len(kept)} of {len(HOOKS)} runs are finished already" in printed
    now, page = kept_in(out), (out / "report.html").read_text()
    assert len(now) == len(HOOKS)  # and nothing half written
    assert {name: now[name] for name in kept} == kept
    assert not list(out.glob("*.lock")), "the lock is of the process"
    assert all(hook in page and hook.partition(":")[0] in printed for hook in HOOKS)


def losses(result: RunResult) -> list[float]:
    """Return the training losses of the steps asked for; the runs of `compare` may have gone on after these."""
    return [step.loss for step in result.asked_steps]


def test_a_hook_with_faster_steps_goes_on_until_it_has_the_target_or_the_baselines_time(
    results: dict[str, RunResult],
) -> None:
    dense, *others = (results[hook] for hook in HOOKS)
    seconds = total_seconds(dense.steps)
    assert dense.goal is None and len(dense.steps) == STEPS
    for other in others:
        assert other.goal is not None and other.goal.seconds == seconds and other.goal.loss is not None
        reached = steps_to(other.goal.loss, other.steps)
        assert len(other.steps) >= STEPS
        if len(other.steps) > STEPS:  # and not a step too many
            assert reached in {None, len(other.steps)} and total_seconds(other.steps[:-1]) < seconds
        assert reached or total_seconds(other.steps) >= seconds or len(other.steps) == 10 * STEPS
        assert other.evaluations[-1].step == len(other.steps) and other.replicas_identical


def test_the_parts_of_every_step_add_up_to_it(results: dict[str, RunResult]) -> None:
    for result in results.values():
        for step in result.steps:
            assert step.compute + step.compression + step.waiting == pytest.approx(step.seconds, abs=1e-6)
            assert min(step.compute, step.compression, step.waiting) > -1e-6


def test_bytes_are_those_that_the_hooks_promise(results: dict[str, RunResult]) -> None:
    dense, half, low_rank = (results[hook] for hook in HOOKS)
    gradients = 4 * dense.parameters
    assert [step.moved_bytes for step in dense.steps] == [gradients] * STEPS  # two ranks: a ring moves all of it once
    assert [step.moved_bytes for step in half.asked_steps] == [gradients // 2] * STEPS
    moved = [step.moved_bytes for step in low_rank.asked_steps]
    assert moved[:2] == [gradients] * 2  # start_after
    assert max(moved[2:]) < gradients / 5
    assert {step.dense_bytes for result in results.values() for step in result.steps} == {gradients}


def test_the_same_seed_gives_the_same_losses_bit_for_bit_on_pytorchs_ddp_too(
    results: dict[str, RunResult], made: list[RunResult]
) -> None:
    for hook, result in zip((HOOKS[1], HOOKS[0], HOOKS[2]), made, strict=False):
        assert losses(result) == losses(results[hook])


def test_pytorchs_hooks_move_the_bytes_of_ours_and_learn_the_same(odd: dict[str, RunResult]) -> None:
    assert {step.gradient_bytes for result in odd.values() for step in result.steps} == {4 * ELEMENTS}
    dense, none, ours, theirs = (odd[hook] for hook in ODD_HOOKS[:4])
    assert losses(dense) == losses(none)  # dropout and the other random numbers included
    for one, other in ((dense, none), (ours, theirs)):
        assert [step.payload_bytes for step in one.steps] == [step.payload_bytes for step in other.steps]
        assert [step.moved_bytes for step in one.steps] == [step.moved_bytes for step in other.steps]
    assert ours.steps[-1].payload_bytes < ours.steps[0].payload_bytes / 2


def test_a_probe_finds_the_error_that_a_hook_makes(odd: dict[str, RunResult]) -> None:
    for result in odd.values():
        assert [probe.step for probe in result.probes] == [2, 4, 6]
        assert [step.step for step in result.steps if step.probed] == [2, 4, 6]
        assert all(sum(layer.elements for layer in probe.layers) == ELEMENTS for probe in result.probes)
        assert (result.probes[-1].residual is not None) == (result.settings.hook.name == "powersgd")
    exact, half, low_rank = (odd[hook].probes[-1] for hook in (ODD_HOOKS[1], "fp16", ODD_HOOKS[2]))
    assert (exact.error, {layer.error for layer in exact.layers}) == (0, {0.0})  # two ranks: a sum has no order
    assert 0 < half.error < 2**-10  # two roundings of half a unit in the eleventh place
    errors = {layer.name: layer.error for layer in low_rank.layers}
    assert errors["norm.weight"] == 0 < 0.1 < errors["middle.weight"]  # vectors are sent whole
    residuals = {layer.name: layer.residual for layer in low_rank.layers}
    assert (residuals["norm.weight"] or 0) == 0 < (residuals["middle.weight"] or 0)


@contextmanager
def training(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Start a comparison that would take long, and give it with its ranks once they train."""
    words = f"--hook all-reduce --steps 100000 --rate 100Mbit/s --out {tmp_path / 'out'}".split()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [*COMPARE, *words], stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    ) as started:
        try:
            deadline = time.monotonic() + PATIENCE
            ranks: list[psutil.Process] = []
            # The store, and the other rank.
            while len(ranks) < 2 or min(len(rank.net_connections()) for rank in ranks) < 2:
                assert time.monotonic() < deadline, "the ranks did not start"
                assert started.poll() is None
                time.sleep(0.2)
                children = psutil.Process(started.pid).children()
                ranks = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
            yield started, ranks
        finally:
            started.kill()


@THOROUGH
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    with training(tmp_path) as (started, ranks):
        os.killpg(started.pid, signal.SIGINT)  # as a terminal does: the ranks get it too
        assert started.wait(PATIENCE) == 130
        assert started.stderr is not None
        said = started.stderr.read()
        assert "0 of 1 runs are finished" in said
        assert "stopped; the ranks are ended" in said
        assert until(lambda: all(has_ended(rank.pid) for rank in ranks))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
