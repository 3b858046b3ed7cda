"""State of models whose parameters have different compressors: saved, loaded, dealt to other numbers of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import CheckpointError, ErrorFeedback, Hierarchical, PerParameter, make_compressor, schedule
from commhooks.language import Compressor, Place
from commhooks.lockstep import average_in_lockstep
from tests.commhooks.resuming import roundtrip
from tests.commhooks.workers import exchangers, gradients_of, zeros
from tests.tiers import A_ROW

TENSORS = {f"{number}.weight": tensor for number, tensor in enumerate(zeros((9, 12), (40,), (6, 5, 4), (57,)))}


def top_k(ratio: float = 0.2) -> Compressor:
    return ErrorFeedback(inner=make_compressor("top-k", ratio=ratio, error_feedback=False))


def machines(size: int) -> Compressor:
    return Hierarchical(inner=top_k(), size=size)


def beside(one: Compressor, other: Compressor) -> Compressor:
    return PerParameter(rules=(("[01].*", one),), otherwise=other)


MIXED = {
    "ranks beside machines": beside(top_k(), machines(2)),
    "machines beside ranks": beside(machines(2), top_k()),
    "machines of two sizes": beside(machines(2), machines(4)),
    "blocks of two sizes": beside(make_compressor("sign", block=8), make_compressor("int8", block=16)),
    "servers of ranks beside those of machines": beside(
        make_compressor("sign", block=8), Hierarchical(inner=make_compressor("int8", block=16), size=2)
    ),
    "velocity beside a momentum": beside(make_compressor("dgc", ratio=0.1), make_compressor("signum", block=8)),
}
every_mixture = pytest.mark.parametrize("compressor", MIXED.values(), ids=list(MIXED))


def trained(compressor: Compressor, steps: int = 3) -> list[commhooks.Exchanger]:
    ranks = exchangers(TENSORS, compressor, 4)
    for step in range(steps):
        average_in_lockstep(ranks, gradients_of(TENSORS, step, 4))
    return ranks


def saved(ranks: list[commhooks.Exchanger]) -> list[dict[str, Any]]:
    return [roundtrip(one.state_dict()) for one in ranks]


def next_means(ranks: list[commhooks.Exchanger], steps: int = 3) -> list[dict[str, Tensor]]:
    means = []
    for step in range(50, 50 + steps):
        gradients = gradients_of(TENSORS, step, len(ranks))
        average_in_lockstep(ranks, gradients)
        means += gradients
    return means


def assert_equal(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(own[name], other[name]) for name in TENSORS)


def test_a_checkpoint_of_another_version_of_commhooks_is_continued_with_a_warning() -> None:
    compressor = commhooks.make_compressor("int8", error_feedback=True)
    ran, resumed = trained(compressor), exchangers(TENSORS, compressor, 4)
    for one, state in zip(resumed, saved(ran), strict=True):
        with pytest.warns(UserWarning, match=rf"saved by commhooks 0.0.9, and this is {commhooks.__version__}"):
            one.load_state_dict(state | {"commhooks": "0.0.9"})
    assert_equal(next_means(resumed), next_means(ran))


# --- state that does not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "fault"),
    [
        (top_k(), machines(2), r"'residual', saved as {'kind': 'residual'}, which this compressor keeps as {.*holders"),
        (make_compressor("sign", block=8), make_compressor("sign", block=16), "'server error', saved as .*'block': 8"),
        (
            beside(make_compressor("dgc", ratio=0.1), top_k()),
            beside(top_k(), make_compressor("dgc", ratio=0.1)),
            r"'velocity', which this compressor does not keep; .* \(parameter '0.weight', '1.weight'\)",
        ),
    ],
    ids=["another number of holders", "another block", "kept for other parameters"],
)
def test_state_of_another_kind_is_refused_or_dropped_and_never_zeroed_without_a_word(
    before: Compressor, now: Compressor, fault: str
) -> None:
    ran, others = trained(before), exchangers(TENSORS, now, 4)
    for one, state in zip(others, saved(ran), strict=True):
        with pytest.raises(CheckpointError, match=fault):
            one.load_state_dict(state, settings="change")
        one.load_state_dict(state, settings="change", missing="reset")
    next_means(others)


# --- other numbers of ranks -------------------------------------------------------------------------------------------


@A_ROW
@every_mixture
@pytest.mark.parametrize("how", ["spread", pytest.param("spread-mean", marks=pytest.mark.soak)])
def test_a_mixture_is_spread_over_other_numbers_of_ranks_and_loses_nothing(compressor: Compressor, how: str) -> None:
    """By 8 of 4 ranks and by 4 again: every division is by a power of two, so no digit is lost."""
    first = commhooks.merge_state_dicts(saved(trained(compressor)))
    more, again = exchangers(TENSORS, compressor, 8), exchangers(TENSORS, compressor, 4)
    for one in more:
        one.load_state_dict(first, world_size=how)
    second = commhooks.merge_state_dicts(saved(more))
    for one in again:
        one.load_state_dict(second, world_size=how)
    for rank, one in enumerate(again):
        state = one.state_dict()["local"][f"rank{rank}"]
        for name, kept in first["local"][f"rank{rank}"].items():
            assert all(torch.equal(state[name][entry], tensor) for entry, tensor in kept.items())
    for ours in next_means(more):
        assert all(torch.isfinite(mean).all() for mean in ours.values())


# --- schedules inside schedules ---------------------------------------------------------------------------------------


def test_no_two_entries_of_nested_schedules_are_kept_under_one_name() -> None:
    """Both halves have a residual of ranks and one of machines, each under the name that the other half's has."""
    one = schedule((0, machines(2)), (1, top_k()))
    other = schedule((0, top_k()), (1, machines(2)))
    twice = schedule((0, one), (2, other))
    declared = twice.state(Place("0.weight", TENSORS["0.weight"], 4))
    assert sorted(entry.holders for entry in declared.values()) == [1, 1, 2, 2]
    ran, resumed = trained(twice), exchangers(TENSORS, twice, 4)
    for rank, state in zip(resumed, saved(ran), strict=True):
        rank.load_state_dict(state)
    assert_equal(next_means(resumed), next_means(ran))
