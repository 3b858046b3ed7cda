"""One advice: the safest gain first, from predictions as from measured runs."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from commhooks.experiments.accuracy import Accuracy
from commhooks.experiments.advice import (
    DILOCO_COSTS,
    DILOCO_MARGIN,
    FEEDBACK,
    Cost,
    Option,
    advise,
    cost_of_diloco,
    line_of,
    predicted,
    with_usual_feedback,
)
from commhooks.experiments.results.intervals import Interval
from commhooks.experiments.results.verdicts import Judged, Range, Verdict
from experiments.studies import advice as study

ROOT = Path(__file__).parents[2]
REPRODUCTIONS = ROOT / "docs/reproductions"
NONE = (Cost(0.0, 0.001, 0.025, "nats on gpt"),)
SOME = (Cost(0.024, 0.029, 0.025, "nats on gpt"),)
MUCH = (Cost(0.98, 1.04, 0.025, "nats on gpt"),)


def option(hook: str, times: float, costs: Sequence[Cost] = (), *, sure: float = 0.02) -> Option:
    return Option(hook=hook, speed_up=predicted(times, sure / 2), costs=costs)


CAST, LOW_RANK, SPARSE = (
    option("fp16", 1.9, NONE),
    option("powersgd:policy=fused,rank=4", 9.9, SOME),
    option("top-k:ratio=0.01", 11.0, MUCH),
)


def test_the_safest_gain_comes_first_and_the_cheapest_faster_hook_second_with_its_cost() -> None:
    found = advise([SPARSE, LOW_RANK, CAST])
    assert (found.hook, found.rank, found.policy) == ("fp16", None, "fifo")
    assert found.line == 'commhooks.attach(model, "fp16")'
    assert found.sentence.startswith("Use fp16: its steps are 1.90 times as fast (1.86 to 1.94)")
    assert found.faster == LOW_RANK.hook and "0.024 nats on gpt" in found.sentence and "top-k" not in found.sentence
    assert advise([CAST, option("mine:Codec", 20.0)]).faster is None, "its cost was not measured"
    fifo = option("powersgd:rank=4", 10.2, SOME)
    assert advise([CAST, fifo, LOW_RANK]).faster == LOW_RANK.hook, "about as fast, and fused"
    assert advise([CAST, option(fifo.hook, 12.0, SOME), LOW_RANK]).faster == fifo.hook
    slow = option("diloco:every=30,compressor=int4", 40.0, cost_of_diloco("int4", 30))
    assert "8.8 % of the loss on gpt" in advise([CAST, LOW_RANK, slow]).sentence
    assert "diloco" not in advise([CAST, LOW_RANK, option(slow.hook, 12.0, slow.costs)]).sentence, "hardly faster"


def test_measured_runs_are_advised_of_in_the_same_order_and_by_their_verdicts() -> None:
    cast = Option.measured("fp16", judged(Verdict.PAYS, 1.4, 0.0), NONE)
    low_rank = Option.measured("powersgd:policy=fused,rank=4", judged(Verdict.PAYS, 5.0, 0.0), SOME)
    sparse = Option.measured("top-k:ratio=0.01", judged(Verdict.COSTS, 9.0, 0.5), MUCH)
    unsure = Option.measured("bf16", judged(Verdict.OPEN, 1.5, 0.0), NONE)
    found = advise([sparse, unsure, low_rank, cast])
    assert (found.hook, found.faster) == ("fp16", low_rank.hook), "a short run does not clear what tables know to cost"
    assert advise([sparse, low_rank]).hook == low_rank.hook, "what was measured to pay may be used"
    assert advise([sparse, unsure]).sentence.startswith("Whether a hook pays is not settled. The nearest is bf16")
    assert advise([sparse]).sentence.startswith("None pays")


def test_runs_whose_loss_is_noisy_clear_a_hook_only_if_tables_know_it_to_be_safe() -> None:
    noisy = dataclasses.replace(judged(Verdict.PAYS, 1.5, 0.0), equal_steps=Range(-0.4, -1.0, 0.2))
    surely = dataclasses.replace(noisy, equal_steps=Range(0.4, 0.3, 0.5))
    assert Option.measured("fp16", noisy, NONE).is_safe and not Option.measured("mine:Codec", noisy).is_safe
    assert not Option.measured("fp16", surely, NONE).is_safe, "what these runs show counts"
    assert Option.measured("mine:Codec", judged(Verdict.PAYS, 1.5, 0.0)).is_safe


def test_the_line_to_type() -> None:
    fused = 'commhooks.attach(model, "powersgd:rank=4", policy="fused")'
    assert line_of("powersgd:rank=4,policy=fused") == fused
    slow = 'diloco = commhooks.DiLoCo(model, optimizer, every=30, compressor="powersgd:rank=4")'
    assert line_of("diloco:every=30,compressor=(powersgd:rank=4)") == slow


def test_costs_come_from_the_leaderboard_by_the_settings_that_were_measured() -> None:
    known = Accuracy.read()

    def is_safe(hook: str) -> bool:
        return Option(hook=hook, speed_up=Range(2, 2, 2), costs=known.costs_of(hook)).is_safe

    assert all(map(is_safe, ("fp16", "bf16", "int8", "fp8", "int4:error_feedback=False")))
    assert not any(map(is_safe, ("int4", "powersgd:rank=4,policy=fused", "powersgd:rank=1", "top-k:ratio=0.01")))
    assert (
        not known.costs_of("powersgd:rank=2") and not known.costs_of("mine:Codec") and not known.costs_of("torch.fp16")
    )
    assert known.costs_of("powersgd:rank=4,policy=fused") == known.costs_of("powersgd:rank=4")
    assert known.costs_of("diloco:every=30,compressor=sparse-loco")[0].mean == 16.6


def runs_of(reproduction: str) -> list[dict[str, object]]:
    found = json.loads((REPRODUCTIONS / reproduction / "results.json").read_text())
    runs: list[dict[str, object]] = found["measured"]["runs"]
    return runs


def test_feedback_by_optimizer_is_what_its_study_found() -> None:
    """A task speaks for a form if its loss is lower by 0.01 and intervals over seeds say so; those that speak agree."""
    losses: dict[tuple[str, str], dict[object, float]] = {}
    for run in runs_of("feedback-and-optimizers"):
        losses.setdefault((str(run["task"]), str(run["variant"])), {})[run["seed"]] = float(str(run["loss"]))
    found: dict[str, dict[str, bool]] = {"adam": {}, "sgd": {}}
    names: Mapping[str, str] = {"sign": "sign", "int4": "int4", "top-k 10 %": "top-k", "powersgd rank 1": "powersgd"}
    for variant, hook in names.items():
        for family in found:
            votes = set()
            for task in {task for task, _ in losses if (" under sgd" in task) == (family == "sgd")}:
                on, off = losses[task, variant], losses[task, f"{variant} without feedback"]
                apart = Interval.of([off[seed] - on[seed] for seed in on])
                if apart.low * apart.high > 0 and abs(apart.mean) > 0.01:
                    votes.add(apart.mean > 0)
            if len(votes) == 1:
                found[family][hook] = votes.pop()
    digits_contradict = found["sgd"].pop("top-k")  # top-k without feedback: 6 points less on digits, under SGD
    assert digits_contradict is False and found == FEEDBACK


def test_a_hook_gets_the_feedback_that_suits_the_optimizer() -> None:
    assert with_usual_feedback("int4", "adamw:lr=1e-3") == "int4:error_feedback=False"
    assert with_usual_feedback("int4", "sgd") == "int4" == with_usual_feedback("int4", "lion")
    assert with_usual_feedback("int4:error_feedback=true", "adamw") == "int4:error_feedback=true"
    assert with_usual_feedback("top-k", "adamw") == "top-k"
    found = advise([option("int4", 5.0, NONE)], optimizer="adamw").sentence
    assert found.endswith("Under adamw int4:error_feedback=False lost less than int4: compare both.")


def test_the_cost_of_diloco_is_what_its_study_measured() -> None:
    text = (REPRODUCTIONS / "diloco-recipes/measured.md").read_text().split("**Judged")[1]
    for compressor, rounds in DILOCO_COSTS.items():
        name = "powersgd:rank=4" if compressor == "powersgd" else compressor
        for every, (mean, high) in rounds.items():
            row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` | {every} |"))
            assert f"+{mean:g}" in row and f"to +{high:.1f})" in row, row


def test_the_margin_is_a_hundredth_of_the_fall() -> None:
    assert math.isclose(Accuracy.read().costs_of("fp16")[1].margin, 0.02494)
    assert pytest.approx((math.log(256) - 2.025) / 2.025, abs=0.05) == DILOCO_MARGIN, "in percent of 2.025 nats"


PAGES = ("docs/index.md", "docs/guide/choosing.md", "docs/guide/does-it-pay.md")


def test_the_tables_and_lines_of_the_pages_are_what_the_function_advises() -> None:
    cases = study.read(ROOT / study.FOLDER)
    assert (ROOT / study.FOLDER / "by-link.md").read_text() == study.by_link(cases)
    assert (ROOT / study.FOLDER / "by-optimizer.md").read_text() == study.by_optimizer()
    assert (ROOT / study.FOLDER / "agreement.md").read_text() == study.agreement(cases)
    assert all('--8<-- "docs/guide/choosing/by-link.md"' in (ROOT / page).read_text() for page in PAGES)
    lines = {found.line for case in cases if (found := study.advised(case, "parameters"))}
    for page in ("README.md", "docs/index.md", "docs/guide/own-model.md"):
        assert set(re.findall(r"^\+(commhooks\.attach\(.*)$", (ROOT / page).read_text(), re.MULTILINE)) <= lines, page


def test_what_was_trained_is_advised_as_the_pages_do_but_where_two_safe_hooks_are_about_as_fast() -> None:
    cases = study.read(ROOT / study.FOLDER)
    assert len(cases) == 10 and {(case["task"], case["link"]) for case in cases} == {
        (model.task, link) for model, link in study.STEPS
    }
    for case in cases:
        found = [one for way in ("parameters", "compare") if (one := study.advised(case, way)) is not None]
        if len({(one.hook, one.rank, one.policy, one.line) for one in found}) > 1:
            assert (case["task"], case["link"]) == (study.RESNET.task, "1Gbit/s")
            verdicts = {one["hook"]: one["verdict"] for one in case["compare"]}
            assert {verdicts[str(one.hook)] for one in found} == {"pays"}, "each advised hook pays where it was trained"


CODE = (Cost(0.002, 0.003, 0.025, "nats on gpt"),)


@pytest.mark.parametrize(
    ("options", "hook", "said"),
    [
        ([CAST, option("int8", 3.0, NONE)], "int8", "Use int8"),  # it costs nothing either
        ([option("int8", 2.0, CODE, sure=0.05), CAST], "fp16", "Use fp16"),  # what costs a little is not surely faster
        ([option("int8", 2.2, CODE, sure=0.05), CAST], "int8", "Use int8"),
        ([option("fp16", 1.5, NONE, sure=0.4)], None, "No gain is sure: measure it"),
        ([option("fp16", 1.04, NONE, sure=0.001)], None, "None pays: stay with all-reduce. The nearest is fp16"),
        ([option("powersgd:rank=4", 5.0, SOME)], None, "No gain is known to be safe: compare the loss before.*0.024"),
        ([option("powersgd:rank=4", 5.0)], None, "No gain is known to be safe: compare the loss before(?!.*0.024)"),
        ([CAST, option("diloco:every=30,compressor=int4", 40.0, NONE)], "fp16", "Use fp16"),  # other ranks' models
        ([option("diloco:every=1", 40.0, NONE)], None, "None pays: stay with all-reduce.$"),
    ],
)
def test_what_is_advised_is_known_to_be_safe_and_surely_faster(
    options: list[Option], hook: str | None, said: str
) -> None:
    found = advise(options)
    assert (found.hook, found.line == "") == (hook, hook is None)
    assert re.match(said, found.sentence), found.sentence


def test_nothing_is_predicted_where_predictions_were_never_checked() -> None:
    found = advise([CAST, LOW_RANK], unchecked="predictions were checked up to 3 Gbit/s")
    assert found.hook is None and found.sentence.startswith("Not checked") and "commhooks compare" in found.sentence
    assert cost_of_diloco("int4", 101) == (), "longer rounds than any that were measured"


def judged(verdict: Verdict, times: float, loss: float) -> Judged:
    speed = Range(times, 0.98 * times, 1.02 * times)
    return Judged(verdict, "a reason", speed, Range(loss, loss - 0.001, loss + 0.001), Range(-1, -2, 0), 0.02)
