"""Which rung of a ladder is chosen, on simulated links; the step-time model says what each step takes."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from commhooks import CheckpointError, SettingsError
from commhooks.communicators.links import Link
from commhooks.control import AdaptiveRule
from commhooks.control.deciding import Decider, link_of
from commhooks.control.rule import FullRule
from experiments.predicting.step_time import Step, step_time
from tests.commhooks.simulated_ladder import COMPUTE, FAST, RANKS, SLOW, Run, ladder, rung
from tests.tiers import rows

PHASE = 100
noises = pytest.mark.parametrize("noise", [0.0, 0.05, 0.15])
policies = pytest.mark.parametrize("policy", ["fifo", "fused"])


def back_and_forth(step: int) -> Link:
    return SLOW if PHASE <= step < 2 * PHASE else FAST


@noises
@policies
@pytest.mark.parametrize("seed", range(3))
def test_a_link_a_hundred_times_slower_and_back_is_followed_within_ten_steps_at_90_percent_of_the_best(
    noise: float, policy: str, seed: int
) -> None:
    run = Run(ladder(policy), back_and_forth, noise=noise, seed=seed)
    run.go_on(3 * PHASE)
    for phase, link in enumerate((FAST, SLOW, FAST)):
        taken = sum(run.seconds[phase * PHASE : (phase + 1) * PHASE])
        assert PHASE * run.best(link) * (1 + noise / 2) / taken >= 0.9, phase  # a noisy step takes half of it longer
        on_link = [step_time(step, link, RANKS).seconds for step in run.ladder]
        settled = run.rungs[phase * PHASE + (20 if phase == 0 else 10) : (phase + 1) * PHASE]
        assert max(on_link[rung] for rung in settled) <= (1.05 + 2 * noise) * min(on_link)


def test_the_step_in_which_the_link_slows_down_is_the_only_slow_one() -> None:
    run = Run(ladder(), back_and_forth)
    run.go_on(2 * PHASE)
    dense = step_time(run.ladder[0], SLOW, RANKS).seconds
    assert [step for step, seconds in enumerate(run.seconds) if seconds > dense / 2] == [PHASE]


@pytest.mark.parametrize("halfway", [5e8, 2e8, 1.2e8])
def test_a_link_that_slows_down_in_the_middle_of_a_step_costs_no_more_than_that_step_and_the_next(
    halfway: float,
) -> None:
    def link(step: int) -> Link:
        return FAST if step < PHASE else Link(rate=halfway, latency=1e-4) if step == PHASE else SLOW

    run = Run(ladder(), link)
    run.go_on(PHASE + 20)
    dense = step_time(run.ladder[0], SLOW, RANKS).seconds
    assert run.rungs[PHASE + 2] in (3, 4)
    assert max(run.seconds[PHASE + 2 :]) < dense / 2


def test_every_change_of_a_link_is_answered_within_ten_steps_also_the_fifth() -> None:
    run = Run(ladder(), lambda step: SLOW if step // PHASE % 2 else FAST)
    run.go_on(10 * PHASE)
    for phase in range(1, 10):
        assert {rung > 0 for rung in run.rungs[phase * PHASE + 10 : (phase + 1) * PHASE]} == {phase % 2 == 1}, phase


@pytest.mark.parametrize("link", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("start", range(5))
def test_every_rung_is_tried_once_wherever_the_run_begins_and_then_the_best_one_stays(link: Link, start: int) -> None:
    run = Run(ladder(), lambda step: link, rung=start)
    run.go_on(200)
    order = [rung for rung, _ in itertools.groupby(run.rungs)]
    assert order[:5] == [start, *(number for number in range(5) if number != start)]
    assert len(order) <= 7  # the best one, after one that differs from it by less than the model knows
    assert step_time(run.ladder[order[-1]], link, RANKS).seconds <= run.best(link) / (1 - AdaptiveRule().margin)


@pytest.mark.parametrize("pattern", list(itertools.permutations(range(5)))[::7])
def test_the_best_rung_is_found_in_every_order_of_the_ladder(pattern: tuple[int, ...]) -> None:
    rungs = [ladder()[number] for number in pattern]
    run = Run(rungs, back_and_forth)
    run.go_on(2 * PHASE)
    assert step_time(rungs[run.rungs[PHASE - 1]], FAST, RANKS).seconds <= run.best(FAST) / (1 - AdaptiveRule().margin)
    assert step_time(rungs[run.rungs[-1]], SLOW, RANKS).seconds <= run.best(SLOW) / (1 - AdaptiveRule().margin)


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
    assert run.moves_after(20) == [] and [step for step in run.probes if step >= 20] == []


@noises
def test_a_link_that_slows_down_a_little_in_every_step_is_followed(noise: float) -> None:
    def link(step: int) -> Link:
        return Link(rate=max(1e8, 1e10 * 0.97 ** max(0, step - 50)), latency=1e-4)

    run = Run(ladder(), link, noise=noise)
    run.go_on(300)
    best = sum(run.best(link(step)) for step in range(50, 300)) * (1 + noise / 2)
    assert best / sum(run.seconds[50:]) >= 0.9


def test_work_that_grows_on_every_rung_alike_moves_nothing() -> None:
    def rungs(compute: float) -> list[Step]:
        return [ladder(compute=compute)[number] for number in (0, 2, 4)]  # no two of them are about equally fast

    run = Run(rungs(COMPUTE), lambda step: SLOW, ladder_at=lambda step: rungs(2 * COMPUTE if step >= 60 else COMPUTE))
    run.go_on(200)
    assert run.moves_after(20) == [] and run.rungs[-1] == 2


def test_a_link_that_alternates_within_the_regret_is_left_alone_for_longer_and_longer() -> None:
    """Fast and slow differ by less than what is urgent: after each mistake the ban is twice as long."""
    rungs = [rung("all-reduce", 400_000, 0.0), rung("all-reduce", 20_000, 0.04)]
    slower = Link(rate=1.1e8, latency=1e-4)
    run = Run(rungs, lambda step: slower if step // 12 % 2 else FAST)
    fast, slow = ([step_time(step, link, RANKS).seconds for step in rungs] for link in (FAST, slower))
    assert fast[0] < 0.95 * fast[1] and slow[1] < 0.95 * slow[0] < 2 * 0.95 * slow[1]
    run.go_on(1200)
    changes = 1200 // 12
    assert 2 <= len(run.moves_after(20)) < changes / 2
    first, second = (len([s for s, _, _ in run.moves_after(20) if low <= s < low + 600]) for low in (0, 600))
    assert second <= first


def test_of_rungs_that_are_equally_fast_the_first_is_used() -> None:
    run = Run([rung("all-reduce", 100, 0.0), rung("all-reduce", 50, 0.0)], lambda step: FAST, rung=1)
    run.go_on(40)
    assert run.rungs[-1] == 0 and len(run.moves) == 1


def test_a_rung_that_saves_more_than_a_tie_and_less_than_the_margin_is_not_moved_to() -> None:
    slower = Link(rate=1e9, latency=1e-4)
    steps = [rung("all-reduce", payload, 0.0) for payload in (600_000, 300_000)]
    run = Run(steps, lambda step: FAST if step < 40 else slower)
    run.go_on(200)
    dense, half = (step_time(step, slower, RANKS).seconds for step in steps)
    assert 0.95 * dense < half < 0.98 * dense and set(run.rungs[40:]) == {0}


def test_a_rung_that_never_pays_costs_its_visit_and_no_more() -> None:
    run = Run([rung("all-reduce", 4000, 0.0), rung("all-reduce", 4000, 1.0)], lambda step: FAST)
    run.go_on(400)
    assert run.rungs.count(1) == FullRule().visit


def test_while_nothing_changes_and_nothing_could_be_gained_there_is_hardly_a_probe() -> None:
    run = Run(ladder(), lambda step: FAST)
    run.go_on(30)
    run.probes.clear()
    run.go_on(640)
    assert run.rungs[-1] == 0 and len(run.probes) == 640 // FullRule().idle_look


@pytest.mark.parametrize("at", [1, 15, 104, *rows([2, 3, 9, 14, 16, 50, 100, 101, 102, 103, 200, 203, 209])])
def test_a_decider_that_is_saved_and_loaded_decides_as_the_one_that_was_not(at: int) -> None:
    whole, resumed = (Run(ladder(), back_and_forth, noise=0.1, seed=5) for _ in range(2))
    whole.go_on(260)
    resumed.go_on(at)
    file = io.BytesIO()
    torch.save(resumed.decider.state_dict(), file)
    file.seek(0)
    resumed.decider = Decider(5, RANKS, 0, FullRule())
    resumed.decider.load_state_dict(torch.load(file))
    resumed.go_on(260 - at)
    assert (resumed.rungs, resumed.moves, resumed.probes) == (whole.rungs, whole.moves, whole.probes)
    assert resumed.decider.state_dict() == whole.decider.state_dict()


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("rungs"),
        lambda state: state.update(rungs=state["rungs"][:2]),
        lambda state: state.update(rung=7),
        lambda state: state.update(unheard_of=1),
        lambda state: state["rungs"][0].update(steps=[1.0]),
        lambda state: state["rungs"][0].update(steps=[(1.0, 2.0)]),
        lambda state: state.update(recent=7),
    ],
    ids=["without rungs", "fewer rungs", "no such rung", "unknown field", "steps", "short step", "recent"],
)
def test_damaged_state_raises_and_changes_nothing(damage: Callable[[dict[str, Any]], object]) -> None:
    run = Run(ladder(), back_and_forth)
    run.go_on(20)
    before, state = run.decider.state_dict(), run.decider.state_dict()
    damage(state)
    with pytest.raises(CheckpointError, match="Adaptive: the state"):
        run.decider.load_state_dict(state)
    assert run.decider.state_dict() == before


NO_SECONDS = ["x", -7, math.nan, math.inf, None, True]
NO_COUNTS = ["x", -7, math.nan, 1.5, None, True]


def places(state: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield every number in a state: where it is, and what holds it under which key."""
    for key, held in state.items() if isinstance(state, dict) else enumerate(state):
        name = f"{where}[{key}]" if isinstance(key, int) else f"{where}.{key}".lstrip(".")
        if isinstance(held, (dict, list)):
            yield from places(held, name)
        elif isinstance(held, (int, float)):
            yield name, state, key


