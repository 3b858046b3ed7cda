"""What was asked for becomes runs, or an error before any process starts."""

from __future__ import annotations

from typing import Any

import pytest

from commhooks import ErrorFeedback, PowerSGD
from experiments.hooks import make_hook, policy_of
from experiments.link import LinkSettings
from experiments.plan import plan
from experiments.runs import HookSpec, RunSettings


def planned(**changes: Any) -> tuple[RunSettings, ...]:
    asked: dict[str, Any] = {
        "tasks": ["digits"],
        "hooks": ["all-reduce"],
        "ranks": None,
        "link": LinkSettings(),
        "steps": None,
        "size": "small",
        "seed": 0,
        "ddp": "core",
        "bucket_cap_mb": None,
        "evaluate_every": 20,
    }
    return plan(**{**asked, **changes})


def test_every_task_is_run_under_every_hook() -> None:
    runs = planned(tasks=["gpt", "digits"], hooks=["all-reduce", "powersgd:rank=2"])
    assert [run.label for run in runs] == [
        "gpt · all-reduce",
        "gpt · powersgd:rank=2",
        "digits · all-reduce",
        "digits · powersgd:rank=2",
    ]
    assert {run.ranks for run in runs} == {2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hooks": ["powersdg"]}, "Did you mean 'powersgd'"),
        ({"hooks": ["powersgd:rnak=4"]}, r"has no setting 'rnak'; it has .*rank.*Did you mean 'rank'"),
        ({"hooks": ["powersgd:rank=0"]}, "rank must be"),
        ({"hooks": ["powersgd:rank=four"]}, "rank must be"),
        ({"hooks": ["powersgd:wire=fp12"]}, "wire must be one of fp16"),
        ({"hooks": ["fp16:policy=lifo"]}, "policy must be one of fifo, fused"),
        ({"hooks": ["powersgd:skip=haed"]}, "'haed' must match a parameter's name"),
        ({"hooks": ["sign:blok=64"]}, r"has no setting 'blok'; it has block, .*server_feedback.*Did you mean 'block'"),
        ({"hooks": ["int4:block=3"]}, "block must be a multiple of 2"),
        ({"hooks": ["powersgd:matrices=round"]}, "matrices must be one of first-dimension"),
        ({"hooks": ["fp16", "fp16"]}, "fp16 is given twice"),
        ({"hooks": []}, "name at least one task and one hook"),
        ({"tasks": ["digit"]}, "did you mean 'digits'"),
        ({"tasks": ["gpt", "gpt"]}, "gpt is given twice"),
        ({"size": "vast"}, "expected one of tiny, small, medium, large"),
        ({"ranks": 0}, "at least 1"),
        ({"ranks": 500}, "use fewer ranks"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"ddp": "horovod"}, "'core' or 'torch'"),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        planned(**changes)


def test_under_torchrun_its_world_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert planned()[0].ranks == 3
    with pytest.raises(ValueError, match="torchrun started 3"):
        planned(ranks=2)


def test_what_is_random_in_a_hook_follows_the_seed_of_the_run() -> None:
    spec = HookSpec.parse("powersgd:rank=2")
    assert make_hook(spec, seed=7) == make_hook(HookSpec.parse("powersgd:rank=2,seed=7"))
    assert make_hook(spec, seed=7) != make_hook(spec, seed=8)


def test_a_hook_may_say_its_policy_and_what_to_skip() -> None:
    spec = HookSpec.parse("powersgd:rank=2,policy=fused,skip=head.*+*.bias")
    made = make_hook(spec)
    assert policy_of(spec) == "fused" and policy_of(HookSpec.parse("fp16")) == "fifo"
    assert isinstance(made, ErrorFeedback) and isinstance(made.inner, PowerSGD)
    assert made.inner.skip == ("head.*", "*.bias")
