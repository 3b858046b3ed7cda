"""Hooks beside other users of the process group: other models, and the user's own collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks.default_hooks import quantization_perchannel_hook, quantization_pertensor_hook
from tests.commhooks.mirrored import SHAPES, TINY_BUCKETS, Mirrored, backward, given
from tests.commhooks.models import Given, gradients_of, wrap
from tests.commhooks.workers import normal, zeros
from tests.ddp_core.facts import BOTH_DDPS, Facts
from tests.world import run_world

facts = Facts(kinds=BOTH_DDPS)


class AllReducesInBackward(torch.autograd.Function):
    """Issue a collective on the default group from within the backward pass, as a user's function may."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        sum_over_ranks()
        return gradient.clone()


def sum_over_ranks() -> None:
    """All-reduce on the default group, and see that nobody else's collective came in between."""
    witness = torch.full((1000,), float(dist.get_rank()))
    dist.all_reduce(witness)
    assert bool((witness == sum(range(dist.get_world_size()))).all())


class Talking(Given):
    """All-reduce once for each parameter in every backward pass."""

    def forward(self, *gradients: Tensor) -> Tensor:
        terms = [
            (AllReducesInBackward.apply(weight) * gradient).sum()  # type: ignore[no-untyped-call]
            for weight, gradient in zip(self.weights, gradients, strict=True)
        ]
        return torch.stack(terms).sum()


def company(rank: int, kind: str, policy: str, steps: int, groups: Sequence[Sequence[int]]) -> None:
    """Train two models in one backward pass, each with its PowerSGD, while autograd functions all-reduce too.

    Each of `groups`, pairs of ranks, has its own models; without any, all ranks share theirs. A rank in no group only
    takes part in the all-reduces. Every gradient is, bit for bit, what it is in lockstep.
    """
    made = [dist.new_group(list(members)) for members in groups]
    mine = next((number for number, members in enumerate(groups) if rank in members), None)
    if groups and mine is None:
        for _ in range(steps * 2 * len(SHAPES)):
            sum_over_ranks()
        return
    group = None if mine is None else made[mine]
    train(kind, policy, steps, group, seed=mine or 0)


def train(kind: str, policy: str, steps: int, group: dist.ProcessGroup | None, seed: int) -> None:
    models = [wrap(kind, Talking(*SHAPES), process_group=group, **TINY_BUCKETS) for _ in range(2)]
    pairs = [Mirrored(kind, commhooks.make_compressor("powersgd", rank=2), policy, model=model) for model in models]
    rank = dist.get_rank(group)
    for step in range(steps):
        gradients = [normal(zeros(*SHAPES), 2, seed=100 * step + 10 * seed + i) for i in range(2)]
        backward_of_both(models, [of_ranks[rank] for of_ranks in gradients])
        for number, both in enumerate(pairs):
            expected = both.lockstep(gradients[number])[rank]
            same = all(torch.equal(a, b) for a, b in zip(gradients_of(both.model), expected, strict=True))
            assert same, f"model {number}, step {step}"


def backward_of_both(models: list[nn.Module], gradients: list[list[Tensor]]) -> None:
    for model in models:
        model.zero_grad()
    losses = [model(*own) for model, own in zip(models, gradients, strict=True)]
    torch.stack(losses).sum().backward()


STATELESS_HOOKS = (
    commhooks.allreduce_hook,
    commhooks.fp16_compress_hook,
    commhooks.bf16_compress_hook,
    quantization_pertensor_hook,
    quantization_perchannel_hook,
    commhooks.fp16_compress_wrapper(quantization_pertensor_hook),
)


@facts
def models_under_one_stateless_hook_get_the_means_they_get_alone(rank: int, kind: str) -> None:
    """Models of equal sizes, in one backward pass."""
    gradients = [normal(zeros(*SHAPES), 2, seed=seed)[rank] for seed in range(2)]
    for hook in STATELESS_HOOKS:
        models = [given(kind) for _ in gradients]
        for model in models:
            model.register_comm_hook(None, hook)  # type: ignore[operator]
        for _ in range(2):  # in the second pass, buckets are laid out anew
            alone = [backward(model, own) for model, own in zip(models, gradients, strict=True)]
        for _ in range(5):
            backward_of_both(models, gradients)
            means = [gradients_of(model) for model in models]
            pairs = [pair for own in zip(means, alone, strict=True) for pair in zip(*own, strict=True)]
            assert all(torch.equal(*pair) for pair in pairs), hook


@pytest.mark.parametrize(
    ("kind", "policy", "world_size", "groups"),
    [("core", "fifo", 2, []), ("torch", "fused", 4, [[0, 2], [1, 3]]), ("torch", "fifo", 3, [[0, 2]])],
    ids=["all of 2 ranks", "two pairs of 4 ranks", "2 of 3 ranks"],
)
def test_two_models_and_the_users_collectives_in_one_backward_pass_are_right(
    kind: str, policy: str, world_size: int, groups: list[list[int]]
) -> None:
    run_world(company, world_size, kind, policy, 8, groups)


test = facts.tests()
