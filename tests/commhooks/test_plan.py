"""Predictions by hand, what is recommended, and what is refused."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

import commhooks
import ddp_core
from commhooks.errors import SettingsError
from experiments.predicting import Plan, Probe, Profile, plan
from experiments.predicting.errors import ProbeError
from experiments.predicting.link import HALF_SUM
from experiments.predicting.plans import BUCKET_CAPS_MB, code_for
from experiments.predicting.predicting import link_like, predict, rate_for, recut
from experiments.predicting.probes import MEASURED, Cost, Timing
from experiments.predicting.probing import probe_over
from experiments.predicting.profiles import (
    BucketProfile,
    GradientProfile,
    HookProfile,
    RoundProfile,
    Seconds,
    StepParts,
)
from tests.commhooks.fake_network import FakeNetwork
from tests.tiers import A_ROW

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
        "fingerprint": "f00",
        "ranks": 2,
        "ranks_per_host": 1,
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


def test_the_network_adds_what_the_backward_pass_does_not_hide_to_the_measured_step() -> None:
    # 1 MB goes out at 70 ms and is through at 80; 3 MB go out at 100 and are through at 130; the optimizer takes 10.
    found = predict(a_profile(), a_profile().hooks["allreduce"], a_probe())
    assert found.seconds == pytest.approx(0.140)
    assert found.added == pytest.approx(0.030)
    assert found.modelled.bytes_sent == 4 * MB


def test_what_a_hook_was_measured_to_cost_beyond_the_model_is_kept() -> None:
    # Twice 2 ms of compression are known; the step was 9 ms longer than noop's: 5 ms belong to neither.
    slow = hook("slow", 0.119, 1, compression=0.002)
    assert predict(a_profile(slow), slow, a_probe()).seconds == pytest.approx(0.119 + 0.0075)


def test_fused_sends_all_buckets_at_once_after_the_last() -> None:
    fused = hook("fused", 0.110, 4, policy="fused")
    assert predict(a_profile(fused), fused, a_probe()).seconds == pytest.approx(0.110 + 0.040)


def test_buckets_are_cut_as_a_ddp_cuts_them_and_share_what_was_measured() -> None:
    profile = a_profile()
    whole = hook("x", 0.2, 4, compression=0.004)
    one = 1024 * 1024 / MB
    cut = recut(profile.gradients, whole.buckets, 0.4)
    assert [each.parameters for each in cut] == [("a",), ("b",), ("c",), ("d",)]
    assert [each.rounds[0].seconds for each in cut] == pytest.approx([0.001, 0.001, 0.003, 0.003])
    assert [each.rounds[0].sends[0][1] for each in cut] == [MB // 2, MB // 2, 3 * MB // 2, 3 * MB // 2]
    assert [each.parameters for each in recut(profile.gradients, whole.buckets, 1.0)] == [("a", "b", "c"), ("d",)]
    assert 1.0 < one < 2.5  # the first bucket closes with c, which takes it beyond a mebibyte
    assert [each.parameters for each in recut(profile.gradients, whole.buckets, 25.0)] == [("a", "b", "c", "d")]
    # 4 MB go out at 100 ms: nothing is hidden.
    assert predict(profile, profile.hooks["allreduce"], a_probe(), 25.0).seconds == pytest.approx(0.150)


def test_the_fastest_hook_is_recommended_with_the_line_that_attaches_it() -> None:
    found = plan(a_profile(hook("fp16", 0.112, 2), hook("powersgd:rank=4", 0.114, 0.1)), a_probe())
    assert [choice.label for choice in found.choices] == ["powersgd:rank=4", "fp16", "allreduce"]
    assert found.pays and found.recommended.label == "powersgd:rank=4"
    assert found.recommended.code == 'commhooks.attach(model, "powersgd:rank=4")'
    assert found.recommended.seconds == pytest.approx(0.114 + 0.00075)
    assert found.recommended.speed_up == pytest.approx(0.140 / 0.11475)
    assert found.recommended.utilisation == pytest.approx(0.110 / 0.11475)
    assert found.bound == pytest.approx(0.140 / 0.110)
    assert found.plain_error == pytest.approx(0.0)
    assert found.reason.startswith("powersgd:rank=4 saves 18 % of the all-reduce's step")


def test_without_a_backend_the_probed_transfers_take_nothing_of_the_processor() -> None:
    """Half of a transfer's time is the processor's: the first bucket's 10 ms delay the backward pass by 5."""
    profile, probe = a_profile(hook("fp16", 0.112, 2)), a_probe()
    costly = [
        dataclasses.replace(one, processor_seconds=one.seconds.median / 2) for one in probe.costs["all-reduce"].timings
    ]
    probe = dataclasses.replace(probe, costs=dict.fromkeys(MEASURED, Cost(tuple(costly))))
    probed, without = plan(profile, probe), plan(profile, probe, backend="none")
    assert (probed.backend, without.backend) == ("gloo", "none")
    assert probed.seconds_per_byte == pytest.approx(PER_BYTE / 2) and without.seconds_per_byte == 0.0
    assert probed.dense.seconds == pytest.approx(0.145)
    assert without.dense.seconds == pytest.approx(0.140)
    rates = [dict(found.rates)["allreduce"] for found in (probed, without)]
    assert rates[0] is None and rates[1] is not None, "with half of it on the processor no rate is high enough"
    assert plan(profile, probe, backend="gloo") == probed
    with pytest.raises(SettingsError, match=r"plan\(backend='nccl'\): expected 'gloo', which was probed, or 'none'"):
        plan(profile, probe, backend="nccl")


