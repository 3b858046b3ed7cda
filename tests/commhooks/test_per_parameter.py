"""Rules: some parameters to one compressor, some to another."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from commhooks import ErrorFeedback, Match, PerParameter, SettingsError, make_compressor, schedule
from commhooks.compressors import AllReduceMean, TopK
from commhooks.language import Place
from tests import bounds
from tests.commhooks.workers import Workers, mean_of, normal, zeros

SHAPES = ((24, 40), (40,), (64, 33), (24, 40))
NAMES = ["head.weight", "head.bias", "body.weight", "tail.weight"]
RULES = (
    ("head.*", make_compressor("powersgd", rank=2)),
    ("body.*", make_compressor("sign", block=32)),
    ("tail.*", make_compressor("top-k", ratio=0.1)),
)


@pytest.mark.parametrize("policy", ["fifo", "fused"])
@pytest.mark.parametrize("buckets", [1, 2, 4])
def test_each_parameter_gets_what_its_compressor_makes_of_it(policy: str, buckets: int) -> None:
    """As if it were alone with it: in float64, where the order of a sum's terms is the same in lockstep."""
    parameters = zeros(*SHAPES, dtype=torch.float64)
    together = Workers(PerParameter(rules=RULES), 3, parameters, NAMES, buckets=buckets, policy=policy)
    alone = [
        Workers(
            next((c for p, c in RULES if p[:4] == name[:4]), AllReduceMean()), 3, [parameter], [name], policy=policy
        )
        for name, parameter in zip(NAMES, parameters, strict=True)
    ]
    for step in range(4):
        gradients = normal(parameters, 3, seed=step)
        means = together.step(gradients)
        for index, workers in enumerate(alone):
            theirs = workers.step([[own[index]] for own in gradients])
            assert all(torch.allclose(means[r][index], theirs[r][0], rtol=0, atol=1e-9) for r in range(3))


def test_a_step_takes_the_rounds_of_the_longest_and_not_the_sum() -> None:
    workers = Workers(PerParameter(rules=RULES), 2, zeros(*SHAPES), NAMES, policy="fused")
    workers.step(normal(workers.parameters, 2, seed=0))
    # Round one: a sum, an exchange and a gather; round two: a sum and a gather.
    assert workers.traffic.collectives == 5


def test_rules_for_no_parameter_are_refused() -> None:
    named = dict(zip(NAMES, zeros(*SHAPES), strict=True))
    with pytest.raises(SettingsError, match=r"'haed.\*' must match a parameter; there are head.weight"):
        PerParameter(rules=(("haed.*", AllReduceMean()),)).check(named, 2)
    shadowed = (("head.*", AllReduceMean()), ("*.bias", make_compressor("top-k")))
    with pytest.raises(SettingsError, match=r"all that '\*.bias' matches, such as 'head.bias', is matched by a rule"):
        PerParameter(rules=shadowed).check(named, 2)


def test_the_first_rule_that_matches_counts_by_name_size_dimensions_or_dtype() -> None:
    dense, low_rank, small, rest = (make_compressor(name) for name in ("all-reduce", "powersgd", "fp16", "int4"))
    rules = PerParameter(
        rules=(
            ("*embedding*", dense),
            (Match(dimensions=(2, 4), dtype=torch.float32), low_rank),
            (Match(name="*.bias", max_elements=40), small),
        ),
        otherwise=rest,
    )
    found = {
        "embedding.weight": (torch.zeros(30, 30), dense),
        "layer.weight": (torch.zeros(30, 30), low_rank),
        "wide.weight": (torch.zeros(30, 30, dtype=torch.float64), rest),
        "short.bias": (torch.zeros(40), small),
        "long.bias": (torch.zeros(41), rest),
    }
    for name, (parameter, expected) in found.items():
        place = Place(name, parameter, 2)
        assert rules.state(place).keys() == expected.state(place).keys()
        assert rules._of(name, parameter) is expected
    rules.check({name: parameter for name, (parameter, _) in found.items()}, 2)
    assert make_compressor(str(rules)) == rules


def test_a_schedule_runs_each_compressor_in_its_steps_and_hands_the_residual_on() -> None:
    ratios = ((0, 0.5), (2, 0.1))
    phases = [(step, make_compressor("top-k", ratio=ratio, indices="int32")) for step, ratio in ratios]
    phases.append((4, AllReduceMean()))
    workers = Workers(schedule(*phases), 2, zeros((10, 10)))
    sent = []
    for step in range(6):
        before = workers.traffic.payload_bytes
        unsent, gradients = workers.unsent(0), normal(workers.parameters, 2, seed=step)
        mean = workers.step(gradients)[0][0]
        sent.append(workers.traffic.payload_bytes - before)
        if step < 4:
            left = mean + workers.unsent(0) - mean_of(gradients, 0) - unsent
            assert left.abs().amax() <= 16 * bounds.unit_roundoff(torch.float32) * float(mean.abs().amax())
    assert sent[:2] == [sent[0]] * 2 and sent[2:4] == [sent[0] // 5] * 2 and sent[4:] == [400, 400]
    assert make_compressor(str(schedule(*phases))) == schedule(*phases)


def test_a_bucket_is_freed_without_the_garbage_collector() -> None:
    """Although its plans are made of it: it holds all gradients, and some training loops turn the collector off."""
    compressor = ErrorFeedback(inner=PerParameter(rules=(("head.*", TopK(ratio=0.1)),), otherwise=TopK(ratio=0.2)))
    for names in (NAMES, ["head.a", "head.b", "head.c", "head.d"]):  # some of the slots; all of them
        workers = Workers(compressor, 1, zeros(*SHAPES), names)
        workers.step(normal(workers.parameters, 1, seed=0))
        (engine,) = workers.engines
        memories = [StorageWeakRef(view.memory.untyped_storage()) for view in engine.buckets.views()]
        gc.disable()
        try:
            del engine, workers
            assert len(memories) == 1 and all(memory.expired() for memory in memories)
        finally:
            gc.enable()
