"""Hooks under a gradient scaler."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler

import commhooks
from commhooks import PowerSGDState, make_compressor
from commhooks.communicators import failure_store
from tests.commhooks.mirrored import TINY_BUCKETS
from tests.commhooks.models import Given, gradients_of, wrap
from tests.commhooks.told import Told, told_by
from tests.commhooks.workers import normal, zeros
from tests.ddp_core.facts import BOTH_DDPS, Facts
from tests.tiers import thorough
from tests.world import on_ranks

facts = Facts(kinds=BOTH_DDPS)
soon = mock.patch.object(failure_store, "ANSWER_SECONDS", 0.4)
"""Scales that differ are looked up once more after a while, for the case that only the note of one comes late."""
SHAPES = [(30, 50), (50,), (40, 30), (60, 40)]
STEPS = 12


@dataclasses.dataclass
class Scaled:
    """A model whose gradients are handed in, its optimiser and its scaler."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: GradScaler

    def step(self, gradients: list[Tensor]) -> float:
        """Run one step, and return the scale after it."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(*gradients)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


def scaled(kind: str, *, growth_interval: int = 4, init_scale: float = 1024.0) -> Scaled:
    model = wrap(kind, Given(*SHAPES), **TINY_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Scaled(model, optimizer, GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval))


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "policy", "atomic"),
    [("core", "fifo", True), ("torch", "fused", False), *thorough([("torch", "fifo", True), ("core", "fused", False)])],
)
def test_a_run_recovers_from_infs_as_fast_as_without_a_hook(
    rank: int, kind: str, policy: Any, atomic: bool
) -> list[list[float]]:
    """Put an inf or a NaN into one rank's gradient at random steps; return the scales by step, for each seed.

    A bad mean is not hidden where all buckets are judged together, or steps are atomic.
    """
    found = []
    plain, compressed = scaled(kind), scaled(kind)
    attachment = commhooks.attach(
        compressed.model, make_compressor("powersgd", rank=2), policy=policy, scaler=compressed.scaler, atomic=atomic
    )
    for seed in range(4):
        dice = random.Random(seed)
        bad_steps = set(dice.sample(range(STEPS), 3))
        scales: tuple[list[float], list[float]] = ([], [])
        for step in range(STEPS):
            gradients = normal(zeros(*SHAPES), 2, seed=1000 * seed + step)
            if step in bad_steps:
                victim, where = dice.randrange(2), dice.randrange(len(SHAPES))
                gradients[victim][where].view(-1)[0] = dice.choice([math.inf, -math.inf, math.nan])
            for one, kept in zip((plain, compressed), scales, strict=True):
                kept.append(one.step(gradients[rank]))
            if step in bad_steps and (policy == "fused" or atomic):
                assert not all(torch.isfinite(g).all() for g in gradients_of(compressed.model))
        assert all(torch.isfinite(p).all() for p in compressed.model.parameters())
        assert all(torch.isfinite(kept).all() for *_, kept in attachment.state.residuals())
        without_hook, with_powersgd = scales
        assert with_powersgd == without_hook
        assert len(set(without_hook)) > 1
        found.append(without_hook)
    attachment.close()
    return found


@on_ranks(2)
@pytest.mark.kernels
@pytest.mark.parametrize("kind", BOTH_DDPS)
def test_residuals_follow_the_scale_of_the_loss_bit_for_bit(rank: int, kind: str) -> None:
    for how in ("scaler", "announced", "hook"):
        change_the_scale(rank, kind, how)


def change_the_scale(rank: int, kind: str, how: str) -> None:
    """Train with a scale that goes up and down, and without one: the gradients, unscaled, are the same bits."""
    scaled_up = wrap(kind, Given(*SHAPES), **TINY_BUCKETS)
    plain = wrap(kind, Given(*SHAPES), **TINY_BUCKETS)
    scaler = GradScaler("cpu", init_scale=65536.0)
    commhooks.attach(plain, make_compressor("powersgd", rank=2))
    if how == "hook":
        state = PowerSGDState(None, 2, start_powerSGD_iter=0)
        state.bind(scaled_up, scaler=scaler)
        scaled_up.register_comm_hook(state, commhooks.powerSGD_hook)  # type: ignore[operator]
        attachment: Any = state
    else:
        attachment = commhooks.attach(
            scaled_up, make_compressor("powersgd", rank=2), scaler=scaler if how == "scaler" else None
        )
    for step, scale in enumerate([65536.0, 65536.0, 1.0, 2.0, 2.0**-3, 2.0**10, 1.0]):
        scaler.scale(torch.ones(()))  # a scaler has no scale to change before it was used
        if how == "announced":
            attachment.set_grad_scale(scale)
        else:
            scaler.update(scale)
        gradients = normal(zeros(*SHAPES), 2, seed=step)[rank]
        for model, factor in ((scaled_up, scale), (plain, 1.0)):
            model.zero_grad()
            (model(*gradients) * factor).backward()
        for ours, expected in zip(gradients_of(scaled_up), gradients_of(plain), strict=True):
            assert torch.equal(ours / scale, expected), (step, scale)


@facts
def gradients_are_accumulated_compressed_averaged_unscaled_and_clipped_in_this_order(rank: int, kind: str) -> None:
    """Compare the parameters with and without a scaler."""
    results = []
    for with_scaler in (True, False):
        torch.manual_seed(0)
        model = wrap(kind, nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 30)), **TINY_BUCKETS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = GradScaler("cpu", init_scale=2.0**12, growth_interval=2, enabled=with_scaler)
        attachment = commhooks.attach(model, make_compressor("powersgd", rank=2), scaler=scaler)
        for step in range(6):
            optimizer.zero_grad()
            inputs = [torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + i + rank)) for i in (0, 5)]
            with model.no_sync():  # type: ignore[operator]
                scaler.scale(model(inputs[0]).square().mean()).backward()
            scaler.scale(model(inputs[1]).square().mean()).backward()  # compressed, and averaged
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        assert attachment.steps == 6  # the hook runs once for each step of the optimiser
        results.append([p.detach().clone() for p in model.parameters()])
        attachment.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@facts.once
@soon
def ranks_whose_loss_scales_differ_are_named_with_both_scales(rank: int) -> None:
    """From the beginning, or since one of them grew; and nothing is sent for scales that are the same."""
    for starts, grown, failing in (((8.0, 4.0), 0, 1), ((8.0, 8.0), 3, 4), ((8.0, 8.0), 0, 99)):
        one = scaled("core", init_scale=starts[rank], growth_interval=1000)
        attachment = commhooks.attach(one.model, "int8", scaler=one.scaler)
        told = Told("nothing", "", 0.0)
        for step in range(min(6, failing + 1)):
            if grown and step == grown:
                one.scaler.update(8.0 * 2**rank)
            told = told_by(functools.partial(one.step, normal(zeros(*SHAPES), 2, seed=step)[rank]))
            assert (told.error == "nothing") == (step < failing), told
        scales = starts if failing == 1 else (8.0, 16.0)
        if failing < 6 and (failing == 1 or rank == 1):
            words = f"loss scale is {scales[rank]} here, and {scales[1 - rank]} on rank {1 - rank}"
            assert f"rank {rank}, step {failing - 1}: the {words}" in told.text
        elif failing < 6:  # this one's has not changed
            assert "the loss scale is 16.0 here, and 8.0 on rank 0" in told.text
        attachment.close()


@facts.once
@soon
def scales_that_change_one_step_apart_are_told_even_once_they_are_equal(rank: int) -> None:
    one = scaled("core", init_scale=8.0, growth_interval=1000)
    commhooks.attach(one.model, "int8", scaler=one.scaler)

    def train() -> None:
        for step in range(5):
            if step == 2 + rank:
                one.scaler.update(16.0)
            one.step(normal(zeros(*SHAPES), 2, seed=step)[rank])

    with pytest.raises(commhooks.CommHooksError, match=r"step 2: the loss scale is 16\.0 here, and 8\.0 on rank 1"):
        train()


@facts
def scales_that_are_the_same_are_no_error(rank: int, kind: str) -> None:
    """After a common step back, with the same changes again, and where one rank has run out of inputs meanwhile."""
    one = scaled(kind, init_scale=2.0**16, growth_interval=2)
    attachment = commhooks.attach(one.model, "int8", scaler=one.scaler)
    saved = attachment.state_dict(), one.scaler.state_dict()
    for _ in range(2):
        for step in range(4):
            gradients = normal(zeros(*SHAPES), 2, seed=step)[rank]
            gradients[0][0] = math.inf if step < 3 else 0.0
            one.step(gradients)
        attachment.load_state_dict(saved[0])
        one.scaler.load_state_dict(saved[1])
    with one.model.join():  # type: ignore[operator]
        for step in range(2 if rank else 7):
            one.step(normal(zeros(*SHAPES), 2, seed=step)[rank])
    assert one.scaler.get_scale() == 2.0 ** (17 if rank else 19)


@facts.once
def scales_that_change_in_every_step_leave_nothing_in_the_store(rank: int) -> None:
    model = wrap("core", Given(*SHAPES), **TINY_BUCKETS)
    attachment = commhooks.attach(model, "int8")
    keys = []
    for step in range(12):
        attachment.set_grad_scale(1.0 + step)
        model(*normal(zeros(*SHAPES), 2, seed=step)[rank]).backward()
        dist.barrier()
        keys.append(dist.distributed_c10d._get_default_store().num_keys())
        dist.barrier()
    assert keys[-1] == keys[4]


test = facts.tests()