def test_none_pays_if_the_gain_is_small() -> None:
    found = plan(a_profile(hook("fp16", 0.123, 2)), a_probe())  # 138 ms against 140
    assert not found.pays and found.recommended is found.dense and found.recommended.code == ""
    assert found.reason.startswith("None pays: the best, fp16, would save 1.4 % of a step, which is below 3 %")


def test_none_pays_if_every_hook_is_slower() -> None:
    found = plan(a_profile(hook("int8", 0.150, 1)), a_probe())
    assert not found.pays
    assert found.reason == "None pays: the plain all-reduce is predicted to be fastest."


def test_none_pays_if_the_gain_is_within_the_uncertainty() -> None:
    profile = a_profile(hook("fp16", 0.113, 2))  # 128 ms against 140
    assert plan(profile, a_probe()).pays
    noisy = {
        label: dataclasses.replace(one, step=parts(one.step.seconds.median, 0.3))
        for label, one in profile.hooks.items()
    }
    found = plan(dataclasses.replace(profile, hooks=noisy), a_probe())
    assert not found.pays and "within the uncertainty of" in found.reason


def test_none_pays_if_steps_without_a_hook_were_slower_than_with_one() -> None:
    """Such a profile contradicts itself by more than fp16 would save: 20 ms, against 12."""
    profile = a_profile(hook("fp16", 0.113, 2))
    noop = dataclasses.replace(profile.hooks["noop"], step=parts(0.130))
    found = plan(dataclasses.replace(profile, noop=noop.step, hooks={**profile.hooks, "noop": noop}), a_probe())
    assert not found.pays and "within the uncertainty of" in found.reason
    assert all(choice.uncertainty >= 0.019 for choice in found.choices)


def test_uncertainty_is_of_the_steps_of_the_probe_and_of_the_plain_all_reduce() -> None:
    profile = a_profile(hook("fp16", 0.113, 2))

    def of(label: str, found: Plan) -> float:
        return next(choice.uncertainty for choice in found.choices if choice.label == label)

    assert of("allreduce", plan(profile, a_probe())) == pytest.approx(0.0, abs=1e-9)
    # quartiles 10 % to either side, of 9 measurements: 0.93 · 0.2 / 3
    assert of("allreduce", plan(profile, a_probe(noise=0.1))) == pytest.approx(0.030 * 0.062)
    # the network really added 45 ms, where 30 were predicted: a third is missing
    missed = plan(dataclasses.replace(profile, plain=parts(0.155)), a_probe())
    assert missed.plain_error == pytest.approx(0.140 / 0.155 - 1)
    assert of("allreduce", missed) == pytest.approx(0.030 / 3)
    assert of("fp16", missed) == pytest.approx(0.015 / 3)


@pytest.mark.parametrize("wanted", [0.5, 0.9, 0.97])
def test_at_the_rate_that_is_named_the_step_has_the_wanted_utilisation(wanted: float) -> None:
    profile, probe = a_profile(), a_probe()
    dense = profile.hooks["allreduce"]
    rate = rate_for(profile, dense, probe, wanted)
    assert rate is not None
    assert 0.110 / predict(profile, dense, link_like(probe, rate)).seconds == pytest.approx(wanted, rel=1e-6)


def test_no_rate_helps_a_hook_that_computes_too_long() -> None:
    slow = hook("slow", 0.130, 1)
    assert rate_for(a_profile(slow), slow, a_probe(), 0.9) is None
    assert dict(plan(a_profile(slow), a_probe()).rates)["slow"] is None


@pytest.mark.parametrize(
    ("name", "policy", "line"),
    [
        ("fp16", "fifo", '"fp16"'),
        ("top-k:ratio=0.02", "fused", '"top-k:ratio=0.02", policy="fused"'),
    ],
)
def test_the_line_makes_the_compressor_that_was_profiled(name: str, policy: str, line: str) -> None:
    made = code_for(dataclasses.replace(hook(name, 0.1, 1), policy=policy))
    assert made == f"commhooks.attach(model, {line})"
    assert str(commhooks.make_compressor(made.split('"')[1])) == name


@A_ROW
def test_a_plan_for_a_large_profile_takes_less_than_two_seconds() -> None:
    gradients = tuple(GradientProfile(str(n), (1,), MB, 0.1 * n / 50) for n in range(50))
    rounds = (RoundProfile(1e-4, (("all-reduce", 1000), ("all-gather", 1000))),) * 3
    buckets = tuple(BucketProfile((str(n),), MB, 0.0, rounds, 1e-4) for n in range(50))
    hooks = {f"h{n}": HookProfile(f"h{n}", "fifo", parts(0.12), buckets) for n in range(12)}
    profile = a_profile(gradients=gradients, hooks={**a_profile().hooks, **hooks})
    begun = time.process_time()
    plan(profile, a_probe())
    assert time.process_time() - begun < 2


