"""Which candidate of a ladder is chosen, on simulated links; the step-time model says what each step takes."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from commhooks import CheckpointError, SettingsError
from commhooks.communicators.collective import ring_bytes
from commhooks.control import AdaptiveRule
from commhooks.control.decider import Decider
from commhooks.control.link import Link as Found
from commhooks.control.link import hops_of, link_of
from commhooks.control.state import read
from commhooks.experiments.timing.link import Link
from commhooks.experiments.timing.step_time import step_time
from tests.commhooks.simulated_ladder import FAST, RANKS, SLOW, Run, candidate, ladder
from tests.tiers import rows

PHASE = 100
noises = pytest.mark.parametrize("noise", [0.0, 0.05, 0.15])


def back_and_forth(step: int) -> Link:
    return SLOW if PHASE <= step < 2 * PHASE else FAST


@noises
@pytest.mark.parametrize("policy", ["fifo", "fused"])
def test_a_link_a_hundred_times_slower_and_back_is_followed_within_ten_steps_at_90_percent_of_the_best(
    noise: float, policy: str
) -> None:
    run = Run(ladder(policy), back_and_forth, noise=noise)
    run.go_on(3 * PHASE)
    for phase, link in enumerate((FAST, SLOW, FAST)):
        taken = sum(run.seconds[phase * PHASE : (phase + 1) * PHASE])
        assert PHASE * run.best(link) * (1 + noise / 2) / taken >= 0.9, phase  # a noisy step takes half of it longer
        on_link = [step_time(step, link, RANKS).seconds for step in run.ladder]
        settled = run.candidates[phase * PHASE + (20 if phase == 0 else 10) : (phase + 1) * PHASE]
        assert max(on_link[number] for number in settled) <= (1.05 + 2 * noise) * min(on_link)


@pytest.mark.parametrize("halfway", [5e8, 2e8, 1.2e8])
def test_a_link_that_slows_down_in_the_middle_of_a_step_costs_no_more_than_that_step_and_the_next(
    halfway: float,
) -> None:
    def link(step: int) -> Link:
        return FAST if step < PHASE else Link(rate=halfway, latency=1e-4) if step == PHASE else SLOW

    run = Run(ladder(), link)
    run.go_on(PHASE + 20)
    dense = step_time(run.ladder[0], SLOW, RANKS).seconds
    assert run.candidates[PHASE + 2] in (3, 4)
    assert max(run.seconds[PHASE + 2 :]) < dense / 2


@pytest.mark.parametrize("link", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("start", range(5))
def test_every_candidate_is_tried_once_wherever_the_run_begins_and_then_the_best_one_stays(
    link: Link, start: int
) -> None:
    run = Run(ladder(), lambda step: link, candidate=start)
    run.go_on(200)
    order = [number for number, _ in itertools.groupby(run.candidates)]
    assert order[:5] == [start, *(number for number in range(5) if number != start)]
    assert len(order) <= 7  # the best one, after one that differs from it by less than the model knows
    assert step_time(run.ladder[order[-1]], link, RANKS).seconds <= run.best(link) / (1 - AdaptiveRule().margin)


@noises
@pytest.mark.parametrize("link", [FAST, SLOW], ids=["fast", "slow"])
def test_one_late_step_moves_nothing(noise: float, link: Link) -> None:
    quiet, late = (
        Run(ladder(), lambda step: link, noise=noise, late=lambda step, at=at: 1.0 if step == at else 0.0)  # type: ignore[misc]  # 'Cannot infer type of lambda'
        for at in (-1, 60)
    )
    for run in (quiet, late):
        run.go_on(70)
    assert late.moves_after(60) == quiet.moves_after(60)
    assert 60 in late.probes  # it was looked into


def test_a_rank_that_is_late_is_not_taken_for_a_slow_link() -> None:
    run = Run(ladder(), lambda step: FAST, late_rank=lambda step: 1.0 if step >= 60 else 0.0)
    run.go_on(80)
    assert run.moves_after(20) == [] and set(range(60, 80)) - set(run.probes)  # it was not looked into again and again


@noises
def test_a_link_that_slows_down_a_little_in_every_step_is_followed(noise: float) -> None:
    def link(step: int) -> Link:
        return Link(rate=max(1e8, 1e10 * 0.97 ** max(0, step - 50)), latency=1e-4)

    run = Run(ladder(), link, noise=noise)
    run.go_on(300)
    best = sum(run.best(link(step)) for step in range(50, 300)) * (1 + noise / 2)
    assert best / sum(run.seconds[50:]) >= 0.9


@noises
def test_between_candidates_that_are_about_equally_fast_a_noisy_link_moves_hardly_anything(noise: float) -> None:
    for rate in (2e8, 7e8, 1e9, 2e9, 5e9):
        run = Run(ladder(), lambda step, rate=rate: Link(rate=rate, latency=1e-4), noise=noise)  # type: ignore[misc]  # 'Cannot infer type of lambda'
        run.go_on(500)
        assert len(run.moves_after(20)) <= 1, rate


def test_a_candidate_that_saves_more_than_a_tie_and_less_than_the_margin_is_not_moved_to() -> None:
    slower = Link(rate=1e9, latency=1e-4)
    steps = [candidate("all-reduce", payload, 0.0) for payload in (600_000, 300_000)]
    run = Run(steps, lambda step: FAST if step < 40 else slower)
    run.go_on(200)
    dense, half = (step_time(step, slower, RANKS).seconds for step in steps)
    assert 0.95 * dense < half < 0.98 * dense and set(run.candidates[40:]) == {0}


def test_while_nothing_changes_the_link_is_probed_as_often_as_the_rule_says() -> None:
    run = Run(ladder(), lambda step: FAST)
    run.go_on(30)
    run.probes.clear()
    run.go_on(640)
    assert run.candidates[-1] == 0 and len(run.probes) == 640 // AdaptiveRule().look


@pytest.mark.parametrize("at", [1, 15, 104, *rows([2, 3, 9, 14, 16, 50, 100, 101, 102, 103, 200, 203, 209])])
def test_a_decider_that_is_saved_and_loaded_decides_as_the_one_that_was_not(at: int) -> None:
    whole, resumed = (Run(ladder(), back_and_forth, noise=0.1, seed=5) for _ in range(2))
    whole.go_on(260)
    resumed.go_on(at)
    file = io.BytesIO()
    torch.save(dataclasses.asdict(resumed.decider), file)
    file.seek(0)
    resumed.decider = read(Decider, torch.load(file), "decider")
    resumed.go_on(260 - at)
    assert (resumed.candidates, resumed.moves, resumed.probes) == (whole.candidates, whole.moves, whole.probes)
    assert resumed.decider == whole.decider


NO_SECONDS = ["x", -7, math.nan, math.inf, None, True]
NO_COUNTS = ["x", -7, math.nan, 1.5, None, True]


def places(state: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield every entry of a state but the state itself: its name, and what holds it under which key."""
    for key, held in state.items() if isinstance(state, dict) else enumerate(state):
        name = f"{where}[{key}]" if isinstance(key, int) else f"{where}.{key}"
        yield name, state, key
        if isinstance(held, (dict, list)):
            yield from places(held, name)


