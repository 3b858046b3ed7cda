"""What DiLoCo computes, in workers of one process."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import commhooks
from commhooks import CheckpointError, DiLoCo, SettingsError
from commhooks.diloco.cutting import cut
from commhooks.diloco.starting import Schedule
from commhooks.errors import CompressorError
from commhooks.lockstep import lockstep_connections, step_in_lockstep
from tests.commhooks.resuming import distance
from tests.diloco.workers import Worker, network, train_in_lockstep, workers

plain = functools.partial(torch.optim.SGD, lr=1.0)


# --- against other computations ---------------------------------------------------------------------------------------


def numpy_reference(start: list[Any], pull: list[list[Any]], steps: int, every: int, delay: int, mixing: float) -> Any:
    """Train workers whose gradient is w - their target, with inner rate 0.1 and outer Nesterov 0.7 and 0.9, in fp64.

    Every element of `start` is a fragment; `pull[rank]` are a rank's targets.
    """
    local = [[w.copy() for w in start] for _ in pull]
    outer, momentum, sent = [w.copy() for w in start], [0.0 * w for w in start], {}
    for step in range(1, steps + 1):
        for own, targets in zip(local, pull, strict=True):
            own[:] = [w - 0.1 * (w - target) for w, target in zip(own, targets, strict=True)]
        for number in range(len(start)):
            turn = (number + 1) * every // len(start)
            if step + delay >= turn and (step + delay - turn) % every == 0:
                sent[number] = step + delay, sum(outer[number] - own[number] for own in local) / len(local)
        for number, (due, mean) in list(sent.items()):
            if due == step:
                del sent[number]
                momentum[number] = 0.9 * momentum[number] + mean
                outer[number] -= 0.7 * (mean + 0.9 * momentum[number])
                for own in local:
                    own[number] = mixing * own[number] + (1 - mixing) * outer[number]
    return local, outer


class Weights(nn.Module):
    def __init__(self, start: list[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(w.clone()) for w in start])


@pytest.mark.parametrize(("delay", "mixing"), [(0, 0.0), (1, 0.5), (4, 0.25), (0, 1.0), (2, 1.0)])
def test_ten_rounds_of_three_fragments_are_those_of_a_reference_in_numpy(delay: int, mixing: float) -> None:
    """Bound: an outer step of rate 0.7 and momentum 0.9 multiplies an earlier error by at most 7, over few rounds."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(n, generator=generator) for n in (7, 11, 5)]
    pull = [[torch.randn(len(w), generator=generator) for w in start] for _ in range(3)]
    models = [Weights(start) for _ in pull]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    settings: dict[str, Any] = {"every": 6, "outer": "published", "fragments": 3, "delay": delay, "mixing": mixing}
    team = [
        DiLoCo(model, optimizer, connection=connection, **settings)
        for model, optimizer, connection in zip(models, optimizers, lockstep_connections(3), strict=True)
    ]
    for _ in range(60):
        for model, optimizer, targets in zip(models, optimizers, pull, strict=True):
            for weight, target in zip(model.weights, targets, strict=True):
                weight.grad = weight.detach() - target
            optimizer.step()
        step_in_lockstep(team)
    in_fp64 = [w.double().numpy() for w in start]
    targets_in_fp64 = [[target.double().numpy() for target in own] for own in pull]
    local, outer = numpy_reference(in_fp64, targets_in_fp64, 60, 6, delay, mixing)
    for rank, model in enumerate(models):
        for found, expected in zip(model.weights, local[rank], strict=True):
            numpy.testing.assert_allclose(found.detach().numpy(), expected, rtol=0, atol=60 * 7 * 2**-24 * 4)
    for number, fragment in enumerate(team[0]._fragments):
        (found,) = fragment.outer.values()
        numpy.testing.assert_allclose(found.numpy(), outer[number], rtol=0, atol=60 * 7 * 2**-24 * 4)


