"""What the tests of hooks run on every rank. Module-level functions: they are pickled by name."""

from __future__ import annotations

import gc
import hashlib
import math
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as stock

import commhooks
from tests.cases import CASES
from tests.commhooks.models import Given, Shape, gradients_of, wrap
from tests.commhooks.workers import Workers, normal, zeros

SHAPES: list[Shape] = [(30, 50), (50,), (40, 30), (), (4, 3, 5, 5), (60, 60), (7,), (60, 60)]
TINY_BUCKETS = {"bucket_cap_mb": 0.004}


def given(kind: str, **settings: Any) -> nn.Module:
    return wrap(kind, Given(*SHAPES), **(TINY_BUCKETS | settings))


def backward(model: nn.Module, gradients: list[Tensor]) -> list[Tensor]:
    model.zero_grad()
    model(*gradients).backward()
    return gradients_of(model)


def largest_error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(ours, theirs, strict=True))


def default_hooks_against_pytorchs(rank: int, kind: str) -> dict[str, float]:
    """Return the largest distance of each hook's mean from that of PyTorch's all-reduce hook, over 5 steps."""
    reference = given("torch")
    reference.register_comm_hook(None, stock.allreduce_hook)  # type: ignore[operator]
    hooks: dict[str, tuple[Any, Callable[..., Any]]] = {
        "allreduce": (None, commhooks.allreduce_hook),
        "fp16": (dist.group.WORLD, commhooks.fp16_compress_hook),
        "bf16": (None, commhooks.bf16_compress_hook),
        "fp16 of allreduce": (None, commhooks.fp16_compress_wrapper(commhooks.allreduce_hook)),
        "bf16 of allreduce": (None, commhooks.bf16_compress_wrapper(commhooks.allreduce_hook)),
        "fp16 of PyTorch's allreduce": (None, commhooks.fp16_compress_wrapper(stock.allreduce_hook)),
        "bf16 of PyTorch's allreduce": (None, commhooks.bf16_compress_wrapper(stock.allreduce_hook)),
        "dense PowerSGD": (commhooks.PowerSGDState(None), commhooks.powerSGD_hook),
        "fp16 of dense PowerSGD": (
            commhooks.PowerSGDState(None),
            commhooks.fp16_compress_wrapper(commhooks.powerSGD_hook),
        ),
    }
    models = {name: given(kind) for name in hooks}
    for name, (state, hook) in hooks.items():
        models[name].register_comm_hook(state, hook)  # type: ignore[operator]
    worst = dict.fromkeys(hooks, 0.0)
    for step in range(5):
        gradients = normal(zeros(*SHAPES), 2, seed=step)[rank]
        expected = backward(reference, gradients)
        for name, model in models.items():
            assert all(g.dtype == torch.float32 for g in gradients_of(model))
            worst[name] = max(worst[name], largest_error(backward(model, gradients), expected))
    return worst


def powersgd_hook_with_fp16_on_the_wire(rank: int, kind: str) -> tuple[int, set[torch.dtype]]:
    """Return the payload bytes of 3 steps of the wrapped hook, and the dtypes of what it remembers."""
    state = commhooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=0)
    model = wrap(kind, Given((40, 60), (9,)))
    hook = commhooks.fp16_compress_wrapper(commhooks.powerSGD_hook)
    model.register_comm_hook(state, hook)  # type: ignore[operator]
    for step in range(3):
        model(*normal(zeros((40, 60), (9,)), 2, seed=step)[rank]).backward()
    assert state.parameters is not None
    kept = [state.parameters.of(parameter) for parameter in model.parameters()]
    dtypes = {tensor.dtype for one in kept for tensor in [*one.local.values(), *one.replicated.values()]}
    return state.statistics().payload_bytes, dtypes


