"""A failure on one rank reaches every rank, soon, in words. What each rank runs is in failures_in_worlds.py."""

from __future__ import annotations

import signal

import pytest

from tests.commhooks import failures_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks
from tests.world import WorldError

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])


@both_ddps
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "ValueError: a compressor went wrong"),
        ("exit", "SystemExit: 3"),
        ("wrong result", "must return a Result whose mean has the bucket's shape"),
    ],
)
def test_a_compressor_that_fails_on_one_rank_is_named_on_every_rank(kind: str, how: str, cause: str) -> None:
    told = run_ranks(on_every_rank.fail, 3, kind, how)
    for rank, (error, text, next_text, seconds) in enumerate(told):
        assert seconds < 10
        assert f"rank {rank}, step 2, bucket " in text
        assert "rank 1, step 2, bucket 1 (parameters weights." in text and cause in text
        if kind == "core":  # PyTorch's reducer knows RuntimeError only
            assert error == ("CompressorError" if rank == 1 else "CollectiveError")
            assert cause in next_text or "weights." in next_text
        else:
            assert cause in next_text


@both_ddps
def test_when_a_rank_is_killed_the_others_raise(kind: str) -> None:
    with pytest.raises(WorldError) as failure:
        run_ranks(on_every_rank.fail, 3, kind, "kill")
    survivors = [failure.value.outcomes[rank] for rank in (0, 2)]
    assert failure.value.outcomes[1].exit_code == -signal.SIGKILL
    for outcome in survivors:
        assert outcome.exit_code == 0
        _, text, _, seconds = outcome.value
        assert seconds < 10
        assert f"rank {outcome.rank}, step 2, bucket " in text and "parameters weights." in text
        assert "No answer from rank 1." in text


@both_ddps
def test_a_rank_that_does_not_come_in_time_is_given_up(kind: str) -> None:
    prompt, late = run_ranks(on_every_rank.fail, 2, kind, "stall", hook_timeout=1.0)
    assert 1.0 < prompt[3] < 5.0
    for _, text, _, _ in (prompt, late):
        assert "hook_timeout=1.0 s. No answer from rank 1." in text


@both_ddps
def test_an_inf_on_one_rank_spoils_that_step_on_every_rank_and_no_other(kind: str) -> None:
    for finite, distance in run_ranks(on_every_rank.inf_on_one_rank, 2, kind):
        assert finite == [True, True, False, True, True]
        assert distance == 0.0


@both_ddps
def test_an_attachment_that_nobody_uses_any_more_is_collected_with_its_thread(kind: str) -> None:
    assert run_ranks(on_every_rank.forgotten, 2, kind) == [True, True]


@pytest.mark.parametrize("how", ["destroy", "leave"])
def test_processes_with_an_idle_scheduler_end_well(how: str) -> None:
    run_ranks(on_every_rank.ends_without_a_word, 2, how)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["destroy", "leave"])
def test_a_hundred_worlds_with_an_idle_scheduler_end_well(how: str) -> None:
    for _ in range(100):
        run_ranks(on_every_rank.ends_without_a_word, 2, how)