class TwoWeights(nn.Module):
    """Two fragments of one weight each, 1.0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(1)) for _ in range(2))


# torchft's regression fixtures ("mocked updates"): 2 workers, every inner step subtracts 2, H = 6, P = 2. Bit-equal:
# these values are dyadic.
@pytest.mark.parametrize(
    ("delay", "mixing", "local", "outer"),
    [
        (0, 0.0, ([-11, -35, -59], [-23, -47]), ([-11, -35], [-23, -47])),
        (0, 0.5, ([-8, -24.5, -40.25], [-17, -32]), ([-11, -29], [-23, -35])),
        (1, 0.0, ([-7, -27, -47], [-19, -39]), ([-7, -27], [-19, -39])),
    ],
)
def test_mocked_updates_give_the_published_values(
    delay: int, mixing: float, local: tuple[list[float], list[float]], outer: tuple[list[float], list[float]]
) -> None:
    models = [TwoWeights() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    settings: dict[str, Any] = {"every": 6, "fragments": ["first", "second"], "delay": delay, "mixing": mixing}
    team = [
        DiLoCo(model, optimizer, outer=functools.partial(torch.optim.SGD, lr=2.0), connection=connection, **settings)
        for model, optimizer, connection in zip(models, optimizers, lockstep_connections(2), strict=True)
    ]
    found: dict[str, list[float]] = {name: [] for name in ("first", "second", "outer first", "outer second")}
    for step in range(1, 16):
        for model, optimizer in zip(models, optimizers, strict=True):
            for weight in model.parameters():
                weight.grad = torch.full((1,), 2.0)
            optimizer.step()
        step_in_lockstep(team)
        turn = {3: "first", 0: "second"}.get(step % 6)
        if turn is not None:
            copies = {name: copy for one in team[0]._fragments for name, copy in one.outer.items()}
            found[turn].append(getattr(models[0], turn).item())
            found[f"outer {turn}"].append(copies[turn].item())
        assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert (found["first"], found["second"]) == (list(map(float, local[0])), list(map(float, local[1])))
    assert found["outer first"][: len(outer[0])] == list(map(float, outer[0]))
    assert found["outer second"] == list(map(float, outer[1]))


@pytest.mark.parametrize(
    ("outer", "every", "compressor", "chosen"),
    [
        ("auto", 30, "int4", "average"),
        ("auto", 100, "powersgd:rank=1", "average"),
        ("auto", 101, "int4", "published"),
        ("auto", 500, "sparse-loco", "average"),
        ("sgd:rate=0.7,momentum=0.9", 3, "int4", "published"),
        ("sgd:rate=0.5", 3, "int4", "sgd:momentum=0,rate=0.5"),
        (plain, 3, "int4", "own"),
    ],
)
def test_the_outer_optimizer_is_chosen_by_compressor_and_rounds_and_said(
    outer: Any, every: int, compressor: str, chosen: str
) -> None:
    (one,) = workers(1, every=every, compressor=compressor, outer=outer)
    assert one.diloco.schedule.outer == chosen
    assert one.save()["diloco"]["shared"]["schedule"]["outer"] == chosen
    assert f"outer {chosen}," in str(one.diloco)


def test_a_checkpoint_with_another_outer_optimizer_is_loaded_only_if_asked_and_then_the_new_one_steps() -> None:
    before = workers(2, every=3)
    train_in_lockstep(before, 0, 6)
    (saved, _), (after, _) = [one.save() for one in before], workers(2, every=3, outer="auto")
    with pytest.raises(CheckpointError, match="outer: saved with 'published', now 'average'; pass settings='change'"):
        after.diloco.load_state_dict(saved["diloco"])
    after.diloco.load_state_dict(saved["diloco"], settings="change")
    (group,) = after.diloco.outer_optimizer.param_groups
    assert (group["lr"], group["momentum"]) == (1.0, 0.0) and not after.diloco.outer_optimizer.state
    (divided,) = workers(1, every=3, fragments=2)
    with pytest.raises(CheckpointError, match=r"fragments: saved with .*, now [^;]*$"):
        divided.diloco.load_state_dict(saved["diloco"], settings="change", world_size="keep")


@pytest.mark.parametrize("compressor", ["all-reduce", "bf16-two-hop"])
def test_ranks_count_by_their_weights_and_one_of_weight_0_not_at_all(compressor: str) -> None:
    """Bound: bf16's rounding of differences below 0.2, twice."""
    team = workers(3, every=4, compressor=compressor, outer=plain, weighted=True, fragments=2)
    starts = [{name: p.detach().clone() for name, p in worker.model.named_parameters()} for worker in team]
    for worker, weight in zip(team, (3.0, 1.0, 0.0), strict=True):
        worker.diloco.weight = weight
    train_in_lockstep(team, 0, 1)
    with torch.no_grad():
        for worker in team:
            for parameter in worker.model.parameters():
                there = torch.randn_like(parameter).clamp(-0.2, 0.2)
                parameter.copy_(there if worker.rank < 2 else torch.full_like(there, math.nan))
    went = [{name: p.detach().clone() for name, p in worker.model.named_parameters()} for worker in team[:2]]
    for _ in range(3):
        step_in_lockstep([worker.diloco for worker in team])
    for name, held in team[2].model.named_parameters():
        expected = 0.75 * went[0][name] + 0.25 * went[1][name]
        allowed = 2**-23 * 8 if compressor == "all-reduce" else 2 * 2**-8 * 2 * 0.4 + 2**-23
        assert (held - expected).abs().amax() <= allowed, name
        assert not torch.equal(held, starts[2][name])
    with pytest.raises(SettingsError, match="counts votes"):
        workers(1, every=4, compressor="signum", weighted=True)


