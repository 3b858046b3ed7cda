"""Every compressor on CUDA tensors, over NCCL and over Gloo, beside the lockstep on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import commhooks
from tests.cases import CASES
from tests.commhooks.models import Given, Shape, gradients_of, wrap
from tests.commhooks.workers import Workers, normal, zeros
from tests.world import run_world

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPES: list[Shape] = [(30, 50), (50,), (40, 30), (), (60, 60), (7,)]
STEPS = 4
EVERY = [case for case in CASES if not case.depends_on_buckets]


@pytest.mark.parametrize("kind", ["core", "torch"])
@pytest.mark.parametrize("policy", ["fifo", "fused"])
@pytest.mark.parametrize(("backend", "world_size"), [("nccl", 1), ("gloo", 2)])  # ranks share one device over Gloo
def test_every_case_on_cuda_is_what_it_is_in_lockstep(kind: str, policy: str, backend: str, world_size: int) -> None:
    arguments: dict[str, Any] = {"backend": backend, "timeout": 240.0, "check_exit": kind == "core"}
    for distances in run_world(_distances_to_lockstep, world_size, kind, policy, **arguments):
        for case in EVERY:
            # Another order of summation at every step; four steps, and a first random basis, multiply its rounding.
            assert distances[case.name] < 1000 * max(case.tolerance, 1e-6), case.name


@pytest.mark.parametrize("kind", ["core", "torch"])
@pytest.mark.parametrize("guarded", [False, True])
def test_the_host_does_not_wait_for_the_device_in_a_hook_over_nccl(kind: str, guarded: bool) -> None:
    run_world(_synchronises_nowhere, 1, kind, guarded, backend="nccl", timeout=120.0, check_exit=kind == "core")


@pytest.mark.parametrize("residuals", ["fp32", "bf16", "host"])
def test_state_goes_from_a_gpu_to_the_cpu_and_back(residuals: str) -> None:
    run_world(_there_and_back, 1, residuals, backend="cpu:gloo,cuda:nccl", timeout=120.0)


def _given(kind: str) -> torch.nn.Module:
    return wrap(kind, Given(*SHAPES).cuda(), bucket_cap_mb=0.004)


def _distances_to_lockstep(rank: int, kind: str, policy: str) -> dict[str, float]:
    """Return the largest relative distance of each case's means from those of the lockstep on the CPU."""
    worst = {}
    world_size = torch.distributed.get_world_size()
    for case in EVERY:
        model, parameters = _given(kind), zeros(*SHAPES)
        attachment = commhooks.attach(model, case.make(), policy=policy)
        names = [f"weights.{i}" for i in range(len(SHAPES))]
        workers = Workers(case.make(), world_size, parameters, names=names, policy=policy)
        worst[case.name] = 0.0
        for step in range(STEPS):
            gradients = normal(parameters, world_size, seed=step)
            model.zero_grad()
            model(*[gradient.cuda() for gradient in gradients[rank]]).backward()
            for ours, theirs in zip(gradients_of(model), workers.step(gradients)[rank], strict=True):
                distance = float((ours.cpu() - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
                worst[case.name] = max(worst[case.name], distance)
        assert attachment.statistics().steps == STEPS
        attachment.detach()
    return worst


def _there_and_back(rank: int, residuals: str) -> None:
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
