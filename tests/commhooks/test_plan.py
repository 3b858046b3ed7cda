"""Predictions by hand, what is recommended, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import commhooks
from commhooks.errors import SettingsError
from commhooks.experiments.accuracy import Accuracy, Difference, TaskAccuracy
from commhooks.experiments.planning import Plan, Probe, Profile, ProfileError, Rounds, plan, predict
from commhooks.experiments.planning.errors import ProbeError
from commhooks.experiments.planning.probes import MEASURED, Cost, Timing
from commhooks.experiments.planning.profiles import (
    BucketProfile,
    GradientProfile,
    HookProfile,
    RoundProfile,
    Seconds,
    StepParts,
)

MB = 1_000_000
PER_BYTE = 10e-9  # seconds, on the probed network: an all-reduce of 1 MB takes 10 ms


def a_probe(ranks: int = 2, noise: float = 0.0, per_byte: float = PER_BYTE, largest: int = 10 * MB) -> Probe:
    """Return a probe whose collectives take `per_byte` seconds a byte and no processor time, and nothing else."""
    cost = Cost(
        tuple(
            Timing(
                size, Seconds(per_byte * size, per_byte * size * (1 - noise), per_byte * size * (1 + noise)), (), 0.0, 9
            )
            for size in (1000, largest)
        )
    )
    return Probe(ranks=ranks, costs=dict.fromkeys(MEASURED, cost), took=1.0)


def parts(seconds: float, noise: float = 0.0) -> StepParts:
    """Return a step whose forward and backward pass take 100 ms, and the optimizer 10."""
    spread = Seconds(seconds, seconds * (1 - noise), seconds * (1 + noise))
    return StepParts(spread, 0.030, 0.070, seconds - 0.110, 0.010, steps=9)


def bucket(names: str, megabytes: float, rounds: tuple[RoundProfile, ...], after: float = 0.0) -> BucketProfile:
    return BucketProfile(tuple(names), round(megabytes * MB), 0.0, rounds, after)


def hook(name: str, seconds: float, payload: float, compression: float = 0.0, policy: str = "fifo") -> HookProfile:
    """Return a hook with a round of one all-reduce for each of two buckets, and so much compression before it."""
    of_each = [(RoundProfile(compression, (("all-reduce", round(share * payload * MB)),)),) for share in (0.25, 0.75)]
    buckets = (bucket("ab", 1, of_each[0]), bucket("cd", 3, of_each[1]))
    return HookProfile(name, policy, parts(seconds), buckets)


def a_profile(*hooks: HookProfile, **changes: Any) -> Profile:
    """Return the profile of a model of 4 MB, whose gradients are ready after 60, 70, 90 and 100 ms."""
    ready = zip("abcd", (0.5, 0.5, 1.5, 1.5), (0.06, 0.07, 0.09, 0.1), strict=True)
    own = {one.hook: one for one in hooks}
    settings: dict[str, Any] = {
        "model": "Model",
        "ranks": 2,
        "ddp": "core",
        "cores": 1,
        "plain": parts(0.140),
        "noop": parts(0.110),
        "gradients": tuple(GradientProfile(name, (1,), round(size * MB), when) for name, size, when in ready),
        "hooks": {
            "noop": dataclasses.replace(hook("noop", 0.110, 0), buckets=(bucket("ab", 1, ()), bucket("cd", 3, ()))),
            "allreduce": hook("all-reduce", 0.110, 4),
            **own,
        },
        "own_share": 0.001,
    }
    return Profile(**{**settings, **changes})


def an_accuracy(**losses: float) -> Accuracy:
    """Return what hooks cost on a task on which 0.05 nats matter."""
    differences = tuple(Difference(str(commhooks.make_compressor(name)), one, one, one) for name, one in losses.items())
    named: dict[str, Any] = {"task": "gpt", "description": "", "score": "loss", "unit": "nats", "steps": 1, "seeds": 3}
    task = TaskAccuracy(higher_is_better=False, seed_range=0.05, fall=5.0, differences=differences, **named)
    return Accuracy(tasks=(task,), workers=4, command="", machine="", versions={})


SAFE = an_accuracy(fp16=0.0, int8=0.0)


def test_the_network_adds_what_the_backward_pass_does_not_hide_to_the_measured_step() -> None:
    # 1 MB goes out at 70 ms and is through at 80; 3 MB go out at 100 and are through at 130; the optimizer takes 10.
    found = predict(a_profile(), a_probe())
    assert found.seconds == pytest.approx(0.140)
    assert found.added == pytest.approx(0.030)
    assert found.time.bytes_sent == 4 * MB
    assert found.time.compute + found.time.compression + found.time.waiting == pytest.approx(found.seconds)


def test_what_a_hook_was_measured_to_cost_beyond_the_model_is_kept() -> None:
    # Twice 2 ms of compression are known; the step was 9 ms longer than noop's: 5 ms belong to neither.
    slow = hook("slow", 0.119, 1, compression=0.002)
    assert predict(a_profile(slow), a_probe(), "slow").seconds == pytest.approx(0.119 + 0.0075)


def test_no_step_is_predicted_to_be_shorter_than_without_communication() -> None:
    lucky = hook("lucky", 0.100, 0.001)
    found = plan(a_profile(lucky), a_probe(), accuracy=SAFE)
    assert found.of("lucky").seconds == 0.110
    assert all(one.speed_up <= found.bound and one.utilisation <= 1 for one in found.choices)


def test_diloco_divides_a_round_among_its_steps_and_has_a_cost_of_its_own() -> None:
    """Sending 4 MB takes 40 ms a round, in which nothing is computed: a step without communication takes 110."""
    assert predict(a_profile(), a_probe(), rounds=Rounds(every=10)).seconds == pytest.approx(0.110 + 0.004)
    small, label = a_profile(hook("int4", 0.110, 2)), "diloco:compressor=int4,every=10"
    choice = plan(small, a_probe(), rounds={label: ("int4", Rounds(every=10))}).of(label)
    assert choice.seconds == pytest.approx(0.110 + 0.002) and choice.costs, "it is that of DiLoCo"
    assert choice.code == 'diloco = commhooks.DiLoCo(model, optimizer, every=10, compressor="int4")'


def test_a_message_of_a_round_beyond_the_probes_reach_takes_the_time_of_several() -> None:
    """The probe reaches four times its 750 kB: the buckets' 3 MB, but not the round's 4 MB."""
    assert predict(a_profile(), a_probe(largest=750_000), rounds=Rounds(every=10)).seconds == pytest.approx(0.114)
    with pytest.raises(ProbeError, match="largest all-reduce that was sent had 4,096 bytes, and beyond 4 times"):
        predict(a_profile(), a_probe(largest=4096))


def test_the_fastest_gain_that_cost_no_accuracy_is_recommended_and_a_faster_one_is_named_with_its_cost() -> None:
    profile = a_profile(hook("fp16", 0.112, 2), hook("top-k:ratio=0.01", 0.112, 0.1), hook("int8", 0.125, 1))
    costs = dataclasses.replace(SAFE, tasks=an_accuracy(fp16=0.0, int8=0.01, **{"top-k:ratio=0.01": 0.47}).tasks)
    found = plan(profile, a_probe(), accuracy=costs)
    assert [choice.label for choice in found.choices] == ["top-k:ratio=0.01", "fp16", "int8", "all-reduce"]
    assert (found.advice.hook, found.advice.faster) == ("fp16", "top-k:ratio=0.01")
    assert "top-k:ratio=0.01: its steps are 1.24 times as fast (1.24 to 1.24), but it cost 0.47 nats on gpt" in (
        found.advice.sentence
    )
    assert found.of("fp16").code == 'commhooks.attach(model, "fp16")'
    assert found.bound == pytest.approx(0.140 / 0.110) and found.plain_error == pytest.approx(0.0)


def test_a_gain_whose_cost_was_not_measured_is_named_and_not_recommended() -> None:
    found = plan(a_profile(hook("powersgd:policy=fused,rank=3", 0.112, 0.1, policy="fused")), a_probe(), accuracy=SAFE)
    assert found.advice.hook is None and found.choices[0].costs == ()
    assert "No gain is known to be safe" in found.advice.sentence and "was not measured" in found.advice.sentence


@pytest.mark.parametrize("seconds", [0.123, 0.150])  # 138 ms against 140, and more than that
def test_none_pays_if_the_gain_is_small_or_none(seconds: float) -> None:
    found = plan(a_profile(hook("fp16", seconds, 2)), a_probe(), accuracy=SAFE)
    assert found.advice.hook is None and found.advice.sentence.startswith("None pays: stay with all-reduce.")


def test_no_gain_is_sure_if_the_uncertainty_reaches_it() -> None:
    profile = a_profile(hook("fp16", 0.113, 2))  # 128 ms against 140
    assert plan(profile, a_probe(), accuracy=SAFE).advice.hook == "fp16"
    noisy = {
        label: dataclasses.replace(one, step=parts(one.step.seconds.median, 0.3))
        for label, one in profile.hooks.items()
    }
    noop = dataclasses.replace(profile.hooks["noop"], step=parts(0.130))  # slower than with a hook, by 20 ms
    for changed in (
        dataclasses.replace(profile, hooks=noisy),
        dataclasses.replace(profile, noop=noop.step, hooks={**profile.hooks, "noop": noop}),
    ):
        found = plan(changed, a_probe(), accuracy=SAFE)
        assert found.advice.hook is None and found.advice.sentence.startswith("No gain is sure")


def test_rounds_of_one_step_are_never_advised() -> None:
    rounds = {f"diloco:compressor=int4,every={n}": ("int4", Rounds(every=n)) for n in (1, 30)}
    profile = a_profile(hook("int4", 0.150, 0.1), plain=parts(4.08))
    found = plan(profile, a_probe(per_byte=1e-6), rounds=rounds)
    assert found.of("diloco:compressor=int4,every=1").speed_up > 2
    assert "every=1:" not in found.advice.sentence
    assert found.of("diloco:compressor=int4,every=30").costs, "the study of DiLoCo measured it"


def test_uncertainty_is_of_the_steps_of_the_network_and_of_the_plain_all_reduce() -> None:
    profile = a_profile(hook("fp16", 0.113, 2))

    def of(label: str, found: Plan) -> float:
        return found.of(label).uncertainty

    assert of("all-reduce", plan(profile, a_probe())) == pytest.approx(0.0, abs=1e-9)
    # quartiles 10 % to either side, of 9 measurements: 0.93 · 0.2 / 3
    assert of("all-reduce", plan(profile, a_probe(noise=0.1))) == pytest.approx(0.030 * 0.062)
    # the network really added 45 ms, where 30 were predicted: a third is missing
    missed = plan(dataclasses.replace(profile, plain=parts(0.155)), a_probe())
    assert missed.plain_error == pytest.approx(0.140 / 0.155 - 1)
    assert of("all-reduce", missed) == pytest.approx(0.030 / 3)
    assert of("fp16", missed) == pytest.approx(0.015 / 3)
    elsewhere = plan(dataclasses.replace(profile, plain=parts(0.5), link="another"), a_probe())
    assert elsewhere.plain_error is None, "the plain all-reduce ran over another link"


@pytest.mark.parametrize("measured", [0.080, 0.500])
def test_nothing_is_recommended_if_profile_and_network_contradict_each_other(measured: float) -> None:
    found = plan(a_profile(hook("fp16", 0.113, 2), plain=parts(measured)), a_probe(), accuracy=SAFE)
    assert found.advice.hook is None
    assert found.advice.sentence.startswith("Not checked: the plain all-reduce should take 140 ms a step")


def test_what_does_not_go_together_is_refused() -> None:
    profile = a_profile()
    with pytest.raises(ProfileError, match="lacks hook 'allreduce'"):
        plan(dataclasses.replace(profile, hooks={"noop": profile.hooks["noop"]}), a_probe())
    narrow = dataclasses.replace(a_probe(), costs={"all-gather": a_probe().costs["all-gather"]})
    with pytest.raises(SettingsError, match="'all-reduce' were not probed, but all-gather"):
        plan(profile, narrow)