def test_a_weight_that_cannot_work_is_refused_where_it_is_set_and_nothing_is_lost() -> None:
    (weighted,), (plain_one,) = (workers(1, every=1, weighted=each) for each in (True, False))
    weighted.diloco.weight = 3.0
    refused: list[Any] = ["2", None, [1], math.nan, -1, 1e31, torch.ones(2)]
    for wrong in refused:
        with pytest.raises(SettingsError, match=r"DiLoCo.weight must be 0, or from 1e-30 to 1e\+30 \(got "):
            weighted.diloco.weight = wrong
    assert weighted.diloco.weight == 3
    tokens: Any = torch.tensor(512)
    weighted.diloco.weight = tokens
    with pytest.raises(SettingsError, match=r"DiLoCo.weight needs DiLoCo\(weighted=True\) \(got 2.0\)"):
        plain_one.diloco.weight = 2.0
    for one in (weighted, plain_one):
        train_in_lockstep([one], 0, 2)
    assert (weighted.diloco.weight, plain_one.diloco.weight) == (512, 1)


# --- narrow models, buffers, tied and frozen parameters ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_round_without_movement_moves_nothing(dtype: torch.dtype) -> None:
    """Also after outer steps whose results the model's dtype cannot hold."""
    model = nn.Linear(8, 8).to(dtype)
    optimizer, (connection,) = torch.optim.SGD(model.parameters(), lr=0.1), lockstep_connections(1)
    diloco = DiLoCo(model, optimizer, every=2, outer=functools.partial(torch.optim.SGD, lr=0.3), connection=connection)
    for step in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01 * (step + 1))
        optimizer.step()
        diloco.step()
    outer = {name: held.clone() for name, held in diloco._fragments[0].outer.items()}
    assert all(held.dtype == torch.promote_types(dtype, torch.float32) for held in outer.values())
    before = copy.deepcopy(model.state_dict())
    for _ in range(4):
        diloco.step()
    assert distance(diloco._fragments[0].outer, outer) == 0 and distance(dict(model.state_dict()), dict(before)) == 0


def with_buffers(rank: int) -> nn.Module:
    model = nn.Linear(3, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.register_buffer("mean", torch.full((4,), 1.0))
    model.register_buffer("narrow", torch.ones(2, dtype=torch.float16))
    model.register_buffer("turns", torch.ones(2, 3, dtype=torch.complex64).t())
    model.register_buffer("narrowest", torch.ones(2, dtype=torch.float8_e4m3fn))
    model.register_buffer("count", torch.tensor(5))
    model.register_buffer("seeds", torch.zeros(3, 2, dtype=torch.int64).t())
    model.register_buffer("short", torch.zeros(3, dtype=torch.int16))
    model.register_buffer("flag", torch.tensor([True, False]))
    model.register_buffer("cache", torch.zeros(rank + 1), persistent=False)
    return model


def team_of(models: Sequence[nn.Module], **settings: Any) -> list[DiLoCo]:
    """Return workers of one process that train these models."""
    return [
        DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), connection=connection, **settings)
        for model, connection in zip(models, lockstep_connections(len(models)), strict=True)
    ]


@pytest.mark.parametrize("delay", [0, 1])
def test_floating_buffers_are_averaged_and_others_are_rank_0s(delay: int) -> None:
    """Those of a rank on which one is not finite do not count."""
    models = [with_buffers(rank) for rank in range(3)]
    buffers = [dict(model.named_buffers()) for model in models]
    team = team_of(models, every=2, delay=delay)
    for rank, own in enumerate(buffers):
        own["mean"].fill_(4.0 * rank)
        own["narrow"].fill_(2.0 * rank)
        own["turns"].fill_(complex(2.0 * rank, -rank))
        own["narrowest"].fill_(2.0 * rank)
        own["count"].fill_((1 << 62) + 1 + rank)
        own["seeds"].copy_(torch.tensor([[-(1 << 63), (1 << 63) - 1, -1], [1 << 53, -5, (1 << 53) + 1]]) ^ rank)
        own["short"].copy_(torch.tensor([-(1 << 15), -1, (1 << 15) - 1]) ^ rank)
        own["flag"].fill_(rank != 0)
    for _ in range(2):
        step_in_lockstep(team)
    for own in buffers:
        torch.testing.assert_close(own["mean"], torch.full((4,), 4.0))
        torch.testing.assert_close(own["narrow"], torch.full((2,), 2.0, dtype=torch.float16))
        torch.testing.assert_close(own["turns"], torch.full((3, 2), 2 - 1j))
        assert own["narrowest"].float().tolist() == [2.0, 2.0]
        assert int(own["count"]) == (1 << 62) + 1 and not own["flag"].any()
        assert own["seeds"].tolist() == [[-(1 << 63), (1 << 63) - 1, -1], [1 << 53, -5, (1 << 53) + 1]]
        assert own["short"].tolist() == [-(1 << 15), -1, (1 << 15) - 1]
    for rank, own in enumerate(buffers):
        own["mean"].fill_(math.nan if rank == 1 else 3.0 * rank)
    for _ in range(2):
        step_in_lockstep(team)
    for own in buffers:
        torch.testing.assert_close(own["mean"], torch.full((4,), 3.0))


