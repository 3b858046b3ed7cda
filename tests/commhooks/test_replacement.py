"""One compressor takes over from another between steps. What each rank runs is in replacement_in_worlds.py."""

from __future__ import annotations

import signal

import pytest

from tests.commhooks import replacement_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks, survived
from tests.world import run_world_outcomes

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])
both_policies = pytest.mark.parametrize("policy", ["fifo", "fused"])

LOSS_OF_A_STEP = 8 * 2**-24 * 32
"""What a step may lose in fp32: means and residuals come of sums of at most 4 + 2 terms, none of them larger than the
norm of a column of gradient and residual, which is below 32."""
LOSS_OF_FP16 = 2**-9
"""What a step of fp16 may lose besides: half of the last digit of the sum on the wire, which is below 8. It is in no
rank's own cast, so in no residual. (Without error feedback nothing is lost: these gradients are whole 64ths.)"""


@pytest.mark.kernels
@both_ddps
@both_policies
def test_compressors_that_take_over_from_each_other_are_what_they_are_in_lockstep_and_lose_nothing(
    kind: str, policy: str
) -> None:
    first, second = run_ranks(on_every_rank.sequence, 2, kind, policy, check_exit=True)
    assert first.digests == second.digests
    for rank in (first, second):
        assert rank.not_lockstep == []
        for step, loss in enumerate(rank.losses):
            assert loss <= (step + 1) * LOSS_OF_A_STEP + max(step - 11, 0) * LOSS_OF_FP16, step
        sent_dense, powersgd, waiting, last = rank.owed[:3], rank.owed[3:9], rank.owed[9:12], rank.owed[-1]
        assert sent_dense == [0.0] * 3 and min(powersgd) > 1
        assert waiting == powersgd[-1:] * 3  # nobody sends it, and nobody forgets it
        assert last < 2**-10  # the residual of a cast: of all that PowerSGD owed, nothing is left


@both_ddps
@both_policies
def test_a_replacement_that_cannot_be_is_refused_and_the_old_compressor_goes_on(kind: str, policy: str) -> None:
    for told in run_ranks(on_every_rank.refusals, 2, kind, policy, check_exit=True):
        assert {what: one.error for what, one in told.items()} == {
            "skip": "SettingsError",
            "name": "SettingsError",
            "type": "SettingsError",
            "in mid-step": "AttachError",
            "detached": "AttachError",
        }
        assert "'head.*' must match a parameter's name; there are weights.0, weights.1" in told["skip"].text
        assert "Did you mean 'powersgd'" in told["name"].text
        assert "expected a Compressor or a name (got 3)" in told["type"].text
        assert "replace: step 4 is under way; call it between two steps" in told["in mid-step"].text
        assert told["detached"].text.startswith("replace: this attachment was detached")


@both_ddps
@pytest.mark.parametrize("how", ["killed", "detached"])
def test_replacing_when_a_peer_is_gone_raises_at_once_and_so_does_the_next_step(kind: str, how: str) -> None:
    outcomes = run_world_outcomes(on_every_rank.without_a_peer, 3, kind, how)
    assert outcomes[1].exit_code == (-signal.SIGKILL if how == "killed" else 0)
    for outcome in (outcomes[0], outcomes[2]):
        assert survived(outcome), outcome.describe()
        for told in outcome.value:
            assert told.seconds < 10
            assert "replace before step 2: CollectiveError: barrier failed" in told.text
        assert outcome.value[0].error == "CollectiveError"


def test_replacing_is_given_up_when_a_peer_does_not_come_within_hook_timeout() -> None:
    prompt, _ = run_ranks(on_every_rank.without_a_peer, 2, "core", "late", check_exit=True)
    replacing, _ = prompt
    assert replacing.seconds < 3.5 and "hook_timeout=1.0 s. No answer from rank 1." in replacing.text


@both_ddps
@both_policies
def test_replacing_on_one_rank_only_is_named_on_every_rank_at_once(kind: str, policy: str) -> None:
    for told in run_ranks(on_every_rank.alone, 2, kind, policy, "one rank", check_exit=False, timeout=20.0):
        assert "rank 1 calls replace before step 2, and this rank does not" in told.text
        assert told.seconds < 5.0


def test_a_name_that_exists_on_one_rank_only_is_refused_on_every_rank() -> None:
    other, here = run_ranks(on_every_rank.alone, 2, "torch", "fifo", "unknown name")
    assert (other.error, here.error) == ("AttachError", "SettingsError")
    assert "rank 1 cannot take part: " in other.text and "fp17" in other.text and "fp17" in here.text
