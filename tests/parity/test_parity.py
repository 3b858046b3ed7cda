"""Bit for bit what PyTorch's DDP computes; and, within a bound, what local training on the joined batch computes."""

from __future__ import annotations

from typing import Any

import pytest

from tests import bounds
from tests.parity.cases import CASES, Variant, variants
from tests.parity.training import compare, compare_with_local
from tests.tiers import thorough
from tests.world import run_world

STEPS = 50
SHORT = 7
"""Enough for all that happens: buckets are rebuilt after the first step, branches come round every 6 steps, and of
three ranks each leaves 3 steps before the next one. What follows repeats it."""
TABLE = list(variants())


def assert_equal_histories(world_size: int, chosen: list[Variant], timeout: float, steps: int) -> None:
    # PyTorch's DDP aborts in about 6 % of exits, so exits do not count here.
    # It lets Gloo sum sparse gradients, which only a group of one thread does safely (ddp_core/sparse.py).
    options: dict[str, Any] = {"timeout": timeout, "check_exit": False, "store": "tcp", "backend": "gloo in turn"}
    complaints = run_world(compare, world_size, chosen, "torch", "ours", steps, **options)
    assert complaints == [[]] * world_size, "\n".join(line for lines in complaints for line in lines)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("world_size", "part"), [(3, 1), (2, 0), *thorough([(2, 2), (3, 3)])])
def test_every_step_has_the_bits_of_pytorchs_ddp(world_size: int, part: int) -> None:
    """A quarter of the table, with each model; the whole of it, 50 steps, with 2, 3 and 4 ranks below."""
    chosen = [v for number, v in enumerate(TABLE) if (number + list(CASES).index(v.case)) % 4 == part]
    assert {v.case for v in chosen} == set(CASES)
    assert_equal_histories(world_size, chosen, timeout=380, steps=SHORT)


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_step_has_the_bits_of_pytorchs_ddp_in_the_whole_table(world_size: int) -> None:
    assert_equal_histories(world_size, TABLE, timeout=1400, steps=STEPS)
    print(f"{len(TABLE)} variants x {STEPS} steps on {world_size} ranks: bit-identical")


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("world_size", "optimizer", "steps"),
    [
        (3, "sgd", SHORT),
        *(
            pytest.param(ranks, optimizer, STEPS, marks=pytest.mark.soak)
            for ranks in (2, 3)
            for optimizer in ("sgd", "adamw")
        ),
    ],
)
def test_training_equals_local_training_on_the_joined_batch(world_size: int, optimizer: str, steps: int) -> None:
    cases = [case.name for case in CASES.values() if case.local]
    complaints = run_world(compare_with_local, world_size, cases, optimizer, steps, bounds.IN_FLOAT64)
    assert complaints == [[]] * world_size
