"""FSDP2 in the place of a DDP: what is sharded, what is refused, and what runs of it do."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from commhooks.experiments.links.gloo import course_of
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.runs import SHARDED, RunResult, RunSettings
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.experiments.timing.sharded import ShardedModule, blocks_of, modules_of
from commhooks.experiments.training.sharded import step_bytes
from commhooks.experiments.training.stock import NO_HOOK
from experiments.studies.sharded_lockstep import train_sharded_in_lockstep
from tests.experiments.on_two_ranks import train_on_two_ranks

TASK = "gpt:size=tiny"
SENT = (NO_HOOK, "all-reduce", "bf16", "int8", "int4", "top-k:ratio=0.1", "int8:gather=int8", "all-reduce:gather=bf16")
IN_DDP = "all-reduce in a DDP"
STEPS = 5
LINK = LinkSettings(bits_per_second=1e9)


def settings(hook: str) -> RunSettings:
    return RunSettings.from_dict(
        {"task": TASK, "hook": hook, "steps": STEPS, "evaluate_every": 3, "ddp": SHARDED, "link": LINK.label}
    )


@pytest.fixture(scope="module")
def results() -> dict[str, RunResult]:
    """Return the runs with every hook, and one in a DDP."""
    runs = {hook: settings(hook) for hook in SENT}
    runs[IN_DDP] = dataclasses.replace(settings("all-reduce"), ddp="core")
    return dict(zip(runs, train_on_two_ranks(list(runs.values())), strict=True))


class Inner(nn.Module):
    """Blocks in a list, one of which has only vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3)), self.shared, nn.LayerNorm(3)])


def test_blocks_are_the_outermost_listed_modules_with_a_matrix_of_their_own() -> None:
    model = nn.Module()
    model.inner = inner = Inner()
    model.head = head = nn.Linear(3, 3)
    head.weight = inner.shared.weight
    assert blocks_of(model) == [inner.blocks[0]]
    head.bias.requires_grad_(False)
    block, rest = modules_of(model)
    assert block == ShardedModule(trained=((3, 3), (3,)))
    assert rest == ShardedModule(trained=((3, 3), (3,), (3,), (3,)), frozen=((3,),), stays=True)


def test_two_ranks_without_compression_train_bit_for_bit_as_plain_fsdp2_and_closely_as_a_ddp(
    results: dict[str, RunResult],
) -> None:
    plain, ours, ddp = results[NO_HOOK], results["all-reduce"], results[IN_DDP]
    assert [one.loss for one in plain.steps] == [one.loss for one in ours.steps]
    assert plain.evaluations == ours.evaluations
    assert [one.step for one in plain.evaluations] == [3, 5]
    for sharded, other in zip(plain.evaluations, ddp.evaluations, strict=True):
        assert sharded.loss == pytest.approx(other.loss, rel=1e-4)  # sums in another order, 5 steps of AdamW
    assert all(one.replicas_identical for one in results.values())


@pytest.mark.parametrize("hook", SENT)
def test_bytes_are_those_that_the_model_and_the_hook_foretell(results: dict[str, RunResult], hook: str) -> None:
    model, found = load_task(TASK).model, results[hook]
    for step in found.steps:
        assert step.moved_bytes == step_bytes(model, found.settings.hook, 2)
        assert step.dense_bytes == step_bytes(model, Spec(NO_HOOK), 2)


def test_plain_fsdp2_sends_three_halves_of_a_model_in_blocks_and_gathers_the_rest_once() -> None:
    """On two ranks, of which each keeps a half: two gathers and a reduce-scatter."""
    model = load_task(TASK).model
    *blocks, beside = (4 * module.elements for module in modules_of(model))
    assert step_bytes(model, Spec(NO_HOOK), 2) == 3 * sum(blocks) // 2 + 2 * beside // 2


def test_exchanges_take_their_time_on_the_link_and_all_of_it_counts_once(results: dict[str, RunResult]) -> None:
    *blocks, rest = modules_of(load_task(TASK).model)
    payloads = [module.shard_bytes(2) for module in (*blocks, *blocks, rest)]
    courses = [course_of("all-gather", payload, 2, is_private=False) for payload in payloads]
    courses += [course_of("reduce-scatter", 2 * payload, 2, is_private=False) for payload in payloads[len(blocks) :]]
    least = sum(LINK.seconds_of(course) for course in courses)
    for step in results[NO_HOOK].steps:
        assert step.waiting >= least and step.compression == 0
    for name in SENT:
        for step in results[name].steps:
            assert min(step.compute, step.compression, step.waiting) >= 0 and step.hidden == 0
            assert step.compute + step.compression + step.waiting == pytest.approx(step.seconds)


@pytest.mark.parametrize("hook", SENT[1:])
def test_workers_of_one_process_end_as_ranks_do(results: dict[str, RunResult], hook: str) -> None:
    trained = train_sharded_in_lockstep(load_task(TASK), Spec.parse(hook), steps=STEPS, workers=2)
    assert trained.loss == results[hook].evaluation.loss
    assert trained.moved_bytes == results[hook].steps[-1].moved_bytes
