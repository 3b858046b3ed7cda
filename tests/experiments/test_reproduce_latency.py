"""Figures 9 and 10 of the DDP paper and PowerSGD at three rates: what is concluded from made-up measurements."""

from __future__ import annotations

import math
from typing import Any

import pytest

from commhooks.experiments.machine import cores, dilation
from commhooks.experiments.report.plots import DARK
from experiments.studies.blocks import Block, Table
from experiments.studies.reproduce.ddp import figure_9, figure_10
from experiments.studies.reproduce.powersgd import rates

TURNS = 6


def sentences(blocks: list[Block]) -> list[str]:
    return [block for block in blocks if isinstance(block, str)]


def tables(blocks: list[Block]) -> list[Table]:
    return [block for block in blocks if isinstance(block, Table)]


def pictures(blocks: list[Block]) -> list[bytes]:
    return [block.png(DARK) for block in blocks if not isinstance(block, str | Table)]


def test_a_rank_with_a_core_of_its_own_needs_no_dilation_and_four_on_each_need_four() -> None:
    assert dilation(1) == 1.0
    assert dilation(4 * cores()) == 4.0


CYCLES = figure_10.Settings(scenes=(("GPT", "1 Gbit/s"),), turns=TURNS)


def scene(every_8: float) -> dict[str, Any]:
    """Return 0.1 s of compute and 0.08 s of communication; an iteration in cycles of 8 takes as long as given."""
    seconds = {"never": [0.1] * TURNS, "1": [0.18] * TURNS, "2": [0.14] * TURNS, "4": [0.12] * TURNS}
    seconds["8"] = [every_8 * (1 + 0.01 * turn) for turn in range(TURNS)]
    return {
        "scenes": [
            {"model": "GPT", "rate": "1 Gbit/s", "parameters": 4, "seconds": dict.fromkeys(("core", "torch"), seconds)}
        ]
    }


def test_the_arithmetic_divides_what_synchronizing_adds_among_the_iterations() -> None:
    seconds = {"never": [0.1, 0.3, 0.1], "1": [0.18, 0.18, 0.5]}
    assert figure_10.arithmetic(seconds, 1) == pytest.approx(0.18)
    assert figure_10.arithmetic(seconds, 8) == pytest.approx(0.11)


def test_a_saving_is_reported_beside_the_arithmetic_and_its_absence_as_no_difference() -> None:
    blocks = figure_10.show(CYCLES, scene(every_8=0.09))
    first, *_ = sentences(blocks)
    assert "saves 49 %" in first and "the arithmetic gives 39 %" in first
    assert [row[0] for row in tables(blocks)[0].rows][:2] == ["ddp_core, every iteration", "ddp_core, every 2"]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures(blocks))
    assert "no difference seen" in sentences(figure_10.show(CYCLES, scene(every_8=0.178)))[0]
    assert (
        "takes longer if only every 8th iteration synchronizes: 2.05"
        in sentences(figure_10.show(CYCLES, scene(every_8=0.36)))[0]
    )


HOSTS = figure_9.Settings(models={"GPT": "gpt"}, worlds=(1, 2, 4), simulated=(8, 16), turns=TURNS)
ALONE = {
    "parameters": 2_500_000,
    "ready": [[0.04, 0.06]] * TURNS,
    "bucket_bytes": [4_000_000, 6_000_000],
    "seconds": {"1": [0.07] * TURNS, "2": [0.15] * TURNS, "4": [0.2 + 0.01 * turn for turn in range(TURNS)]},
}


def test_the_simulation_of_one_host_is_its_measurement_and_more_hosts_wait_for_their_bytes() -> None:
    assert figure_9.simulated(HOSTS, ALONE, 1) == pytest.approx(0.07)
    two, four, sixteen = (figure_9.simulated(HOSTS, ALONE, world) for world in (2, 4, 16))
    assert 0.04 + 8 * 10e6 / 1e9 + 0.01 < two < 1.1 * (0.04 + 8 * 10e6 / 1e9 + 0.01)  # a ring of two sends it once
    assert two < four < sixteen
    assert figure_9.simulated(HOSTS, ALONE, 16, "0.1ms") == pytest.approx(sixteen + 2 * 30 * 1e-4, abs=1e-3)


