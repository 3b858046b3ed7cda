"""A failure on one rank soon reaches every rank, in words. What each rank runs is in failures_in_worlds.py."""

from __future__ import annotations

import itertools
import random
import re
import signal

import pytest

from tests.commhooks import failures_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks, survived
from tests.world import Outcome, run_world_outcomes

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])
both_policies = pytest.mark.parametrize("policy", ["fifo", "fused"])


CAUSES = {
    "raise": "ValueError: a compressor went wrong",
    "raise late": "ValueError: a compressor went wrong",
    "exit": "SystemExit: 3",
    "None": "the compressor asked for something that is not a request (got None)",
    "shape": "a mean of shape (3199,) was written for gradients of shape (3200,)",
}


@both_ddps
@both_policies
def test_a_compressor_that_fails_on_one_rank_is_named_on_every_rank(kind: str, policy: str) -> None:
    ways = list(itertools.product(CAUSES, (1, 2)))
    for rank, told in enumerate(run_ranks(on_every_rank.failures, 3, kind, policy, ways, check_exit=True)):
        for way, one in zip(ways, told, strict=True):
            cause = CAUSES[way[0]]
            assert one.seconds < 10, way
            # What fails after its last collective kept nobody waiting: the others hear of it when they next wait.
            step = "2" if rank == 1 or way[0] in ("raise", "exit", "None") else "[23]"
            assert re.search(f"rank {rank}, step {step}, bucket ", one.text), way
            assert "rank 1, step 2, bucket 1 (parameters weights." in one.text and cause in one.text, way
            assert cause in one.next_text, way
            if kind == "core":  # PyTorch's reducer knows RuntimeError only
                assert one.error == ("CompressorError" if rank == 1 else "CollectiveError"), way


def check_survivors(outcomes: list[Outcome], where: str) -> None:
    """Assert that rank 1 was killed, and that the others were told so and ended by themselves."""
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert survived(outcome), outcome.describe()
        told: on_every_rank.Told = outcome.value
        assert told.seconds < 10
        assert f"rank {outcome.rank}, {where}" in told.text and "parameters weights." in told.text, told.text
        assert "No answer from rank 1." in told.text and "No answer from rank 1." in told.next_text, told


@both_ddps
@pytest.mark.parametrize(("policy", "rounds"), [("fifo", 1), ("fused", 2)])
def test_when_a_rank_is_killed_the_others_raise(kind: str, policy: str, rounds: int) -> None:
    killer = on_every_rank.Failing(how="kill", rounds=rounds)
    check_survivors(run_world_outcomes(on_every_rank.fail, 3, kind, policy, killer), "step 2, bucket ")


@pytest.mark.parametrize(
    ("kind", "policy", "rounds", "hook_timeout"),
    [("core", "fifo", 2, 0.5), ("core", "fused", 1, 0.5), ("torch", "fifo", 1, 0.5), ("torch", "fused", 2, 2.0)],
)
def test_a_rank_that_does_not_come_in_time_is_given_up(
    kind: str, policy: str, rounds: int, hook_timeout: float
) -> None:
    stalling = on_every_rank.Failing(how="stall", rounds=rounds, stall_seconds=hook_timeout + 2)
    prompt, late = run_ranks(on_every_rank.fail, 2, kind, policy, stalling, hook_timeout, check_exit=True)
    assert hook_timeout < prompt.seconds < 10
    for told in (prompt, late):
        for text in (told.text, told.next_text):
            assert f"hook_timeout={hook_timeout} s. No answer from rank 1." in text


@pytest.mark.soak
@pytest.mark.timeout(600)
@both_ddps
@both_policies
def test_when_a_rank_is_killed_at_any_time_the_others_raise_10_times(kind: str, policy: str) -> None:
    for repetition in range(10):
        delay = random.Random(f"{kind}, {policy}, {repetition}").random()
        outcomes = run_world_outcomes(on_every_rank.killed_at_any_time, 3, kind, policy, delay)
        check_survivors(outcomes, "step ")


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
