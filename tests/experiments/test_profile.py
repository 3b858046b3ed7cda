"""Profiles: what is measured in real ranks, what they leave as it was, and what is made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commhooks.experiments.planning import Profile
from commhooks.experiments.planning.errors import ProfileError
from tests.experiments import profiling_in_ranks
from tests.experiments.standing_ranks import RANKS, StandingRanks

LABELS = {one.label for one in profiling_in_ranks.candidates()}


Said = list[tuple[int, Profile, bool, bool, dict[str, dict[str, int]]]]


def measured(standing: StandingRanks, ddp: str) -> Said:
    said: Said = []
    standing.run(profiling_in_ranks.profiled, RANKS, ddp, said.append, timeout=120.0)  # type: ignore[arg-type]  # it hears objects
    return sorted(said, key=lambda message: message[0])


@pytest.fixture(scope="module")
def core(standing: StandingRanks) -> Said:
    return measured(standing, "core")


@pytest.fixture(scope="module", params=["core", "torch"])
def either(request: pytest.FixtureRequest, standing: StandingRanks, core: Said) -> Said:
    return core if request.param == "core" else measured(standing, request.param)


def test_all_ranks_return_the_same_profile_of_all_hooks(either: Said) -> None:
    (_, first, *_), (_, second, *_) = either
    assert first == second
    assert set(first.hooks) == LABELS | {"noop", "allreduce"}
    assert (first.ranks, first.plain.steps, first.noop.steps) == (2, 3, 3)


def test_model_gradients_and_optimizer_are_as_before_and_nothing_stays_installed(either: Said) -> None:
    assert [(is_as_before, is_gone) for _, _, is_as_before, is_gone, _ in either] == [(True, True)] * RANKS


def test_parts_add_up_to_the_step(either: Said) -> None:
    found = either[0][1]
    for step in (found.plain, *(hook.step for hook in found.hooks.values())):
        parts = step.forward, step.backward, step.exposed, step.optimizer
        assert sum(parts) == pytest.approx(step.seconds.median)
        assert min(parts) > 0
        assert step.seconds.low <= step.seconds.median <= step.seconds.high


def test_rounds_send_what_the_communicator_counts_in_a_real_step(either: Said) -> None:
    _, found, _, _, real = either[0]
    for label in LABELS:
        expected = profiling_in_ranks.pretended(found, label)
        assert expected.keys() == real[label].keys()
        for kind, payload in real[label].items():
            # A message of several parts ends at a multiple of its widest element, of 4 bytes here.
            room = 3 if kind == "all-gather" and label.startswith("top-k") else 0
            assert expected[kind] <= payload <= expected[kind] + room, (label, kind)


def test_gradients_and_buckets_are_ready_in_order_within_the_step(either: Said) -> None:
    found = either[0][1]
    gradients = [gradient.ready for gradient in found.gradients]
    assert len(gradients) == 6
    assert gradients[0] > 0
    assert gradients == sorted(gradients)
    for hook in found.hooks.values():
        assert sorted(name for bucket in hook.buckets for name in bucket.parameters) == sorted(
            gradient.name for gradient in found.gradients
        )
        assert all(one.seconds > 0 for bucket in hook.buckets for one in bucket.rounds)
    assert not any(bucket.rounds for bucket in found.hooks["noop"].buckets)
    assert len(found.hooks["noop"].buckets) > 1


def test_state_is_that_of_each_hook_alone(core: Said) -> None:
    hooks, elements = core[0][1].hooks, 8 * 16 + 16 + 16 * 16 + 16 + 16 * 4 + 4
    matrices = 8 * 16 + 16 * 16 + 16 * 4
    assert hooks["noop"].state_bytes == hooks["allreduce"].state_bytes == 0
    assert hooks["top-k:policy=fused,ratio=0.1"].state_bytes == 4 * elements
    bases = hooks["powersgd:rank=1"].state_bytes - 4 * matrices
    assert 4 * (8 + 16 + 4) <= bases <= 4 * (16 + 16 + 16)  # a column of Q for each matrix, on either side


def test_a_step_that_fails_on_one_rank_ends_the_profile_on_all(standing: StandingRanks) -> None:
    said: list[tuple[int, str, bool, bool]] = []
    for step in (1, 9):  # the first one, and one under a hook
        said.clear()
        standing.run(profiling_in_ranks.failing, RANKS, step, said.append, timeout=120.0)  # type: ignore[arg-type]  # it hears objects
        for _, error, is_as_before, is_gone in said:
            assert "rank 1: LookupError: the data is gone" in error
            assert error.startswith("ProfileError: could not take a ")
            assert (is_as_before, is_gone) == (True, True)


def test_what_cannot_be_profiled_is_refused_in_words(standing: StandingRanks) -> None:
    said: list[dict[str, str]] = []
    standing.run(profiling_in_ranks.refused, RANKS, None, said.append, timeout=120.0)  # type: ignore[arg-type]  # it hears objects
    expected = {
        "steps": "SettingsError: profile(steps=2): steps must be a whole number of at least 3",
        "seconds": "SettingsError: profile(seconds=0.0): seconds must be above zero",
        "as ranks": "SettingsError: profile(as_ranks=1): as_ranks must be a whole number, at least the 2",
        "budget": "SettingsError: profile: 3 steps of each of 2 hooks do not fit into the time",
        "inner model": "SettingsError: profile: no gradient passed through the hook",
        "no backward": "ran no backward pass",
        "twice": "SettingsError: profile: hook 'fp16' is given twice",
        "another rank's": "SettingsError: profile: ranks disagree about steps or hooks; by rank: steps=3, ",
        "attached": "AttachError: profile: ",
    }
    assert {name: words in said[0][name] for name, words in expected.items()} == dict.fromkeys(expected, True), said


def test_a_profile_survives_json_and_what_is_none_is_refused(core: Said, tmp_path: Path) -> None:
    found, path = core[0][1], tmp_path / "profile.json"
    found.write(path)
    assert Profile.read(path) == found
    assert [one.name for one in tmp_path.iterdir()] == ["profile.json"]
    raw = json.loads(path.read_text())
    damages: list[dict[str, object]] = [
        {"format": 99},
        {"ranks": "two"},
        {"gradients": 3},
        {"noop": {}},
        {"unknown": 1},
    ]
    for damage in damages:
        path.write_text(json.dumps(raw | damage))
        with pytest.raises(ProfileError, match="expected a file of format 1"):
            Profile.read(path)
    with pytest.raises(ProfileError, match="FileNotFoundError"):
        Profile.read(tmp_path / "nothing.json")