@pytest.mark.parametrize("heaviest", [3.0, 1e30])
def test_buffers_are_weighed_as_fragments_are(heaviest: float) -> None:
    """A rank of weight 0 is left out, whatever its buffers are; if all have weight 0, each keeps its own."""
    models = [with_buffers(rank) for rank in range(3)]
    team = team_of(models, every=1, weighted=True)
    buffers = [dict(model.named_buffers()) for model in models]
    for rank, own in enumerate(buffers):
        team[rank].weight = (0.0, heaviest, heaviest / 3)[rank]
        own["mean"].fill_((math.inf, 4.0, 8.0)[rank])
        own["narrow"].fill_((2.0, 4.0, 8.0)[rank])
        own["turns"].fill_((2.0, 4j, 8j)[rank])
        own["count"].fill_(rank + 1)
    step_in_lockstep(team)
    for own in buffers:
        torch.testing.assert_close(own["mean"], torch.full((4,), 5.0))
        assert own["narrow"].tolist() == [5.0, 5.0] and own["count"] == 1
        torch.testing.assert_close(own["turns"], torch.full((3, 2), 5j))
    for rank, own in enumerate(buffers):
        team[rank].weight = 0.0
        own["mean"].fill_(rank)
    step_in_lockstep(team)
    assert [own["mean"].tolist() for own in buffers] == [[rank] * 4 for rank in range(3)]


# --- fragments --------------------------------------------------------------------------------------------------------


def sized(**sizes: int) -> dict[str, Tensor]:
    return {name.replace("_", "."): torch.empty(elements, device="meta") for name, elements in sizes.items()}


def test_layers_are_dealt_to_fragments_or_cut_into_runs_of_about_equal_size() -> None:
    blocks = {f"blocks.{n}.{part}.weight": torch.empty(100, device="meta") for n in range(5) for part in ("one", "two")}
    named = sized(tokens_weight=300) | blocks | sized(head_weight=300, head_bias=10)
    by_layer = [["tokens.weight"], *[[f"blocks.{n}.one.weight", f"blocks.{n}.two.weight"] for n in range(5)]]
    by_layer.append(["head.weight", "head.bias"])
    strided = cut(named, 3, "strided")
    assert strided == [list(itertools.chain(*by_layer[first::3])) for first in range(3)]
    runs = cut(named, 3, "sequential")
    assert list(itertools.chain(*runs)) == list(named)
    assert [sum(named[name].numel() for name in run) for run in runs] == [500, 600, 510]
    assert cut(named, 13, "strided")[12] == ["head.bias"], "cut between parameters if there are too few layers"
    assert len(cut(named, 7, "sequential")) == 7
    assert cut(named, [["tokens.*", "head.*"], "blocks.*"], "strided")[0] == [
        "tokens.weight",
        "head.weight",
        "head.bias",
    ]


@pytest.mark.parametrize(("delay", "overlaps"), [(0, False), (9, False), (10, True), (25, True)])
def test_exchanges_overlap_from_a_delay_of_the_smallest_gap_on(delay: int, overlaps: bool) -> None:
    schedule = Schedule(every=30, delay=delay, mixing=0.0, fragments=(("a",), ("b",), ("c",)))
    assert schedule.overlaps == overlaps
    assert not Schedule(every=30, delay=delay, mixing=0.0, fragments=(("a",),)).overlaps


# --- steps that are not like others -----------------------------------------------------------------------------------


def spoil(worker: Worker, value: float) -> None:
    """Let one step see a gradient that is not finite."""
    Worker.gradients(worker.model, worker.rank, 0)
    next(worker.model.parameters()).grad.view(-1)[0] = value  # type: ignore[union-attr]  # None has no view


