"""Profiles from tables: costs from samples, payloads counted alone, and steps by arithmetic."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import commhooks
from commhooks.engine.units import UNIT_ELEMENTS
from commhooks.errors import SettingsError
from commhooks.experiments.planning import Link, plan, predict, profile_from_tables
from commhooks.experiments.planning.candidates import DENSE
from commhooks.experiments.planning.costs import Costs, HookCosts, Sample
from commhooks.experiments.planning.tables import as_one_of, in_units
from commhooks.experiments.timing.link import HALF_SUM
from commhooks.experiments.timing.payloads import rounds_of

COPY = 1e-9  # seconds for an element


def costs_of(compressor: str, *, a_matrix: float = 0.0, bucket: float = 0.0, growth: float = 0.0) -> HookCosts:
    """Return made-up costs of a hook of one round: per element before it, and half as much after it."""
    samples = [Sample(size, (a_matrix * size, a_matrix * size / 2)) for size in (100, 10_000)]
    return HookCosts(
        compressor=str(commhooks.make_compressor(compressor)),
        bucket_seconds=bucket,
        matrices=tuple(samples),
        vector=Sample(10, (40.0, 20.0)),
        copies_per_byte=10.0,
        growth=(0.0, growth),
    )


MADE_UP = Costs(
    hooks={
        DENSE: costs_of("all-reduce"),
        "fp16": costs_of("fp16", a_matrix=2.0),
        "top-k:ratio=0.01": costs_of("top-k:ratio=0.01", a_matrix=30.0, growth=0.5),
    },
    hop_seconds=0.001,
    round_seconds=0.002,
    copy_rate=4e9,
    machine={},
    versions={},
)
HOOKS = ("fp16", "top-k:ratio=0.01")


def seconds(hook: str, link: Link, ranks: int = 2, parameters: float = 1e6) -> float:
    profile = profile_from_tables(parameters, ranks, compute=0.3, hooks=HOOKS, costs=MADE_UP, copy=COPY)
    return predict(profile, link, hook).seconds


def test_a_dense_step_is_compute_then_what_is_left_of_the_link() -> None:
    """One bucket of 4 MB, ready when the backward pass ends; a ring of two ranks sends it once."""
    link = Link(rate=1e9)
    on_link = link.transfer("all-reduce", 4_000_000, 2).seconds
    assert seconds("allreduce", link) == pytest.approx(0.3 + on_link)


def test_a_compressed_step_adds_copies_and_sends_fewer_bytes() -> None:
    """2 copies of each element before the round and 1 after it, at 1 ns a copy of an element: 2 and 1 ms."""
    link = Link(rate=1e9)
    on_link = link.transfer(HALF_SUM, 2_000_000, 2).seconds
    assert seconds("fp16", link) == pytest.approx(0.3 + 2e-3 + on_link + 1e-3)


def test_gloo_adds_processor_time_for_bytes_messages_and_rounds() -> None:
    gloo = MADE_UP.on_gloo(Link(rate=math.inf), COPY)
    # 4 MB at 10 copies of a byte of 0.25 ns, two messages that wait, and a round
    assert seconds("allreduce", gloo) == pytest.approx(0.3 + 4e6 * 10 * 0.25e-9 + 2 * 0.001 + 0.002)


def test_buckets_that_the_engine_joins_are_counted_as_one_exchange() -> None:
    """25 million parameters are five buckets; the first is alone under fifo, and a unit ends with 4 M elements."""
    found = profile_from_tables(25e6, 2, compute=0.3, hooks=["powersgd:rank=4", "fp16"], copy=COPY).hooks
    assert len(found["fp16"].buckets) == len(found["noop"].buckets) == 5
    assert [one.bytes for one in found["powersgd:rank=4"].buckets] == [one.bytes for one in found["fp16"].buckets]
    sizes = [UNIT_ELEMENTS["fifo"] // 4] * 9
    assert in_units(sizes, "fifo", joins=True) == [[0], [1, 2, 3, 4], [5, 6, 7, 8]]
    assert in_units(sizes, "fused", joins=True) == [[0, 1, 2, 3, 4, 5, 6, 7, 8]]
    assert in_units(sizes, "fused", joins=False) == [[number] for number in range(9)]


def test_a_cost_is_interpolated_between_matrices_and_proportional_beyond_the_largest() -> None:
    costs = dataclasses.replace(costs_of(DENSE), matrices=(Sample(100, (500.0, 0.0)), Sample(300, (900.0, 0.0))))

    def copies(*shape: int) -> float:
        return costs.seconds([shape], 2, 1.0, 1)[0]

    assert copies(20, 10) == pytest.approx(700)  # half-way
    assert copies(30, 20) == pytest.approx(1800)
    assert copies(5, 10) == pytest.approx(400)  # the line between the first two goes on
    assert copies(10) == pytest.approx(40)  # a vector
    assert costs.seconds([(20, 10)] * 3 + [(10,)], 2, 1.0, 1)[0] == pytest.approx(3 * 700 + 40)


def test_each_rank_beyond_two_makes_gathering_dearer_in_tables_and_in_a_measured_profile() -> None:
    two, ten = (profile_from_tables(1e6, n, compute=0.3, hooks=HOOKS, costs=MADE_UP, copy=COPY) for n in (2, 10))
    grown = as_one_of(two, 10, MADE_UP)
    for label in ("allreduce", *HOOKS):
        for own, expected in zip(grown.hooks[label].buckets, ten.hooks[label].buckets, strict=True):
            assert own.after == pytest.approx(expected.after)
            assert [one.sends for one in own.rounds] == [one.sends for one in expected.rounds]
        assert grown.hooks[label].step.seconds.median == pytest.approx(ten.hooks[label].step.seconds.median)
    assert as_one_of(two, 2, MADE_UP) is two


@pytest.mark.parametrize("hook", ["top-k:ratio=0.01", "powersgd:rank=4", "sign", "int8"])
def test_payloads_of_many_ranks_are_those_that_counting_finds(hook: str) -> None:
    """Beyond 16 ranks they follow the power law through what is counted for 8 and 16."""
    (unit,) = profile_from_tables(1e6, 64, compute=0.3, hooks=[hook], copy=COPY).hooks[hook].buckets
    counted = rounds_of(commhooks.make_compressor(hook), {"0": torch.randn(1000, 1000)}, 64)
    for one, sends in zip(unit.rounds, counted, strict=True):
        assert [kind for kind, _ in one.sends] == [kind for kind, _ in sends]
        assert [size for _, size in one.sends] == pytest.approx([size for _, size in sends], rel=0.06)  # padding


def test_a_model_gives_its_shapes_and_the_fastest_hook_comes_first() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    model[0].bias.requires_grad_(False)
    profile = profile_from_tables(model, 2, compute=0.01, copy=4e-10)
    assert sum(one.bytes for one in profile.gradients) == 4 * (64 * 64 + 64 * 8 + 8)
    found = plan(profile, Link(rate=1e7))
    assert [one.seconds for one in found.choices] == sorted(one.seconds for one in found.choices)
    assert all(one.uncertainty > 0 for one in found.choices)


def test_what_no_table_knows_is_refused() -> None:
    for settings, message in (
        ({"hooks": ["powersgd:rank=5"]}, "its costs were not measured.*--task"),
        ({"compute": 0.0}, "compute must be above zero"),
        ({"ranks": 1}, "ranks must be at least 2"),
        ({"model": 0.0}, "parameters must be a finite number of at least 1"),
        ({"model": nn.Tanh()}, "no parameter that requires a gradient"),
    ):
        with pytest.raises(SettingsError, match=message):
            profile_from_tables(**{"model": 1e6, "ranks": 2, "compute": 0.1, "copy": COPY, **settings})  # type: ignore[arg-type]  # 'incompatible type "**dict[str, object]"'