def every_case_like_lockstep(rank: int, kind: str) -> list[str]:
    """Run every case over Gloo with several buckets and ranks that dawdle; name what differs from lockstep."""
    differ = []
    dawdling = random.Random(rank)
    for case in CASES:
        model = given(kind)
        attachment = commhooks.attach(model, case.make())
        parameters = zeros(*SHAPES)
        workers = Workers(case.make(), 2, parameters, names=[f"weights.{i}" for i in range(len(SHAPES))])
        for step in range(4):
            gradients = normal(parameters, 2, seed=step)
            time.sleep(dawdling.random() * 0.02)
            ours = backward(model, gradients[rank])
            expected = workers.step(gradients)[rank]
            if not all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)):
                differ.append(f"{case.name}, step {step}: {largest_error(ours, expected)}")
        counted, simulated = attachment.statistics(), workers.traffic
        assert counted.steps == 4 and counted.buckets > 8, counted
        assert counted.payload_elements == simulated.payload_elements, (case.name, counted, simulated)
        assert counted.gradient_bytes == 4 * 4 * sum(p.numel() for p in parameters)
        assert sum(kind.payload_bytes for kind in counted.by_kind.values()) == counted.payload_bytes
        assert attachment.last_step().buckets * 4 >= counted.buckets - 3 and attachment.last_step().steps == 1
        attachment.detach()
    return differ


def replicas_at_every_step(rank: int, kind: str, bucket_cap_mb: float, name: str, steps: int) -> str:
    """Train on ranks that dawdle; return a digest of every gradient of every step."""
    shapes = SHAPES * 5
    model = wrap(kind, Given(*shapes), bucket_cap_mb=bucket_cap_mb)
    compressor = next(case for case in CASES if case.name == name).make()
    commhooks.attach(model, compressor)
    dawdling, digest = random.Random(rank), hashlib.sha256()
    gradients = normal(zeros(*shapes), dist.get_world_size(), seed=0)[rank]
    for step in range(steps):
        if dawdling.random() < 0.2:
            time.sleep(dawdling.random() * 0.01)
        for gradient in backward(model, [g * math.cos(step) for g in gradients]):
            digest.update(gradient.numpy().tobytes())
    return digest.hexdigest()


def attach_detach_attach(rank: int, kind: str) -> None:
    model = given(kind)
    gradients = normal(zeros(*SHAPES), 2, seed=0)[rank]
    dense = backward(model, gradients) if kind == "core" else None
    first = commhooks.attach(model, "fp16")
    with_fp16 = backward(model, gradients)
    _expect(commhooks.AttachError, "attached to this model already; detach it first", commhooks.attach, model, "bf16")
    first.detach()
    first.detach()
    plain = backward(model, gradients)
    second = commhooks.attach(model, "bf16")
    with_bf16 = backward(model, gradients)
    assert first.statistics().steps == 1 and second.statistics().steps == 1
    assert dense is None or largest_error(dense, plain) == 0
    assert 0 < largest_error(with_fp16, plain) < 5e-3 < largest_error(with_bf16, plain) + 5e-3
    second.detach()


def ranks_that_disagree(rank: int) -> str:
    model = given("torch")
    try:
        commhooks.attach(model, commhooks.PowerSGD(rank=1 + rank))
    except commhooks.AttachError as error:
        return str(error)
    return "no error"