def test_hosts_are_compared_in_turns_with_two_and_with_the_simulation() -> None:
    blocks = figure_9.show(HOSTS, {"models": {"GPT": ALONE}})
    measured, simulated = tables(blocks)
    assert [row[1] for row in measured.rows] == ["0.00", "10.0", "15.0"]
    assert [row[0] for row in simulated.rows] == ["8", "16"] and "not measured" in simulated.title
    assert "takes 1.50 (1.33 to 1.67) times as long on 4 hosts as on 2" in sentences(blocks)[0]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures(blocks))


def run(hook: str, seed: int, *, seconds: float, accuracy: float, steps: int | None = 50) -> dict[str, Any]:
    parts = {"compute": seconds / 2, "compression": 0.0, "waiting": seconds / 2}
    found = {"payload_bytes": 1000.0, "steps_to_target": steps, "accuracy": accuracy, "held_out_loss": 0.1}
    return {"hook": hook, "seed": seed, "seconds": seconds, **parts, **found}


def at_rate(rate: str, factor: float, gain: float, steps: int | None = 50) -> dict[str, Any]:
    """Return runs of a hook that is `factor` times as fast as all-reduce, and as much more accurate as given."""
    runs = []
    for seed in range(3):
        runs.append(run("all-reduce", seed, seconds=1.0 + seed, accuracy=0.9 + 0.01 * seed))
        own = (1.0 + seed) / factor * (1 + 0.001 * seed)
        runs.append(run("fp16", seed, seconds=own, accuracy=0.9 + 0.01 * seed + gain + 0.001 * seed, steps=steps))
    return {"rate": rate, "steps": 100, "parameters": 9, "target": 0.25, "runs": runs}


def test_runs_are_compared_seed_by_seed_and_a_difference_that_holds_zero_is_not_seen() -> None:
    settings = rates.Settings(task="digits", hooks=("all-reduce", "fp16"), steps=(("1 Gbit/s", 100),), seeds=3)
    fast, same = at_rate("10 Mbit/s", 4.0, -0.05), at_rate("1 Gbit/s", 1.0005, -0.001)
    assert rates.speed_up(fast, "fp16", "all-reduce").mean == pytest.approx(4, rel=0.01)
    assert rates.gained(fast, "fp16", "all-reduce").mean == pytest.approx(-4.9)
    blocks = rates.show(settings, {"rates": [fast, same]})
    accuracy, at_10, at_1000 = sentences(blocks)
    assert accuracy == "In held-out accuracy no difference from all-reduce was seen for fp16."
    assert "At 10 Mbit/s a step is faster than with all-reduce; times as fast: 4.00 (" in at_10
    assert at_1000 == "At 1 Gbit/s no difference in a step's time from all-reduce was seen for fp16."
    lower = sentences(rates.show(settings, {"rates": [same, fast]}))[0]
    assert "lower than with all-reduce; difference in points: -4.90 (" in lower
    same["runs"][1]["held_out_loss"] = math.nan
    diverged = sentences(rates.show(settings, {"rates": [fast, same]}))[0]
    assert diverged.endswith("count with what they still guessed right: 1 of 3 with fp16.")
    assert all(picture.startswith(b"\x89PNG") for picture in pictures(blocks))


def test_a_time_to_a_loss_is_left_out_if_a_run_did_not_reach_it() -> None:
    settings = rates.Settings(task="digits", hooks=("all-reduce", "fp16"), steps=(("1 Gbit/s", 100),), seeds=3)
    never = at_rate("1 Gbit/s", 2.0, 0.0, steps=None)
    accuracies, times = tables(rates.show(settings, {"rates": [never]}))
    assert [row[-1] for row in accuracies.rows] == ["50", "0 of 3 runs"]
    assert [row[-1] for row in times.rows] == ["100", "—"]
    assert math.isnan(rates.by_seed(never, "fp16", "steps_to_target")[0])
