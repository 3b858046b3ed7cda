"""A controller over real attachments. What each rank runs is in adaptive_in_worlds.py."""

from __future__ import annotations

import pytest

from tests.commhooks import adaptive_in_worlds as on_every_rank
from tests.commhooks.adaptive_in_worlds import CHANGE, LADDER, SAVED
from tests.commhooks.ranks import run_ranks


@pytest.mark.kernels
@pytest.mark.parametrize("kind", ["core", "torch"])
def test_replicas_are_equal_through_every_move_and_a_resumed_run_is_the_one_that_was_not_interrupted(kind: str) -> None:
    first, second = run_ranks(on_every_rank.saved_and_resumed, 2, kind)
    assert first == second  # the means of all steps, bit for bit, and the decisions
    whole, resumed = first
    moves = [line for line in whole.decisions if "to measure it" not in line]
    assert len(moves) >= 2 and any(line.startswith(f"step {CHANGE + 1}: ") for line in moves)
    assert resumed.digests == whole.digests[SAVED:]
    assert (resumed.compressors, resumed.decisions) == (whole.compressors, whole.decisions)
    assert "PowerSGD" in resumed.compressors[0]


def test_ranks_that_measure_this_machine_know_and_decide_the_same() -> None:
    (state, digests, told), second = run_ranks(on_every_rank.measured, 2, "core")
    assert (state, digests, told) == second
    assert told >= len(LADDER) - 1


def test_what_was_measured_with_another_number_of_ranks_is_measured_anew_on_the_rung_that_was_saved() -> None:
    assert run_ranks(on_every_rank.of_other_ranks, 2, "core") == [[True, 2, None, True]] * 2


def test_a_rank_whose_step_does_not_come_within_hook_timeout_is_named_on_the_others() -> None:
    first, late, third = run_ranks(on_every_rank.without_a_rank, 3, "core", 0.5)
    for told, seconds in (first, third):
        assert 0.5 <= seconds < 4
        assert told.error == "CollectiveError"
        assert "was not called within hook_timeout=0.5 s. No answer from rank 1." in told.text
    assert late[1] < 4  # its first exchange found theirs; it does not wait for more


def test_a_controller_that_cannot_work_raises_on_every_rank_and_the_attachment_stays() -> None:
    for rank, told in enumerate(run_ranks(on_every_rank.refusals, 2, "core")):
        errors = {what: one.error for what, one in told.items()}
        assert errors == dict.fromkeys(told, "SettingsError") | {
            "another ladder": "AttachError",
            "another's state": "CheckpointError",
            "damaged state": "CheckpointError",
            "another rank's state": "CheckpointError",
            "another rank's damaged state": "CheckpointError",
            "no rung": "CheckpointError",
            "no step": "CheckpointError",
            "no ranks": "CheckpointError",
            "detached": "AttachError",
        }
        assert "ladder must have at least two compressors" in told["one rung"].text
        assert "ladder must have at least two compressors" in told["no ladder"].text
        assert "Did you mean 'powersgd'" in told["unknown"].text
        assert "is there twice" in told["twice"].text
        assert "noop averages nothing" in told["no average"].text
        assert "must be a rung of the ladder" in told["not in use"].text
        assert "'head.*' must match a parameter's name" in told["this model"].text
        assert "'powersdg'" in told["another rank's"].text and ("rank 1" in told["another rank's"].text) == (rank == 0)
        assert "ranks disagree about ladder" in told["another ladder"].text
        assert "ladder: saved" in told["another's state"].text
        assert "ranks pass different states; by rank: " in told["another rank's state"].text
        assert ("rank 1: " in told["another rank's damaged state"].text) == (rank == 0)
        assert "the state is damaged. decisions[0]: Decision(step=-1" in told["no step"].text
        assert "the state is damaged. ranks: '2'" in told["no ranks"].text
        assert "in use, Cast(dtype=torch.bfloat16), must be a rung" in told["replaced by another"].text
        assert "at least 2 are needed" in told["one rank"].text