def _expect(kind: type[Exception], text: str, function: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(kind, match=text):
        function(*arguments)


class AllReducesInBackward(torch.autograd.Function):
    """Issue a collective on the default group from within the backward pass, as a user's function may."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        witness = torch.full((1000,), float(dist.get_rank()))
        dist.all_reduce(witness)
        assert bool((witness == sum(range(dist.get_world_size()))).all())
        return gradient.clone()


class Talking(Given):
    def forward(self, *gradients: Tensor) -> Tensor:
        terms = [
            (AllReducesInBackward.apply(weight) * gradient).sum()  # type: ignore[no-untyped-call]
            for weight, gradient in zip(self.weights, gradients, strict=True)
        ]
        return torch.stack(terms).sum()


def company(rank: int, kind: str, steps: int) -> int:
    """Train two models in one backward pass, each with its PowerSGD, while autograd functions all-reduce too."""
    models = [wrap(kind, Talking(*SHAPES), **TINY_BUCKETS) for _ in range(2)]
    names = [f"weights.{i}" for i in range(len(SHAPES))]
    for model in models:
        commhooks.attach(model, commhooks.PowerSGD(rank=2))
    workers = [Workers(commhooks.PowerSGD(rank=2), 2, zeros(*SHAPES), names=names) for _ in models]
    same = 0
    for step in range(steps):
        gradients = [normal(zeros(*SHAPES), 2, seed=2 * step + i) for i in range(2)]
        for model in models:
            model.zero_grad()
        losses = [model(*given[rank]) for model, given in zip(models, gradients, strict=True)]
        torch.stack(losses).sum().backward()
        for model, simulated, given_ in zip(models, workers, gradients, strict=True):
            expected = simulated.step(given_)[rank]
            same += all(torch.equal(a, b) for a, b in zip(gradients_of(model), expected, strict=True))
    return same


def subgroups(rank: int, kind: str) -> None:
    """Two pairs of ranks train their own models side by side, with stateless and stateful hooks."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[rank // 2]
    gradients = normal(zeros(*SHAPES), 4, seed=0)
    expected = [(gradients[rank // 2 * 2][i] + gradients[rank // 2 * 2 + 1][i]) / 2 for i in range(len(SHAPES))]
    model = given(kind, process_group=group)
    model.register_comm_hook(group, commhooks.allreduce_hook)  # type: ignore[operator]
    other = given(kind, process_group=group)
    attachment = commhooks.attach(other, "powersgd")
    for _ in range(3):
        assert largest_error(backward(model, gradients[rank]), expected) < 1e-6
        backward(other, gradients[rank])
    assert attachment.statistics().steps == 3


def groups_come_and_go(rank: int) -> None:
    """Destroy the process group and make another, three times, with the stateless hooks."""
    store = dist.distributed_c10d._get_default_store()
    gradients = normal(zeros(*SHAPES), 2, seed=0)
    expected = [(a + b) / 2 for a, b in zip(gradients[0], gradients[1], strict=True)]
    for generation in range(3):
        model = given("torch")
        model.register_comm_hook(None, commhooks.allreduce_hook)  # type: ignore[operator]
        for _ in range(2):
            assert largest_error(backward(model, gradients[rank]), expected) < 1e-6
        del model
        gc.collect()
        if generation < 2:
            dist.destroy_process_group()
            again = PrefixStore(f"generation {generation}", store)
            dist.init_process_group("gloo", store=again, rank=rank, world_size=2)


class Odd(nn.Module):
    """Have a 0-dim, an empty, a channels-last, a frozen, a tied, a sparse and a sometimes unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.conv = nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.sometimes = nn.Linear(16, 16)
        self.table = nn.Embedding(50, 16, sparse=True)
        self.head = nn.Linear(16, 40)

    def forward(self, images: Tensor, words: Tensor, use: bool) -> Tensor:
        hidden = self.conv(images).mean((2, 3)) * self.scale + self.table(words)
        hidden = self.second(torch.relu(self.first(hidden))) + self.empty.sum()
        if use:
            hidden = self.sometimes(hidden)
        scores: Tensor = self.head(hidden)
        return scores


def odd_parameters(rank: int, kind: str) -> dict[str, list[float]]:
    """Train the odd model with each compressor; return the losses."""
    return {name: _odd_parameters_with(rank, kind, name) for name in ("all-reduce", "fp16", "powersgd")}


def _odd_parameters_with(rank: int, kind: str, name: str) -> list[float]:
    torch.manual_seed(0)
    module = Odd()
    model = wrap(kind, module, find_unused_parameters=True, bucket_cap_mb=0.002)
    commhooks.attach(model, name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    torch.manual_seed(rank)
    images, words = torch.randn(32, 3, 6, 6), torch.randint(0, 50, (32,))
    labels = torch.randint(0, 40, (32,))
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images, words, use=(step + rank) % 3 == 0), labels)
        loss.backward()
        sparse = module.table.weight.grad
        assert sparse is not None and sparse.is_sparse
        optimizer.step()
        losses.append(loss.item())
        for parameter in module.parameters():
            copies = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            dist.all_gather(copies, parameter.detach().contiguous())
            assert all(torch.equal(copy, copies[0]) for copy in copies)
    return losses