@pytest.mark.parametrize("compressor", ["all-reduce", "int4", "top-k"])
@pytest.mark.parametrize("schedule", [{}, {"fragments": 3, "delay": 1, "mixing": 0.5}], ids=["whole", "fragments"])
def test_after_an_inf_the_round_is_dropped_and_training_goes_on(compressor: str, schedule: dict[str, Any]) -> None:
    """The moments that it leaves on the guilty rank are cleared: otherwise every later round would be dropped."""
    team = workers(2, every=6, compressor=compressor, **schedule)
    train_in_lockstep(team, 0, 7)
    spoil(team[1], math.inf)
    team[0].inner_step(7)
    team[1].optimizer.step()
    step_in_lockstep([worker.diloco for worker in team])
    with pytest.warns(UserWarning, match="was dropped, as its mean is not finite") as told:
        train_in_lockstep(team, 8, 36)
    of_ranks = [worker.diloco.statistics() for worker in team]
    fragments = schedule.get("fragments", 1)
    assert {one.rounds for one in of_ranks} == {6 * fragments - (schedule.get("delay", 0) > 2)}
    assert {one.dropped_rounds for one in of_ranks} == {1 if fragments == 1 else of_ranks[0].dropped_rounds}
    assert 1 <= of_ranks[0].dropped_rounds <= fragments, "no later round is dropped"
    assert of_ranks[1].cleared > 0 and of_ranks[0].cleared == 0
    texts = [str(one.message) for one in told]
    assert len(texts) == 2 * of_ranks[0].dropped_rounds, "on every rank"
    assert {one.filename for one in told} == {train_in_lockstep.__code__.co_filename}, "where the step was called"
    assert sum("which was not finite here, was cleared" in text for text in texts) >= 1
    for worker in team:
        assert all(bool(p.isfinite().all()) for p in worker.model.parameters())
        states = [t for state in worker.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        assert all(bool(t.isfinite().all()) for t in states)
    first, other = (dict(one for f in w.diloco._fragments for one in f.outer.items()) for w in team)
    assert distance(first, other) == 0


def test_a_step_that_a_gradient_scaler_leaves_out_counts() -> None:
    team = workers(2, every=3)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in team]
    for step in range(9):
        for worker, scaler in zip(team, scalers, strict=True):
            Worker.gradients(worker.model, worker.rank, step, scaler)
            if step == 4 and worker.rank == 1:
                next(worker.model.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]  # None has no fill_
            scaler.step(worker.optimizer)
            scaler.update()
        step_in_lockstep([worker.diloco for worker in team])
    counts = [worker.diloco.statistics() for worker in team]
    assert [(one.steps, one.rounds, one.dropped_rounds, one.cleared) for one in counts] == [(9, 3, 0, 0)] * 2
    assert distance(dict(team[0].model.state_dict()), dict(team[1].model.state_dict())) == 0


def test_a_second_step_that_was_not_counted_raises_before_it_is_taken() -> None:
    (worker,) = workers(1, every=3)
    get_optimizer_state_dict(worker.model, worker.optimizer)  # takes a step with a rate of 0, so that there is a state
    worker.inner_step(0)
    with pytest.raises(CheckpointError, match="took a step that was not counted"):
        worker.diloco.state_dict()
    before = copy.deepcopy(dict(worker.model.state_dict()))
    with pytest.raises(CompressorError, match="rank 0: AdamW is about to take a second step since"):
        worker.inner_step(1)
    assert distance(dict(worker.model.state_dict()), before) == 0


def test_a_state_that_was_loaded_stays_as_it_is() -> None:
    team = workers(1, every=1)
    train_in_lockstep(team, 0, 2)
    state = team[0].diloco.state_dict()
    before = copy.deepcopy(state)
    team[0].diloco.load_state_dict(state)
    train_in_lockstep(team, 2, 4)
    assert distance(state, before) == 0


# --- evaluation, statistics, memory -----------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps in its group, as schedule-free ones do, and slows down with them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__(tensors, lr=0.5, momentum=0.5)
        self.param_groups[0]["steps"] = 0

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["steps"] += 1
        self.param_groups[0]["lr"] = 0.5 / self.param_groups[0]["steps"]
        return super().step(closure)


OVERLAPPING = {"fragments": 3, "delay": 4, "mixing": 0.5}


@pytest.mark.parametrize(
    "schedule", [{}, OVERLAPPING, OVERLAPPING | {"outer": Counting}], ids=["whole", "fragments", "counting"]
)
def test_evaluation_at_the_outer_copies_drains_them_and_leaves_no_trace(schedule: dict[str, Any]) -> None:
    watched, alone = (workers(2, every=6, compressor="int4", **schedule) for _ in range(2))
    for step in range(0, 24, 2):
        for team in (watched, alone):
            train_in_lockstep(team, step, step + 2)
        seen = []
        for worker, mode in zip(watched, (torch.inference_mode, torch.enable_grad), strict=True):
            own = copy.deepcopy(dict(worker.model.state_dict()))
            with mode(), worker.diloco.outer_parameters():
                seen.append(copy.deepcopy(dict(worker.model.state_dict())))
            assert distance(dict(worker.model.state_dict()), own) == 0
        assert distance(*seen) == 0, "the same on every rank"
        assert step < 6 or distance(seen[0], dict(network().state_dict())) > 0
    for one, other in zip(watched, alone, strict=True):
        assert distance(one.save(), other.save()) == 0
    last = watched[0].diloco
    due = [fragment for fragment in last._fragments if fragment.due is not None]
    assert bool(due) == bool(schedule)
    for fragment in sorted(due, key=lambda one: one.due or 0):  # what was seen is what they become, turn by turn
        fragment.foresee(last.outer_optimizer)
        assert all(torch.equal(seen[0][name], outer) for name, outer in fragment.outer.items())


