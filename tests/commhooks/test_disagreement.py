"""Ranks that come with different things are all told so. What each rank runs is in disagreement_in_worlds.py."""

from __future__ import annotations

import re

import pytest

from tests.commhooks import disagreement_in_worlds as on_every_rank
from tests.commhooks.disagreement_in_worlds import Told
from tests.commhooks.ranks import run_ranks

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])

PARAMETER = r"parameter weights.2 of shape (40, 30), torch.float32"
DIFFERENCES = {
    "compressor": ("compressor Cast(dtype=torch.float16)", "compressor Cast(dtype=torch.bfloat16)"),
    "rank": ("PowerSGD(rank=1, ", "PowerSGD(rank=2, "),
    "seed": (" seed=0, ", " seed=1, "),
    "policy": ("policy 'fifo'", "policy 'fused'"),
    "name": (PARAMETER, "parameter head of shape (40, 30), torch.float32"),
    "list": (PARAMETER, "parameter weights.3 of shape (), torch.float32"),
    "shape": (PARAMETER, "parameter weights.2 of shape (30, 40), torch.float32"),
    "dtype": (PARAMETER, "parameter weights.2 of shape (40, 30), torch.float64"),
}
"""By what differs: what rank 0 has, and what rank 1 has."""


def check(told: Told, difference: tuple[str, str]) -> None:
    """Demand that the error came soon, and says which rank has what."""
    assert told.seconds < 10
    ours, theirs = map(re.escape, difference)
    assert re.search(f"ranks disagree. Rank 0 has: .*{ours}.* Rank 1 has: .*{theirs}", told.text), told


@both_ddps
def test_attaching_what_differs_on_one_rank_is_refused_on_every_rank_and_can_be_made_good(kind: str) -> None:
    for told in run_ranks(on_every_rank.refused_attachments, 3, kind, check_exit=True):
        assert told.keys() == DIFFERENCES.keys()
        for what, difference in DIFFERENCES.items():
            check(told[what], difference)
            assert told[what].error == "AttachError"


@both_ddps
@pytest.mark.parametrize("policy", ["fifo", "fused"])
def test_replacing_by_what_differs_on_one_rank_is_refused_and_the_old_compressor_goes_on(
    kind: str, policy: str
) -> None:
    for told in run_ranks(on_every_rank.refused_replacements, 2, kind, policy, check_exit=True):
        assert list(told) == ["compressor", "rank", "seed"]
        for what, one in told.items():
            assert one.error == "AttachError"
            assert re.search("Rank 0 has: compressor .* Rank 1 has: compressor ", one.text), (what, one)
            if what != "compressor":
                check(one, DIFFERENCES[what])


@both_ddps
@pytest.mark.parametrize("when", ["attach", "replace"])
def test_a_setting_that_fits_no_parameter_and_only_one_rank_has_is_an_error_on_every_rank(kind: str, when: str) -> None:
    ranks = run_ranks(on_every_rank.refused_by_one, 2, kind, when, check_exit=True, timeout=12.0)
    for rank, told in [(rank, one) for rank, attempts in enumerate(ranks) for one in attempts]:
        assert told.error == ("SettingsError" if rank == 1 else "AttachError")
        assert "'head.*'" in told.text
        assert told.seconds < 10


@both_ddps
def test_a_bare_state_of_powersgd_that_differs_on_one_rank_is_an_error_of_every_ranks_backward_pass(kind: str) -> None:
    differences = {
        "rank": ("PowerSGD(rank=1, ", "PowerSGD(rank=2, "),
        "seed": (" seed=0, ", " seed=7, "),
        "warm-up": ("steps=1000", "steps=5"),
        "policy": ("policy 'fifo'", "policy 'fused'"),
        "matrices": ("matrices='first-dimension'", "matrices='whole-bucket'"),
        "wire": ("compressor StartAfter(", "compressor WireDtype("),
    }
    for rank, told in enumerate(run_ranks(on_every_rank.refused_bare_hooks, 3, kind, check_exit=True)):
        assert told.keys() == differences.keys()
        for what, difference in differences.items():
            for one in told[what]:
                check(one, difference)
                assert f"rank {rank}" in one.text
            assert kind == "torch" or told[what][0].error == "AttachError"  # PyTorch's reducer knows RuntimeError only