def test_every_entry_of_a_state_that_could_not_have_been_measured_or_decided_is_refused_by_name() -> None:
    run = Run(ladder(), back_and_forth)
    run.go_on(120)
    plain = json.loads(json.dumps(dataclasses.asdict(run.decider)))
    assert read(Decider, plain, "state") == run.decider
    names = []
    for name, holder, key in places(plain, "state"):
        kept = holder[key]
        for wrong in NO_COUNTS if isinstance(kept, int) else NO_SECONDS if isinstance(kept, float) else ["x", {}]:
            if wrong is None and name == "state.favourite":
                continue
            holder[key] = wrong
            with pytest.raises(CheckpointError, match=rf"state is damaged.* {re.escape(name)}: expected .*, got"):
                read(Decider, plain, "state")
        holder[key] = kept
        names.append(name)
    assert len(names) > 40 and read(Decider, plain, "state") == run.decider


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"candidate": 5}, "state: candidate 5 and favourite None must be below 5"),
        ({"link": {"rate": 0.0, "latency": 0.0}}, r"state.link: Link\(rate=0.0\): rate must be above 0"),
        ({"unheard_of": 1}, "state: expected the entries rule, .*, got .*'unheard_of'"),
    ],
    ids=["candidate", "link", "another layout"],
)
def test_entries_that_do_not_go_together_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    state = dataclasses.asdict(Run(ladder(), back_and_forth).decider)
    with pytest.raises(CheckpointError, match=f"the state is damaged.* {named}"):
        read(Decider, state | change, "state")


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_probe_finds_the_rate_and_latency_of_a_link(ranks: int) -> None:
    link = Found(rate=3e8, latency=2e-4)
    hops = hops_of("all-reduce", ranks)
    small, large = (link.seconds(ring_bytes("all-reduce", size, ranks), hops) for size in (4, 1_000_000))
    found = link_of(small, large, 1_000_000, ranks)
    assert (found.rate, found.latency) == pytest.approx((3e8, 2e-4))


def test_a_probe_whose_large_message_was_the_faster_is_a_fast_link_and_no_error() -> None:
    assert 0 < link_of(2e-3, 1e-3, 1_000_000, 2).rate < math.inf


@pytest.mark.parametrize(("name", "value"), [("margin", 0.0), ("margin", 1.0), ("look", 0), ("look", 2.5)])
def test_a_rule_that_cannot_work_raises(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=rf"AdaptiveRule\({name}="):
        AdaptiveRule(**{name: value})