def test_bytes_are_those_of_one_exchange_in_every_round() -> None:
    elements = sum(p.numel() for p in network().parameters())
    for every in (1, 6):
        team = workers(2, every=every)
        train_in_lockstep(team, 0, 12)
        counts = team[0].diloco.statistics()
        assert counts.traffic.payload_bytes == 4 * elements * 12 // every
        assert counts.bytes_per_step == counts.traffic.moved_bytes / 12
        assert counts.peak_bytes_per_step == counts.traffic.moved_bytes / (12 // every)
    fragments = workers(2, every=6, fragments=3, delay=2)
    train_in_lockstep(fragments, 0, 12)
    counts = fragments[0].diloco.statistics()
    largest = max(sum(t.numel() for t in f.outer.values()) for f in fragments[0].diloco._fragments)
    assert counts.peak_bytes_per_step == (4 * largest + 32) / 2, "a ring of two sends each byte once, and a header"
    assert counts.rounds == 5, "the first turn comes before its delay is over"
    assert "5 rounds, 0 of them dropped" in str(fragments[0].diloco)


def test_memory_for_each_parameter_is_as_stated() -> None:
    """16 + 4/W bytes with a residual and a server error in two hops; 12 + 4/P + 4/W if fragments never overlap."""

    def bytes_of(**schedule: Any) -> float:
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])
        team = [
            Worker(rank, model=copy.deepcopy(model), every=8, compressor="int4", connection=connection, **schedule)
            for rank, connection in enumerate(lockstep_connections(2, "fused"))
        ]
        for turn in range(10):
            for worker in team:
                worker.optimizer.zero_grad()
                with torch.no_grad():
                    for parameter in worker.model.parameters():
                        parameter.add_(torch.randn_like(parameter), alpha=0.01 * (turn + 1))
            step_in_lockstep([worker.diloco for worker in team])
        diloco = team[0].diloco
        report = diloco.exchange.memory()
        outer = sum(held.numel() * 4 for fragment in diloco._fragments for held in fragment.outer.values())
        states = diloco.outer_optimizer.state.values()
        momentum = sum(t.numel() * 4 for state in states for t in state.values() if isinstance(t, Tensor))
        elements = sum(p.numel() for p in model.parameters())
        return (outer + momentum + report.gradients + report.residuals) / elements

    assert bytes_of() == 16 + 4 / 2
    assert bytes_of(fragments=4, delay=1) == 12 + 4 / 4 + 4 / 2
    assert bytes_of(fragments=4, delay=2) == 16 + 4 / 2, "the gap between turns is 2"


def spoilt(state: dict[str, Any], where: str, value: Any = None) -> dict[str, Any]:
    """Return a copy of a state, without what is found at a path, or with another value there."""
    changed = copy.deepcopy(state)
    *path, last = where.split("/")
    held = functools.reduce(lambda within, key: within[key], path, changed)
    del held[last]
    if value is not None:
        held[last] = value
    return changed


