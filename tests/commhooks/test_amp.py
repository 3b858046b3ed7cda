"""Hooks under a gradient scaler. What each rank runs is in amp_in_worlds.py."""

from __future__ import annotations

import pytest
import torch

from tests.commhooks import amp_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])


@both_ddps
@pytest.mark.parametrize(
    ("policy", "atomic", "seeds"),
    [
        ("fifo", True, 6),
        ("fused", False, 6),
        *(
            pytest.param(policy, atomic, 20, marks=pytest.mark.soak)
            for policy in ("fifo", "fused")
            for atomic in (False, True)
        ),
    ],
)
def test_a_run_recovers_from_infs_as_fast_as_without_a_hook(kind: str, policy: str, atomic: bool, seeds: int) -> None:
    first, second = run_ranks(on_every_rank.recovery, 2, kind, policy, atomic, seeds)
    assert first == second  # the scale is the same on every rank at every step
    assert len(first) == seeds
    for without_hook, with_powersgd in first:
        assert with_powersgd == without_hook
        assert len(set(without_hook)) > 1


@pytest.mark.kernels
@both_ddps
@pytest.mark.parametrize("how", ["scaler", "announced", "hook"])
def test_residuals_follow_the_scale_of_the_loss_bit_for_bit(kind: str, how: str) -> None:
    run_ranks(on_every_rank.a_changing_scale_changes_nothing, 2, kind, how)


@both_ddps
def test_gradients_are_accumulated_compressed_averaged_unscaled_and_clipped_in_this_order(kind: str) -> None:
    for steps, with_scaler, without in run_ranks(on_every_rank.accumulate_unscale_clip_step, 2, kind):
        assert steps == 6  # the hook runs once for each step of the optimiser
        assert all(torch.equal(a, b) for a, b in zip(with_scaler, without, strict=True))
