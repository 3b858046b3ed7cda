"""Whatever the schedule, engines on the device compute what they do when it keeps up, and what they do on the CPU."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests import bounds
from tests.commhooks.workers import Workers, zeros
from tests.virtual_device.combinations import (
    BUCKETS,
    SHAPES,
    WORLD_SIZE,
    Combination,
    chosen,
    covering_pairs,
    scalers,
)
from tests.virtual_device.worlds import DeviceWorld, Seen, see, steps

pytestmark = pytest.mark.virtual_device

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("combination", "run"), chosen(), ids=str)
def test_engines_compute_the_same_on_a_late_device_without_races_or_host_waits(
    combination: Combination, run: str
) -> None:
    eager = _seen(combination, "eager")
    _check_reports(combination, eager)
    _check_beside_the_cpu(combination, eager)
    seen = _seen(combination, run)
    _check_reports(combination, seen)
    assert seen.equals(eager)


def test_few_combinations_have_all_pairs() -> None:
    factors = {"a": "xyz", "b": range(4), "c": (False, True), "d": (False, True)}
    choices = covering_pairs(factors)
    for one, other in itertools.combinations(factors, 2):
        found = {(choice[one], choice[other]) for choice in choices}
        assert found == set(itertools.product(factors[one], factors[other]))
    assert len(choices) <= 14  # 12 pairs of a and b; all choices are 48


def _seen(combination: Combination, run: str) -> Seen:
    given = combination.gradients()

    def make() -> DeviceWorld:
        return DeviceWorld(
            combination.case.make(),
            WORLD_SIZE,
            SHAPES,
            buckets=BUCKETS,
            policy=combination.policy,
            storage=combination.residuals,
            dtype=combination.dtype,
            **combination.settings,
        )

    def program() -> list[Tensor]:
        own = scalers("cuda")
        return steps(make, given, lambda world, step: combination.before_step(world.engines, own, step))

    return see(program, run)


def _on_the_cpu(combination: Combination) -> list[Tensor]:
    workers = Workers(
        combination.case.make(),
        WORLD_SIZE,
        zeros(*SHAPES, dtype=combination.dtype),
        buckets=BUCKETS,
        policy=combination.policy,
        storage=combination.residuals,
        **combination.settings,
    )
    own_scalers = scalers("cpu")
    means: list[Tensor] = []
    for step, given in enumerate(combination.gradients()):
        combination.before_step(workers.engines, own_scalers, step)
        means += [mean.clone() for own in workers.step(given) for mean in own]
    kept = [kept for table in workers.states for state in table.states() for kept in state.tensors.values()]
    return [*means, *kept]


def _check_reports(combination: Combination, seen: Seen) -> None:
    assert seen.error == "", combination
    assert seen.races == (), combination
    waits = {f"{wait.what} in {Path(wait.place.rpartition(':')[0]).relative_to(ROOT)}" for wait in seen.waits}
    assert waits <= _permitted(combination), combination


def _permitted(combination: Combination) -> set[str]:
    """Return where a hook may make the host wait: see docs/guide/gpu.md."""
    permitted: set[str] = set()
    if combination.joins:  # outside a backward pass, as when a DDP has a rank that has run out of inputs
        permitted.add("item in commhooks/engine/guards.py")
    if combination.residuals == "host" and combination.is_guarded:
        permitted.add("event.synchronize in commhooks/devices.py")
    if combination.residuals == "host" and combination.rescaled:
        permitted.add("item in commhooks/state/loss_scale.py")
    if combination.row.startswith("adaptive-rank"):  # between steps, once in so many
        permitted.add("copy_ in commhooks/compressors/powersgd/adaptive_rank.py")
    return permitted


def _check_beside_the_cpu(combination: Combination, seen: Seen) -> None:
    """Bit for bit, but for products of matrices: they are made of other blocks there, and so rounded otherwise.

    What a narrow wire or a narrow residual then makes of a rounding has no bound.
    """
    case, root = combination.case, "commhooks.compressors.sparse_loco.root"
    # A CPU has an order of its own for these, in which all CPUs agree.
    with mock.patch("commhooks.compressors.dct.runs_later", return_value=True), mock.patch(root, torch.sqrt):
        expected = _on_the_cpu(combination)
    if not case.rank:
        assert seen.equals(dataclasses.replace(seen, values=expected))
    elif case.wire is None and combination.residuals != "bf16":
        means = len(combination.gradients()) * WORLD_SIZE * len(SHAPES)
        for ours, theirs in zip(seen.values[:means], expected[:means], strict=True):
            largest = float(theirs[theirs.isfinite()].abs().max()) if theirs.isfinite().any() else 0.0
            torch.testing.assert_close(ours, theirs, rtol=0, atol=bounds.IN_FLOAT64 * largest, equal_nan=True)