@pytest.mark.parametrize(
    ("where", "value", "complaint"),
    [
        ("shared/due", None, "DiLoCo's state is damaged: due: expected dict, got nothing"),
        ("shared/due", {"7": {"at": 9, "mean": {}}}, "means of part 7 were under way, and there are 1 parts"),
        (
            "shared/due/0/mean/2.bias",
            torch.zeros(1),
            r"means under way: '2.bias' was saved with shape \(1,\), now \(48,\)",
        ),
        ("shared/due/0/at", 2, "a mean was due at step 2, which was over at step 2"),
        ("shared/outer/2.bias", None, "outer copies: checkpoint has no '2.bias'"),
        ("shared/outer_optimizer", {}, r"outer_optimizer\['param_groups'\]: expected list, got nothing"),
        ("shared/outer_optimizer/param_groups", [], "outer optimizer: saved with 0 groups of parameters, now 1"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(where: str, value: Any, complaint: str) -> None:
    one, other = (workers(1, every=4, delay=3)[0] for _ in range(2))
    for worker, steps in ((one, 2), (other, 1)):
        train_in_lockstep([worker], 0, steps)
    state, before = one.save(), other.save()
    with pytest.raises(CheckpointError, match=complaint):
        other.diloco.load_state_dict(spoilt(state["diloco"], where, value))
    assert distance(other.save(), before) == 0
    other.load(state)
    assert distance(other.save(), state) == 0


# --- what cannot work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"every": 0}, r"DiLoCo\(every=0\): every must be an int of at least 1"),
        ({"every": 4, "delay": 4}, r"DiLoCo\(delay=4\): delay must be an int from 0 to 3"),
        ({"every": 4, "mixing": 1.5}, r"DiLoCo\(mixing=1.5\): mixing must be a number in \[0, 1\]"),
        ({"every": 4, "fragments": [["0.*"], 3]}, r"DiLoCo\(fragments=\[\['0.\*'\], 3\]\): fragments must be an int"),
        ({"every": 4, "weighted": 2.5}, r"DiLoCo\(weighted=2.5\): weighted must be True or False"),
        ({"every": 100, "fragments": 9}, "at most as many as the trained parameters, 8"),
        ({"every": 2, "fragments": 3}, "3 fragments need at least as many steps"),
        ({"every": 4, "fragments": [["0.*"], ["2.*", "4.*"]]}, "'6.weight' matches no pattern"),
        ({"every": 4, "fragments": [["0.*"], ["*"]]}, r"'0.weight' matches the patterns of 2 fragments, \['0"),
        ({"every": 4, "fragments": [["*"], ["head"]]}, r"\['head'\] must match a parameter"),
        ({"every": 4, "arrangement": "random"}, "arrangement must be one of strided, sequential, even"),
        ({"every": 4, "compressor": "powersdg"}, "Did you mean 'powersgd'"),
        ({"every": 4, "outer": lambda parameters: 3}, "outer must return a torch.optim.Optimizer"),
        ({"every": 4, "outer": lambda parameters: plain(parameters[:2])}, "of the tensors that it is given"),
        ({"every": 4, "outer": lambda parameters: 1 // 0}, "outer raised ZeroDivisionError"),
        ({"every": 4, "hook_timeout": -1.0}, "hook_timeout must be above 0 s"),
        (
            {"every": 4, "connection": "a connection"},
            "connection must be one of lockstep_connections; pass a process_group",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_in_words(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        Worker(0, **{"connection": lockstep_connections(1)[0]} | settings)


def test_models_and_optimizers_that_cannot_work_are_refused_in_words() -> None:
    model, connection = network(), lockstep_connections(1)[0]
    half, rest = (torch.optim.SGD(list(model.parameters())[part], lr=0.1) for part in (slice(4), slice(4, None)))
    wider = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))])
    refused: list[tuple[Any, Any, str]] = [
        (model, half, "'4.weight' and 3 more requires a gradient, but SGD does not train it. DiLoCo takes"),
        (model, [half, rest], "DiLoCo: expected a torch.optim.Optimizer"),
        (model, wider, "also trains 1 tensor that DiLoCo does"),
        (model, torch.optim.SGD([nn.Parameter(torch.ones(1))]), "none of the parameters of SGD belongs to the model"),
        (3, half, r"model must be a torch.nn.Module \(got int\)"),
        (nn.Linear(2, 2).requires_grad_(False), half, "no parameter of the model requires a gradient"),
    ]
    for of_model, optimizer, complaint in refused:
        with pytest.raises((SettingsError, commhooks.AttachError), match=complaint):
            DiLoCo(of_model, optimizer, every=3, connection=connection)


def test_an_optimizer_is_used_by_one_diloco_until_that_is_closed_or_gone() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def make() -> DiLoCo:
        return DiLoCo(model, optimizer, every=3, connection=lockstep_connections(1)[0])

    first = make()
    with pytest.raises(SettingsError, match=r"this SGD is used by another DiLoCo; call its close\(\) first"):
        make()
    first.close()
    second = make()
    first.close()
    with pytest.raises(SettingsError, match="used by another DiLoCo"):
        make()
    copy.deepcopy(optimizer)  # without what watches it
    del second
    gc.collect()
    for _ in range(2):
        optimizer.step()  # nobody counts
    make().close()


# --- failures ---------------------------------------------------------------------------------------------------------


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def _failing(*_: object) -> None:
    raise RuntimeError("of its own")


@pytest.mark.parametrize("how", [_failing, _interrupted])
def test_after_half_a_step_no_later_step_is_taken(how: Any) -> None:
    """Whoever catches the error, as a notebook does an interrupt, would train alone from then on."""
    team = workers(1, every=2, compressor="int8")
    train_in_lockstep(team, 0, 3)
    team[0].diloco.outer_optimizer.register_step_pre_hook(how)
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        train_in_lockstep(team, 3, 4)
    for step in range(4, 7):
        with pytest.raises(
            CompressorError,
            match=r"DiLoCo.step: not taken.*rank 0, step 4: (RuntimeError: of its own|KeyboardInterrupt)",
        ):
            train_in_lockstep(team, step, step + 1)
    with pytest.raises(CheckpointError, match="saving after a failure"):
        team[0].diloco.state_dict()


def _replace_bias(worker: Worker) -> None:
    first: Any = worker.model[0]  # type: ignore[index]  # a Sequential
    first.bias = nn.Parameter(first.bias.detach().clone())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_replace_bias, "'0.bias' was replaced: DiLoCo exchanges the parameters that"),
        (lambda worker: worker.model[0].weight.requires_grad_(False), "'0.weight' no longer requires a gradient"),
        (lambda worker: setattr(worker.model, "extra", nn.Parameter(torch.ones(1))), "'extra' now requires a gradient"),
    ],
    ids=["replaced", "frozen", "added"],
)
def test_a_parameter_that_is_another_is_named_at_each_later_step(change: Any, complaint: str) -> None:
    """The optimizer's next step is not to blame: it took as many as DiLoCo was asked to."""
    (worker,) = workers(1, every=100)
    train_in_lockstep([worker], 0, 1)
    change(worker)
    for step in range(1, 4):
        with pytest.raises(CompressorError, match=complaint):
            train_in_lockstep([worker], step, step + 1)


