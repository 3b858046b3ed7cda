"""What was asked for becomes runs, or an error before any process starts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from commhooks import ErrorFeedback, PowerSGD
from experiments.hooks import make_hook, policy_of
from experiments.links.link import LinkSettings
from experiments.runs import RunSettings
from experiments.specs import Spec
from experiments.sweeps.plan import crowded, in_turn, plan


def planned(**changes: Any) -> tuple[RunSettings, ...]:
    asked: dict[str, Any] = {
        "tasks": ["digits"],
        "hooks": ["all-reduce"],
        "links": [LinkSettings()],
        "size": "small",
    }
    return plan(**{**asked, **changes})


def test_every_task_is_run_under_every_hook() -> None:
    runs = planned(tasks=["gpt", "digits"], hooks=["all-reduce", "powersgd:rank=2"])
    assert [run.label for run in runs] == [
        "gpt:size=small · all-reduce · seed 0",
        "gpt:size=small · powersgd:rank=2 · seed 0",
        "digits:size=small · all-reduce · seed 0",
        "digits:size=small · powersgd:rank=2 · seed 0",
    ]
    assert {run.ranks for run in runs} == {2}
    assert {run.steps for run in runs} == {40}  # the tasks' own


def test_what_takes_turns_stays_together() -> None:
    """Of everything that varies, the hook varies fastest: runs that differ in nothing else train in turns."""
    many = planned(hooks=["fp16", "bf16"], seeds=[0, 1], links=["1Gbit/s", "10Mbit/s"], ranks=[2, 3])
    assert len(many) == 16
    assert [run.hook.label for run in many] == ["fp16", "bf16"] * 8
    assert all(one.scene == other.scene for one, other in zip(many[::2], many[1::2], strict=True))
    assert in_turn(many) == many
    assert in_turn((*many[::2], *many[1::2])) == many
    with pytest.raises(ValueError, match="listed twice"):
        in_turn((*many, many[3]))


def test_hooks_that_do_not_suit_the_optimizer_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"hooks": ["all-reduce", "dgc"], "size": "tiny", "optimizers": ["sgd:lr=0.1", None]}
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hooks": ["powersdg"]}, "Did you mean 'powersgd'"),
        ({"hooks": ["powersgd:rnak=4"]}, r"has no setting 'rnak'; it takes .*rank.*Did you mean 'rank'"),
        ({"hooks": ["powersgd:rank=0"]}, "rank must be"),
        ({"hooks": ["powersgd:rank=four"]}, "rank must be"),
        ({"hooks": ["powersgd:wire=fp12"]}, "wire must be one of fp16"),
        ({"hooks": ["fp16:policy=lifo"]}, "policy must be one of fifo, fused"),
        ({"hooks": ["powersgd:skip=haed"]}, "'haed' must match a parameter's name"),
        ({"hooks": ["sign:blok=64"]}, r"has no setting 'blok'; it takes block, .*Did you mean 'block'"),
        ({"hooks": ["int4:block=3"]}, "block must be a multiple of 2"),
        ({"hooks": ["powersgd:matrices=round"]}, "matrices must be one of first-dimension"),
        ({"hooks": ["fp16", "fp16"]}, "fp16 is given twice"),
        ({"hooks": []}, "name at least one task, one hook"),
        ({"tasks": ["digit"]}, "did you mean 'digits'"),
        ({"tasks": ["gpt", "gpt"]}, "gpt:size=small is given twice"),
        ({"size": "vast"}, "expected one of tiny, small, medium, large"),
        ({"ranks": [0]}, "at least 1"),
        ({"ranks": [500]}, "use fewer ranks"),
        ({"steps": 0}, "steps must be a whole number of at least 1"),
        ({"ddp": "horovod"}, "'core' or 'torch'"),
        ({"seeds": [0, 0]}, "0 is given twice"),
        ({"seeds": [-1]}, "seed must be a whole number of at least 0"),
        ({"links": ["100 furlongs"]}, "'100 furlongs' does not parse"),
        ({"optimizers": ["sgd:rl=0.1"]}, "rl"),
        ({"compute": "200"}, "compute '200' does not parse.*'200ms'"),
        ({"size": None, "tasks": ["tests/experiments/no_tasks.py:nothing"]}, "expected a Task, or a tuple"),
        (
            {"size": None, "tasks": ["tests/experiments/no_tasks.py:no_scalar"]},
            "must return a scalar tensor, the mean over the batch .got a tensor",
        ),
        (
            {"size": None, "tasks": ["tests/experiments/no_tasks.py:fails"]},
            "on the first batch, .* failed: RuntimeError",
        ),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        planned(**changes)


@pytest.mark.parametrize(
    ("link", "compute", "words"),
    [
        ("hosts:50kbit/s", None, "link 'hosts:50kbit/s': .* at least 0.1 Mbit/s .* .got 50 kbit/s"),
        ("hosts:1Mbit/s,down=50kbit/s", None, "got 50 kbit/s"),
        ("hosts:100Mbit/s+50kbit/s@30s", None, "got 50 kbit/s"),
        ("hosts:50kbit/s", "1x", "with compute 1x, by which its rates are multiplied: .* .got 50 kbit/s"),
        ("hosts:1Mbit/s", "0.01x", "with compute 0.01x, .* .got 10 kbit/s"),
        ("hosts:10Gbit/s", "1000x", "below 1 Tbit/s, .* .got 10 Tbit/s"),
    ],
)
def test_a_rate_that_hosts_cannot_have_is_refused(link: str, compute: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        planned(links=[link], compute=compute)


def test_more_ranks_than_a_cluster_has_addresses_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1 to 250 hosts, one address each \(got 251\)"):
        planned(links=["hosts:1Mbit/s"], ranks=[251])


def test_a_rate_that_hosts_can_have_once_it_is_slowed_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.sweeps.plan.why_not", lambda: None)
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


def test_a_hook_may_say_its_policy_and_what_to_skip() -> None:
    spec = Spec.parse("powersgd:rank=2,policy=fused,skip=head.*+*.bias")
    made = make_hook(spec)
    assert policy_of(spec) == "fused" and policy_of(Spec.parse("fp16")) == "fifo"
    assert isinstance(made, ErrorFeedback) and isinstance(made.inner, PowerSGD)
    assert made.inner.skip == ("head.*", "*.bias")
