"""What was asked for becomes runs, or an error before any process starts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from commhooks.experiments.hooks import make_hook
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.runs import RunSettings
from commhooks.experiments.specs import Spec
from commhooks.experiments.sweeps.plan import crowded, in_turn, plan


def planned(**changes: Any) -> tuple[RunSettings, ...]:
    asked: dict[str, Any] = {"tasks": ["digits:size=small"], "hooks": ["all-reduce"], "links": [LinkSettings()]}
    return plan(**{**asked, **changes})


def test_what_takes_turns_stays_together() -> None:
    """Of everything that varies, the hook varies fastest: runs that differ in nothing else train in turns."""
    tasks = ["gpt:size=small", "digits:size=small"]
    many = planned(tasks=tasks, hooks=["fp16", "bf16"], seeds=[0, 1], links=["1Gbit/s", "10Mbit/s"], ranks=[2, 3])
    assert len(many) == 32 and [run.task.label for run in many[::16]] == tasks
    assert {run.steps for run in many} == {40}  # the tasks' own
    assert [run.hook.label for run in many] == ["fp16", "bf16"] * 16
    assert all(one.scene == other.scene for one, other in zip(many[::2], many[1::2], strict=True))
    assert in_turn(many) == in_turn((*many[::2], *many[1::2])) == many
    with pytest.raises(ValueError, match="listed twice"):
        in_turn((*many, many[3]))


def test_hooks_that_do_not_suit_the_optimizer_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {
        "hooks": ["all-reduce", "dgc"],
        "tasks": ["digits:size=tiny"],
        "optimizers": ["sgd:lr=0.1", None],
    }
    told = "digits:size=tiny: dgc with SGD: momentum is applied twice, by both; give the optimizer a momentum of 0"
    with pytest.warns(UserWarning, match=told) as heard:  # digits' own optimizer has momentum
        planned(**asked, seeds=[0, 1])
    assert len(heard) == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(**asked, ranks=[2])  # torchrun's rank 0 says it


def test_ranks_that_share_cores_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    assert crowded(planned()) is None
    warning = crowded(planned(ranks=[4]))
    assert warning is not None and "4 ranks share 2 cores" in warning and "--compute 200ms" in warning
    assert crowded(planned(ranks=[4], compute="200ms")) is None
    assert crowded((*planned(ranks=[2]), *planned(ranks=[4], compute="200ms"))) is None
    assert crowded(planned(ranks=[4]), 4) is None
    assert crowded(planned(ranks=[4], links=["real"])) is None


def test_a_rate_that_hosts_can_have_once_it_is_slowed_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commhooks.experiments.sweeps.plan.why_not", lambda: None)
    for link, compute in (("hosts:50kbit/s", "4x"), ("hosts:50kbit/s", "200ms"), ("hosts:unlimited", None)):
        assert planned(links=[link], compute=compute)


def test_under_torchrun_its_world_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert planned()[0].ranks == 3
    with pytest.raises(ValueError, match="torchrun started 3"):
        planned(ranks=[2])


def test_what_is_random_in_a_hook_follows_the_seed_of_the_run() -> None:
    spec = Spec.parse("powersgd:rank=2")
    assert make_hook(spec, seed=7) == make_hook(Spec.parse("powersgd:rank=2,seed=7"))
    assert make_hook(spec, seed=7) != make_hook(spec, seed=8)
