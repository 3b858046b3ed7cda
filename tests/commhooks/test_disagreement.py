"""Ranks with different settings all get an error. What each rank runs is in disagreement_in_worlds.py."""

from __future__ import annotations

import pytest

import commhooks
from commhooks import ErrorFeedback, PerParameter, PowerSGD, TopK
from commhooks.communicators.disagreement import describe, refusal_as_fingerprint
from tests.commhooks import disagreement_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks
from tests.commhooks.told import Told

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])

OTHERS, ODD = "(ranks 0, 2)", "(rank 1)"
WEIGHT = "shape (40, 30), torch.float32"
DIFFERENCES = {
    "compressor": f"compressor.dtype: torch.float16 {OTHERS}, torch.bfloat16 {ODD}.",
    "rank": f"compressor.inner.rank: 1 {OTHERS}, 2 {ODD}.",
    "seed": f"compressor.inner.seed: 0 {OTHERS}, 1 {ODD}.",
    "policy": f"policy: 'fifo' {OTHERS}, 'fused' {ODD}.",
    "name": f"parameter weights.2: {WEIGHT} {OTHERS}, missing {ODD}; parameter head: missing {OTHERS}, {WEIGHT} {ODD}.",
    "frozen": f"parameter weights.2: {WEIGHT} {OTHERS}, {WEIGHT}, frozen {ODD}.",
    "shape": f"parameter weights.2: {WEIGHT} {OTHERS}, shape (30, 40), torch.float32 {ODD}.",
    "dtype": f"parameter weights.2: {WEIGHT} {OTHERS}, shape (40, 30), torch.float64 {ODD}.",
}
"""By what differs: all that the error says of it, on 3 ranks."""


def check(told: Told, difference: str) -> None:
    """Assert that the error came soon, and says which ranks have what, and nothing that is the same on all."""
    assert told.seconds < 10
    assert f"ranks disagree. {difference}" in told.text, told


def on_two_ranks(difference: str) -> str:
    return difference.replace(OTHERS, "(rank 0)")


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
            check(one, on_two_ranks(DIFFERENCES[what]))


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
        "rank": f"compressor.inner.inner.rank: 1 {OTHERS}, 2 {ODD}.",
        "seed": f"compressor.inner.inner.seed: 0 {OTHERS}, 7 {ODD}.",
        "warm-up": f"compressor.steps: 1000 {OTHERS}, 5 {ODD}.",
        "policy": DIFFERENCES["policy"],
        "matrices": f"compressor.inner.inner.matrices: 'first-dimension' {OTHERS}, 'whole-bucket' {ODD}.",
        "wire": f"compressor: StartAfter {OTHERS}, WireDtype {ODD}.",
    }
    for rank, told in enumerate(run_ranks(on_every_rank.refused_bare_hooks, 3, kind, check_exit=True)):
        assert told.keys() == differences.keys()
        for what, difference in differences.items():
            for one in told[what]:
                check(one, difference)
                assert f"rank {rank}" in one.text
            assert kind == "torch" or told[what][0].error == "AttachError"  # PyTorch's reducer knows RuntimeError only


def fingerprint(compressor: commhooks.Compressor, parameters: str = "ab") -> str:
    return "\n".join([f"compressor: {compressor!r}", *(f"parameter {name}: shape (2,)" for name in parameters)])


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([fingerprint(PowerSGD(rank=2)), fingerprint(TopK())], "compressor: PowerSGD (rank 0), TopK (rank 1)."),
        (
            [fingerprint(ErrorFeedback(inner=TopK(ratio=r), decay=r)) for r in (0.5, 0.5, 0.25)],
            "compressor.inner.ratio: 0.5 (ranks 0, 1), 0.25 (rank 2); "
            "compressor.decay: 0.5 (ranks 0, 1), 0.25 (rank 2).",
        ),
        (
            [fingerprint(PerParameter(rules=(("x.*", TopK(ratio=r)),))) for r in (0.5, 0.25)],
            "compressor.rules.0.1.ratio: 0.5 (rank 0), 0.25 (rank 1).",
        ),
        (
            [fingerprint(PerParameter(rules=(("x.*", TopK()),) * n)) for n in (1, 2)],
            "compressor.rules: length 1 (rank 0), length 2 (rank 1).",
        ),
        (
            [fingerprint(PowerSGD(skip=skip)) for skip in (("a", "b"), ("a", "c"))],
            "compressor.skip: ('a', 'b') (rank 0), ('a', 'c') (rank 1).",
        ),
        (["f: A(of=[B(c=1)])", "f: A(of=[B(c=2)])"], "f.of.0.c: 1 (rank 0), 2 (rank 1)."),
        (
            [fingerprint(TopK(), "ab"), fingerprint(TopK(), "ba")],
            "the order, which first differs at parameter a (rank 0), parameter b (rank 1).",
        ),
        (
            [fingerprint(TopK(), ""), fingerprint(TopK(), "abcdefghijkl")],
            "; ".join(f"parameter {name}: missing (rank 0), shape (2,) (rank 1)" for name in "abcdefgh")
            + "; and 4 more",
        ),
        (
            ["step: 1"] + ["step: 2"] * 12,
            "step: 1 (rank 0), 2 (ranks 1, 2, 3, 4, 5, 6, 7, 8 and 4 more).",
        ),
        (
            ["step: 1", refusal_as_fingerprint(ValueError("no place:\nnone"))],
            "rank 1 cannot take part: no place: none.",
        ),
        (["f: what <this> is", "f: what <that> is"], "f: what <this> is (rank 0), what <that> is (rank 1)."),
    ],
)
def test_only_what_differs_is_told(ranks: list[str], told: str) -> None:
    assert describe(ranks) == told