def test_what_does_not_go_together_is_refused() -> None:
    profile = a_profile()
    with pytest.raises(SettingsError, match="profile is of 2 ranks and the probe of 4"):
        plan(profile, a_probe(ranks=4))
    with pytest.raises(SettingsError, match="lacks hook 'allreduce'"):
        plan(dataclasses.replace(profile, hooks={"noop": profile.hooks["noop"]}), a_probe())
    with pytest.raises(SettingsError, match=r"wanted_utilisation=1.5\): it must be in \(0, 1\)"):
        plan(profile, a_probe(), wanted_utilisation=1.5)
    with pytest.raises(SettingsError, match="bucket_caps_mb=.*above zero"):
        plan(profile, a_probe(), bucket_caps_mb=(0.0,))
    probe = a_probe()
    narrow = dataclasses.replace(probe, costs={kind: cost for kind, cost in probe.costs.items() if kind == HALF_SUM})
    with pytest.raises(SettingsError, match="uses 'all-reduce', which the probe did not measure"):
        plan(profile, narrow)


def test_messages_that_were_too_small_are_refused_with_the_time_that_suffices() -> None:
    """The all-reduce sends 3 MB at once; the probe sent 4 KiB, as over a slow link in little time."""
    network = FakeNetwork(2, lambda collective, now: 1e-4 + PER_BYTE * collective.payload_bytes)
    profile = a_profile(hook("fp16", 0.113, 2))
    with pytest.raises(ProbeError) as refused:
        plan(profile, a_probe(largest=4096))
    said = re.search(
        r"'allreduce' sends 3,000,000 bytes in one all-reduce, .*sent had 4,096; beyond 4 times .*at least (\d+) s",
        str(refused.value),
    )
    assert said is not None, refused.value
    probe = probe_over(network, float(said[1]), clocks=network.clocks, profile=profile)
    assert plan(profile, probe).recommended.label == "fp16"
    with pytest.raises(ProbeError, match=r"it would take [\d,]+ s, more than a probe may .*smaller buckets"):
        plan(profile, a_probe(largest=4096, per_byte=1e-3))


def test_buckets_whose_messages_the_probe_cannot_predict_are_not_offered() -> None:
    found = plan(a_profile(), a_probe(largest=MB))  # reaches 4 MB, all of the model
    assert [choice.bucket_cap_mb for choice in found.other_buckets] == list(BUCKET_CAPS_MB)
    found = plan(a_profile(), a_probe(largest=3 * MB // 4))  # reaches 3 MB
    assert [choice.bucket_cap_mb for choice in found.other_buckets] == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"link": "100Mbit/s"}, "the profile is of link 'unlimited' and the probe of '100Mbit/s'"),
        ({"hosts": ("a", "c")}, "ranks on a, b and the probe of ranks on a, c; measure both on the hosts"),
        ({"hosts": ("a", "a")}, r"ranks on a, b and the probe of ranks on a \(2 ranks\)"),
    ],
)
def test_a_probe_of_another_link_or_other_hosts_is_refused(changes: dict[str, Any], message: str) -> None:
    profile = a_profile(link="unlimited", hosts=("a", "b"))
    with pytest.raises(SettingsError, match=message):
        plan(profile, dataclasses.replace(a_probe(), **changes))
    plan(profile, a_probe())  # of a version that did not record them
    plan(profile, dataclasses.replace(a_probe(), link="unlimited", hosts=("b", "a")))


@pytest.mark.parametrize("measured", [0.120, 0.080, 0.200])
@pytest.mark.parametrize("per_byte", [PER_BYTE, 2 * PER_BYTE, 50 * PER_BYTE])
def test_nothing_is_recommended_that_is_slower_than_the_all_reduce_was_measured(
    measured: float, per_byte: float
) -> None:
    hooks = [hook("fp16", 0.113, 2), hook("int8", 0.115, 1)]
    found = plan(a_profile(*hooks, plain=parts(measured)), a_probe(per_byte=per_byte))
    assert found.pays == (found.recommended is not found.dense)
    assert not found.pays or found.recommended.seconds < measured
    if abs(found.plain_error) > 0.3:
        assert not found.pays
        assert re.search(r"No hook can be recommended: .* predicted to take .* was measured to take", found.reason)


def test_a_hook_that_beats_the_prediction_and_not_the_measured_all_reduce_is_not_recommended() -> None:
    found = plan(a_profile(hook("fp16", 0.113, 2), plain=parts(0.120)), a_probe())  # 128 ms; the all-reduce: 140
    assert not found.pays
    assert found.reason.startswith("No hook can be recommended: none beats the all-reduce as measured")


def test_a_profile_of_another_model_is_refused() -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = ddp_core.DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(SettingsError, match=r"of another model \(Model, fingerprint f00; this one's is"):
            plan(a_profile(), a_probe(), model=model)
        del model
    finally:
        torch.distributed.destroy_process_group()