def test_every_number_of_a_state_that_could_not_have_been_measured_is_refused_by_name() -> None:
    run = Run(ladder(), back_and_forth)
    run.go_on(120)
    before = run.decider.state_dict()
    plain = json.loads(json.dumps(before))  # lists in place of tuples, which can be changed
    Decider(5, RANKS, 0, FullRule()).load_state_dict(plain)
    names = []
    for name, holder, key in places(plain):
        kept = holder[key]
        for wrong in [0.5, 1] if isinstance(kept, bool) else NO_COUNTS if isinstance(kept, int) else NO_SECONDS:
            if wrong is None and name in ("before", "favourite"):
                continue
            holder[key] = wrong
            with pytest.raises(CheckpointError, match="the state is damaged") as caught:
                run.decider.load_state_dict(plain)
            assert re.search(re.escape(name.split("[")[0]), str(caught.value)), (name, wrong, str(caught.value))
        holder[key] = kept
        names.append(name)
    assert len(names) > 60 and run.decider.state_dict() == before
    for name, value in (("rung", 5), ("before", 5), ("favourite", -1), ("latency", "x")):
        with pytest.raises(CheckpointError, match=rf"the state is damaged\. {name}: expected a .*, got {value!r}"):
            run.decider.load_state_dict(before | {name: value})
    damaged = plain["rungs"][1] | {"sends": [["broadcast", 1, 1], ["all-reduce", 1, 0]]}
    with pytest.raises(CheckpointError, match=r"rungs\[1\]\.sends\[0\]: expected .*sends\[1\]\.number: expected"):
        run.decider.load_state_dict(plain | {"rungs": [plain["rungs"][0], damaged, *plain["rungs"][2:]]})


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_probe_finds_the_rate_and_latency_of_a_link(ranks: int) -> None:
    link = Link(rate=3e8, latency=2e-4)
    small, large = (link.transfer("all-reduce", payload, ranks).seconds for payload in (4, 1_000_000))
    found = link_of(small, large, 1_000_000, ranks)
    assert (found.rate, found.latency) == pytest.approx((3e8, 2e-4))


