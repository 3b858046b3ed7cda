"""The study of costs: what `commhooks plan` computes from tables."""

from __future__ import annotations

import dataclasses

from commhooks import make_compressor
from commhooks.compressors import COMPRESSORS
from commhooks.experiments.hooks import make_hook
from commhooks.experiments.planning.costs import Costs, copy_seconds
from commhooks.experiments.planning.tables import TABLED
from commhooks.experiments.specs import Spec
from experiments.studies.measured_costs import HOOKS, LEFT_OUT, Model, Plan, measure, median_of


def test_every_registered_name_was_measured_or_left_out_for_a_reason() -> None:
    names = {Spec.parse(hook).name for hook in HOOKS}
    assert names | LEFT_OUT.keys() == COMPRESSORS.keys()
    assert not names & LEFT_OUT.keys()


def test_the_file_of_costs_has_the_hooks_that_are_measured_and_those_of_a_plan() -> None:
    costs = Costs.read()
    assert list(costs.hooks) == list(HOOKS)
    for hook, own in costs.hooks.items():
        assert own.compressor == str(make_hook(Spec.parse(hook)))
    assert {"processor", "cores", "system"} == costs.machine.keys()
    assert all(costs.of(str(make_compressor(one if isinstance(one, str) else one.hook))) for one in TABLED)
    assert 1e-11 < copy_seconds() < 1e-7


def test_costs_are_measured_in_steps_for_each_round_and_grow_only_where_answers_do() -> None:
    small, large = Model((32, 32), 16, 1 / 64), Model((64, 64), 16, 1 / 16)
    plan = Plan(
        hooks=("top-k:ratio=0.1", "powersgd:rank=1"),
        matrices=(small, large),
        vector=Model((64,), 16, 1 / 1024),
        split=Model((64, 64), 16, 1 / 64),
        turns=2,
        passes=1,
    )
    found = measure(plan, lambda text: None)
    top_k, powersgd = (found.hooks[hook] for hook in plan.hooks)
    assert [len(sample.rounds) for sample in (*top_k.matrices, top_k.vector)] == [2, 2, 2]
    assert [len(sample.rounds) for sample in powersgd.matrices] == [3, 3]
    assert top_k.growth[0] == 0.0 and powersgd.growth == (0.0, 0.0, 0.0)
    assert make_hook(Spec.parse(plan.hooks[0])) == make_compressor(top_k.compressor)


def test_a_figure_of_several_passes_is_their_median() -> None:
    shipped = Costs.read()
    slow, fast = (dataclasses.replace(shipped, hop_seconds=factor * shipped.hop_seconds) for factor in (3.0, 0.5))
    assert median_of([slow, shipped, fast]) == shipped
    assert median_of([slow, slow, fast]) == slow
