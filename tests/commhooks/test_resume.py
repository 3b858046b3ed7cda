"""A run that was saved, ended and resumed by new processes is the one that was not. See resume_in_worlds.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import bounds
from tests.cases import CASES, DDP_AND_POLICY, FORMS
from tests.commhooks import resume_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])
pytestmark = pytest.mark.kernels
both_policies = pytest.mark.parametrize("policy", ["fifo", "fused"])


def distances(folder: Path, world_size: int, kind: str, policy: str, steps: int, cases: list[str]) -> dict[str, float]:
    """Return each case's largest distance from the uninterrupted run, on any rank."""
    given = (kind, policy, str(folder), steps, cases)
    run_ranks(on_every_rank.saved_and_whole, world_size, *given)
    by_rank = run_ranks(on_every_rank.resumed, world_size, *given)
    return {name: max(one[name] for one in by_rank) for name in by_rank[0]}


@DDP_AND_POLICY
@pytest.mark.parametrize(
    ("steps", "cases"), [(8, FORMS), pytest.param(30, [], marks=pytest.mark.soak)], ids=["8", "30"]
)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    tmp_path: Path, kind: str, policy: str, steps: int, cases: list[str]
) -> None:
    found = distances(tmp_path, 2, kind, policy, steps, cases)
    assert len(found) == len(cases or on_every_rank.EXCHANGING)
    assert {name: far for name, far in found.items() if far} == {}


SOME = ["powersgd-2", "powersgd-2-alternating", "fp16-feedback"]  # the last alone has a narrow wire


@both_ddps
@pytest.mark.parametrize("policy", ["fifo", pytest.param("fused", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "cases", [SOME, pytest.param([], marks=[pytest.mark.soak, pytest.mark.timeout(600)])], ids=["some", "all"]
)
def test_at_four_ranks_too_where_bits_depend_on_how_buckets_are_cut(
    tmp_path: Path, kind: str, policy: str, cases: list[str]
) -> None:
    found = distances(tmp_path, 4, kind, policy, 30 if not cases else 4, cases)
    assert {name: far for name, far in found.items() if far} == {}


WIDE = [case.name for case in CASES if case.exchanges and not case.depends_on_buckets and case.wire is None]
NARROW = [case.name for case in CASES if case.wire is not None]


@pytest.mark.parametrize(
    ("kind", "world_size", "names"),
    [
        pytest.param("core", 3, SOME[:2], id="core, wide"),
        pytest.param("torch", 3, SOME[:2], id="torch, wide"),
        pytest.param("torch", 2, SOME[2:], id="torch, narrow"),
        *(
            pytest.param(kind, world_size, names, id=f"{kind}, all {what}", marks=pytest.mark.soak)
            for kind in ("core", "torch")
            for what, world_size, names in (("wide", 3, WIDE), ("narrow", 2, NARROW))
        ),
    ],
)
def test_with_other_buckets_a_resumed_step_is_the_same_to_the_last_digits(
    tmp_path: Path, kind: str, world_size: int, names: list[str]
) -> None:
    """With 16 bits on the wire at two ranks: from three on, such a sum rounds by the order of its terms."""
    given = (kind, "fifo", str(tmp_path), 3, names)
    run_ranks(on_every_rank.saved_and_whole, world_size, *given, torch.float64)
    for found in run_ranks(on_every_rank.first_resumed_steps, world_size, *given, 0.02):
        assert len(found) == len(names)
        for name, far in found.items():
            assert far <= bounds.IN_FLOAT64, name


@both_ddps
def test_the_last_buckets_are_known_after_a_replacement_after_a_load_and_where_there_is_one(
    tmp_path: Path, kind: str
) -> None:
    for found in run_ranks(on_every_rank.resumed_in_place, 2, kind, str(tmp_path)):
        assert len(found) == 4 and {what: far for what, far in found.items() if far} == {}


@both_ddps
def test_a_checkpoint_holds_the_state_of_every_powersgd_hook(tmp_path: Path, kind: str) -> None:
    for found in run_ranks(on_every_rank.resumed_hook, 2, kind, str(tmp_path)):
        assert len(found) == 3 and {hook: far for hook, far in found.items() if far} == {}


@both_ddps
def test_what_is_owed_of_a_complex_gradient_comes_back(kind: str) -> None:
    assert run_ranks(on_every_rank.resumed_complex, 2, kind) == [0.0, 0.0]