def test_a_probe_whose_large_message_was_the_faster_is_a_fast_link_and_no_error() -> None:
    assert 0 < link_of(2e-3, 1e-3, 1_000_000, 2).rate < math.inf


IMPOSSIBLE: list[tuple[str, float]] = [
    ("margin", 0.0), ("margin", 1.0), ("change", -0.1), ("tie", 0.05), ("tie", -0.01), ("visit", 1), ("visit", 2.5),
    ("look", 0), ("idle_look", 0), ("urgent", 1.0), ("urgent", math.inf), ("regret", 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_a_rule_that_cannot_work_raises(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=rf"AdaptiveRule\({name}="):
        FullRule(**{name: value})


@pytest.mark.parametrize("name", ["tie", "visit", "change", "idle_look", "urgent", "regret"])
def test_a_setting_that_rules_no_longer_have_is_refused_in_words(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"AdaptiveRule\({name}=1\): {name} is no longer a setting; leave it out"):
        AdaptiveRule(**{name: 1})
    assert [field.name for field in dataclasses.fields(AdaptiveRule)] == ["margin", "look"]


@pytest.mark.parametrize(("margin", "tie"), [(0.05, 0.02), (0.3, 0.02), (0.01, 0.004)])
def test_ties_are_narrower_than_any_margin(margin: float, tie: float) -> None:
    assert FullRule.of(AdaptiveRule(margin=margin)) == FullRule(margin=margin, tie=tie)
