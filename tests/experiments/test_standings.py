"""What the leaderboard makes of its runs: intervals, the front, and what takes part."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from torch import Tensor

from commhooks.compressors import COMPRESSORS, Registered, TopK
from commhooks.experiments.hooks import make_hook
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.language import Loss
from experiments.studies.leaderboard import contenders as module
from experiments.studies.leaderboard.contenders import SKIPPED, USUAL, contenders
from experiments.studies.leaderboard.standings import Standing, is_better, standings
from experiments.studies.lockstep import SCORES
from tests.experiments.standing_samples import rows, runs

DIGITS = load_task("digits:size=tiny")


class TestFront:
    def test_it_is_what_nothing_beats(self) -> None:
        for task, own in itertools.groupby(rows(), key=lambda row: row.task):
            every = list(own)
            assert {row.contender for row in every if row.on_front} == {
                row.contender for row in every if not any(beats(other, row, task) for other in every)
            } - {row.contender for row in every if math.isnan(row.score)}

    def test_one_that_diverged_is_never_on_it(self) -> None:
        lost = [row for row in rows() if row.contender.spec.name == "terngrad"]
        assert lost and not any(row.on_front for row in lost)
        assert all(row.diverged == 3 for row in lost)


def beats(one: Standing, other: Standing, task: str) -> bool:
    """Return whether the first is at least as good and as small, and better or smaller."""
    score = SCORES[task]
    better, worse = is_better(one.score, other.score, score), is_better(other.score, one.score, score)
    smaller, larger = one.payload_bytes < other.payload_bytes, one.payload_bytes > other.payload_bytes
    return not worse and not larger and (better or smaller)


def test_differences_are_paired_by_seed() -> None:
    shuffled = [run for run in runs() if run.task == "digits"][::-1]
    found = {row.contender.label: row for row in standings(shuffled, {})}
    difference = found["sign"].difference
    assert difference is not None  # the noise of a seed is in both: nothing of it is left
    assert (difference.low, difference.high) == pytest.approx((-0.07, -0.07))
    assert found["all-reduce"].difference is None


class TestContenders:
    def test_every_registered_name_takes_part_or_says_why_not(self) -> None:
        found, left_out = contenders(None, DIGITS)
        assert found[0].label == "all-reduce"
        for name in COMPRESSORS:
            labels = [one.spec.label for one in found] + [one.label for one in left_out]
            assert all(
                any(label.startswith(Spec.parse(text).label) for label in labels) for text in USUAL.get(name, (name,))
            )
        assert {one.label for one in left_out} >= SKIPPED.keys() & COMPRESSORS.keys()

    def test_one_that_loses_something_has_a_form_with_error_feedback(self) -> None:
        found, _ = contenders(["top-k", "all-reduce"], DIGITS)
        ratios = ("0.01", "0.1")
        assert [one.label for one in found] == ["all-reduce"] + [
            f"top-k:ratio={ratio}{suffix}" for ratio in ratios for suffix in ("", " + EF")
        ]

    def test_a_new_name_runs_at_its_defaults(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(COMPRESSORS, "newest", Registered(TopK))
        assert [one.label for one in contenders(["newest"], DIGITS)[0]][1:] == ["newest", "newest + EF"]

    def test_error_feedback_that_would_grow_without_bound_is_left_out_with_its_reason(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(COMPRESSORS, "growing", Registered(Growing))
        found, left_out = contenders(["growing"], DIGITS)
        assert [one.label for one in found] == ["all-reduce", "growing"]
        assert [one.label for one in left_out] == ["growing + EF"]
        assert "grow without bound" in left_out[0].reason

    def test_every_usual_setting_of_a_registered_name_exists(self) -> None:
        for name, texts in module.USUAL.items():
            assert {Spec.parse(text).name for text in texts} == {name}
            for text in texts if name in COMPRESSORS else ():
                make_hook(Spec.parse(text))  # raises for a setting that there is not


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growing(TopK):
    """Claims to lose more than it is given."""

    def loss(self, name: str, parameter: Tensor) -> Loss:
        return Loss(2.0)