def test_what_joins_or_leaves_its_optimizer_is_named() -> None:
    """Each rank would train a newcomer alone, and nobody one that left."""
    (worker,) = workers(1, every=100)
    train_in_lockstep([worker], 0, 1)
    worker.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2), requires_grad=False)]})
    train_in_lockstep([worker], 1, 2)
    worker.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, 5))]})
    with pytest.raises(CompressorError, match=r"AdamW also trains 2 tensors .*, the first of shape \(2,\) in group 2"):
        train_in_lockstep([worker], 2, 3)
    del worker.optimizer.param_groups[2], worker.optimizer.param_groups[0]["params"][1]
    with pytest.raises(CompressorError, match="'0.bias' requires a gradient, but AdamW does not train it"):
        train_in_lockstep([worker], 3, 4)


def test_buffers_under_way_are_those_of_the_ranks_that_sent_them() -> None:
    """A resumed run may have more ranks: of two, the mean of rank 0's bytes is a half, of three it would be a third."""
    saving, resuming = ([with_buffers(rank) for rank in range(count)] for count in (2, 3))
    team = team_of(saving, every=2, delay=1)
    step_in_lockstep(team)
    state = copy.deepcopy(team[0].state_dict())
    team = team_of(resuming, every=2, delay=1)
    for worker in team:
        worker.load_state_dict(copy.deepcopy(state), world_size="keep")
    step_in_lockstep(team)
    for model in resuming:
        assert int(model.get_buffer("count")) == 5 and model.get_buffer("mean").tolist() == [1.0] * 4


def test_in_a_dropped_round_all_ranks_go_back_to_the_outer_copies() -> None:
    team = workers(2, every=6)
    train_in_lockstep(team, 0, 11)
    outer = {name: held.clone() for name, held in team[0].diloco._fragments[0].outer.items()}
    team[0].inner_step(11)
    spoil(team[1], math.nan)
    team[1].optimizer.step()
    with pytest.warns(UserWarning, match="round 1 of fragment 0 of 1 was dropped"):
        step_in_lockstep([worker.diloco for worker in team])
    assert team[0].diloco.statistics().dropped_rounds == 1
    assert all(distance(dict(worker.model.state_dict()), outer) == 0 for worker in team)


def test_with_another_schedule_what_is_due_is_used_when_it_was_due() -> None:
    """A turn at which the last exchange is still under way is passed over."""
    before, after = workers(2, every=6, delay=3), workers(2, every=4, delay=3)
    train_in_lockstep(before, 0, 4)
    for old, new in zip(before, after, strict=True):
        saved = old.save()
        new.diloco.load_state_dict(saved["diloco"], settings="change")
        new.model.load_state_dict(saved["model"])
        new.optimizer.load_state_dict(saved["optimizer"])
    rounds = []
    for step in range(4, 13):
        train_in_lockstep(after, step, step + 1)
        rounds.append((after[0].diloco._fragments[0].due, after[0].diloco.statistics().rounds))
    # After steps 5 to 13: due at 6; used; passed over at 5, for 8; sent at 9, for 12; used, and sent at 13, for 16.
    assert rounds == [(6, 0), *[(None, 1)] * 3, *[(12, 1)] * 3, (None, 2), (16, 2)]


def test_an_exception_in_an_evaluation_gives_the_model_its_own_values_back() -> None:
    (worker,) = workers(1, every=4)
    train_in_lockstep([worker], 0, 2)
    own = copy.deepcopy(dict(worker.model.state_dict()))
    with pytest.raises(ZeroDivisionError), worker.diloco.outer_parameters():
        raise ZeroDivisionError
    assert distance(dict(worker.model.state_dict()), own) == 0
