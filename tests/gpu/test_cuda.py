"""Every compressor on CUDA tensors, over NCCL and over Gloo, beside the lockstep on the CPU."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import commhooks
from commhooks.experiments.commands.cli import app
from commhooks.experiments.runs import RunResult
from commhooks.wrappers.hierarchical import is_hierarchical
from tests import bounds
from tests.cases import CASES, Case
from tests.commhooks.mirrored import largest_error
from tests.commhooks.models import Given, Shape, gradients_of, wrap
from tests.commhooks.workers import Workers, largest, normal, zeros
from tests.gpu.late import late, very_late
from tests.virtual_device.device import is_installed
from tests.world import run_world

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPES: list[Shape] = [(30, 50), (50,), (40, 30), (), (60, 60), (3, 20, 16), (7,)]
STEPS = 4


def cases_over(backend: str) -> list[Case]:
    """Return the rows that do the same in any buckets; over NCCL there are no groups of some of the ranks."""
    return [
        case
        for case in CASES
        if not case.depends_on_buckets and not (backend == "nccl" and is_hierarchical(case.make()))
    ]


@pytest.mark.parametrize("kind", ["core", "torch"])
@pytest.mark.parametrize("policy", ["fifo", "fused"])
@pytest.mark.parametrize(("backend", "world_size"), [("nccl", 1), ("gloo", 2)])  # ranks share one device over Gloo
def test_every_case_on_cuda_is_what_it_is_in_lockstep(kind: str, policy: str, backend: str, world_size: int) -> None:
    arguments: dict[str, Any] = {"backend": backend, "timeout": 240.0, "check_exit": kind == "core"}
    for distances in run_world(_distances_to_lockstep, world_size, kind, policy, backend, **arguments):
        for case in cases_over(backend):
            if (
                not case.follows_scale
            ):  # the sign of a mean near zero is a matter of rounding, which devices do otherwise
                assert distances[case.name] < math.inf, case.name
            elif case.wire is None:
                assert distances[case.name] <= bounds.IN_FLOAT64, case.name
            elif not case.rank:  # what a wire rounds of factors is bounded by their conditioning alone
                assert distances[case.name] <= 2 * bounds.of_mean(world_size, case.wire), case.name


@pytest.mark.parametrize("kind", ["core", "torch"])
@pytest.mark.parametrize("guarded", [False, True])
def test_the_host_does_not_wait_for_the_device_in_a_hook_over_nccl(kind: str, guarded: bool) -> None:
    run_world(_synchronises_nowhere, 1, kind, guarded, backend="nccl", timeout=120.0, check_exit=kind == "core")


@pytest.mark.parametrize("residuals", ["fp32", "bf16", "host"])
def test_state_goes_from_a_gpu_to_the_cpu_and_back(residuals: str) -> None:
    run_world(_there_and_back, 1, residuals, backend="cpu:gloo,cuda:nccl", timeout=120.0)


@pytest.mark.parametrize("policy", ["fifo", "fused"])
def test_a_collective_that_takes_too_long_on_nccl_is_an_error_that_names_hook_timeout(policy: str) -> None:
    for text in run_world(_takes_too_long, 1, policy, backend="nccl", timeout=120.0, check_exit=False):
        assert "a collective was not done after hook_timeout=0.5 s." in text
        assert "parameters weights." in text


def test_with_a_hook_timeout_that_is_kept_nothing_else_changes() -> None:
    run_world(_takes_not_too_long, 1, backend="nccl", timeout=120.0)


@pytest.mark.skipif(is_installed(), reason="tests/virtual_device/test_commands.py has whole commands on that device")
def test_a_whole_comparison_trains_on_cuda(tmp_path: Path) -> None:
    hooks, found = ("all-reduce", "powersgd:rank=2", "torch.fp16", "diloco:every=2"), {}
    asked = ["--task", "digits:size=small", "--steps", "6", "--go-on", "1", "--link", "unlimited", "--quiet"]
    for device in ("cpu", "cuda"):
        words = [*asked, *(word for hook in hooks for word in ("--hook", hook)), "--device", device]
        ended = CliRunner().invoke(app, ["compare", *words, "--out", str(tmp_path / device)])
        assert ended.exit_code == 0, ended.output
        results = [RunResult.read(path) for path in (tmp_path / device / "results").glob("*.json")]
        found[device] = {one.settings.hook.label: one for one in results}
    for hook, ours in found["cuda"].items():
        theirs = [step.loss for step in found["cpu"][hook].steps]
        assert [step.loss for step in ours.steps] == pytest.approx(theirs, rel=0.02), hook
        assert ours.replicas_identical and ours.peak_memory is not None
        assert ours.peak_memory > 4 * ours.parameters
        assert ours.machine["backend"] == ("nccl" if torch.cuda.device_count() > 1 else "gloo")


def _given(kind: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return wrap(kind, Given(*SHAPES).to("cuda", dtype), bucket_cap_mb=0.004)


def _distances_to_lockstep(rank: int, kind: str, policy: Any, backend: str) -> dict[str, float]:
    """Return the largest distance of each case's means from those of the lockstep on the CPU, in float64.

    Relative to the largest element of any rank's gradients.
    """
    worst = {}
    world_size = torch.distributed.get_world_size()
    for case in cases_over(backend):
        model, parameters = _given(kind, torch.float64), zeros(*SHAPES, dtype=torch.float64)
        attachment = commhooks.attach(model, case.make(), policy=policy)
        names = [f"weights.{i}" for i in range(len(SHAPES))]
        workers = Workers(case.make(), world_size, parameters, names=names, policy=policy)
        worst[case.name] = 0.0
        for step in range(STEPS):
            gradients = normal(parameters, world_size, seed=step)
            model.zero_grad()
            model(*[gradient.cuda() for gradient in gradients[rank]]).backward()
            ours, theirs = [gradient.cpu() for gradient in gradients_of(model)], workers.step(gradients)[rank]
            terms = largest(*(gradient for own in gradients for gradient in own))
            worst[case.name] = max(worst[case.name], largest_error(ours, theirs) / terms)
        assert attachment.statistics().steps == STEPS
        attachment.close()
    return worst


def _there_and_back(rank: int, residuals: Any) -> None:
    """Save on a GPU, load on the CPU, save there, and load on a GPU: the state is the same."""
    first = commhooks.attach(model := _given("core"), "powersgd", residuals=residuals)
    for step in range(3):
        model(*[gradient.cuda() for gradient in normal(zeros(*SHAPES), 1, seed=step)[0]]).backward()
    state = first.state_dict()
    second = commhooks.attach(wrap("core", Given(*SHAPES)), "powersgd", residuals=residuals)
    second.load_state_dict(state)
    third = commhooks.attach(_given("core"), "powersgd", residuals=residuals)
    third.load_state_dict(second.state_dict())
    again = third.state_dict()
    for part in ("local", "replicated"):
        ours, theirs = (one[part]["rank0"] if part == "local" else one[part] for one in (again, state))
        assert ours.keys() == theirs.keys() and ours
        for name, kept in ours.items():
            for entry, tensor in kept.items():
                assert tensor.is_cuda is not (residuals == "host" and entry == "residual")
                assert torch.equal(tensor, theirs[name][entry])


def _synchronises_nowhere(rank: int, kind: str, guarded: bool) -> None:
    """Let PyTorch raise wherever the host would wait for the device, once state and streams are there."""
    model = wrap(kind, Given(*SHAPES).cuda(), bucket_cap_mb=0.004, static_graph=guarded)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))
    if guarded:  # a static graph may have unused parameters
        commhooks.attach(model, "powersgd", scaler=scaler, atomic=True)
    else:
        commhooks.attach(model, "powersgd", policy="fifo")
    for step in range(6):
        gradients = [gradient.cuda() for gradient in normal(zeros(*SHAPES), 1, seed=step)[0]]
        loss = model(*gradients)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        loss.backward()
        torch.cuda.set_sync_debug_mode("default")


def _takes_too_long(rank: int, policy: Any) -> str:
    model = _given("core")
    gradients = [gradient.cuda() for gradient in normal(zeros(*SHAPES), 1, seed=0)[0]]
    commhooks.attach(model, "powersgd", policy=policy, hook_timeout=0.5, wrap_communicator=very_late)
    torch.cuda.synchronize()
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        model(*gradients).backward()
    assert time.monotonic() - begun < 3, "a collective takes longer than that"
    return str(caught.value)


def _takes_not_too_long(rank: int) -> None:
    watched, plain = _given("core"), _given("core")
    commhooks.attach(watched, "powersgd", hook_timeout=30.0, wrap_communicator=late)
    commhooks.attach(plain, "powersgd")
    for step in range(STEPS):
        gradients = [gradient.cuda() for gradient in normal(zeros(*SHAPES), 1, seed=step)[0]]
        for model in (watched, plain):
            model.zero_grad()
            model(*gradients).backward()
        for ours, theirs in zip(gradients_of(watched), gradients_of(plain), strict=True):
            assert torch.equal(ours, theirs)
