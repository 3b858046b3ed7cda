"""Machines that act as ranks: `Hierarchical`, in lockstep and over Gloo."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import ErrorFeedback, Exchanger, Hierarchical, PerParameter, SettingsError, StartAfter, make_compressor
from commhooks.codecs import Int8
from commhooks.compressors import SparseLoCo, TopK, TwoHop
from commhooks.language import Compressor
from commhooks.lockstep import average_in_lockstep, lockstep_connections
from commhooks.native import library
from tests.cases import BY_NAME
from tests.commhooks.inline_on_cpu import as_on_nccl
from tests.commhooks.mirrored import Mirrored, largest_error
from tests.commhooks.models import Given, wrap
from tests.commhooks.workers import Workers, exchangers, gradients_of, normal, zeros
from tests.ddp_core.facts import BOTH_DDPS
from tests.tiers import in_turn
from tests.world import on_ranks

needs_library = pytest.mark.skipif(
    isinstance(library.opened(library.PATH), str), reason="there are no compiled passes to differ from eager ones"
)
both_policies = pytest.mark.parametrize("policy", ["fifo", "fused"])
SHAPES = ((30, 20), (7,), (16, 9), (), (4, 3, 2, 2), (0,))
"""Parts of odd numbers of elements, of one, and of none: slices that must be filled up, or are empty."""
machines = pytest.mark.parametrize(("world_size", "size"), [(4, 2), (6, 2), (6, 3), (4, 4)])


def means_of_machines(gradients: Sequence[Sequence[Tensor]], size: int) -> list[list[Tensor]]:
    """Return each machine's mean, added up as an all-reduce in lockstep adds."""
    means = []
    for first in range(0, len(gradients), size):
        parts = [[gradient / size for gradient in own] for own in gradients[first : first + size]]
        means.append([sum(others[1:], others[0]) for others in zip(*parts, strict=True)])
    return means


def check_alike(workers: Workers, plain: Workers, size: int, gradients: list[list[Tensor]]) -> None:
    """Assert that machines do, bit for bit, what ranks do that are handed the machines' means."""
    ours, expected = workers.step(gradients), plain.step(means_of_machines(gradients, size))
    for rank, means in enumerate(ours):
        for mine, theirs in zip(means, expected[rank // size], strict=True):
            assert torch.equal(mine, theirs)
        for a, b in zip(workers.parameters, plain.parameters, strict=True):
            kept, wanted = workers.states[rank].of(a).tensors, plain.states[rank // size].of(b).tensors
            assert kept.keys() == wanted.keys() and all(torch.equal(kept[name], wanted[name]) for name in kept)


@both_policies
@machines
def test_machines_do_bit_for_bit_what_ranks_do_that_have_their_means(world_size: int, size: int, policy: str) -> None:
    """Of every form of exchange: sums, cast or not, in one round or in four; gathers; exchanges of rows; nothing."""
    names = ("fp16-feedback", "powersgd-2-fp16-wire", "powersgd-2-twice", "top-k", "two-hop-sign", "noop")
    mixed = PerParameter(rules=(("layer0", make_compressor("sign", block=16)),), otherwise=make_compressor("fp16"))
    of_dtypes = [(BY_NAME[name].make(), torch.float32) for name in names]
    for inner, dtype in (*of_dtypes, (mixed, torch.float32), (BY_NAME["top-k"].make(), torch.float16)):
        parameters = zeros(*SHAPES, dtype=dtype)
        workers = Workers(Hierarchical(inner=inner, size=size), world_size, parameters, buckets=3, policy=policy)
        plain = Workers(inner, world_size // size, parameters, buckets=3, policy=policy)
        for step in range(2):
            check_alike(workers, plain, size, normal(parameters, world_size, seed=step))


@both_policies
@pytest.mark.parametrize("wire", [None, torch.float16])
def test_between_machines_each_rank_sends_its_share_of_what_inner_sends(policy: str, wire: torch.dtype | None) -> None:
    """A step of PowerSGD: (40 + 20)·2 and 10 elements between 3 machines, in 2 shares; the gradient inside.

    What came back from a narrow wire is as narrow when it is gathered.
    """
    compressor = Hierarchical(inner=make_compressor("powersgd", rank=2, wire=wire), size=2)
    workers = Workers(compressor, 6, zeros((40, 20), (10,)), policy=policy)
    workers.step(normal(workers.parameters, 6, seed=0))
    inner, outer = workers.ledger.last_step().by_group["inner"], workers.ledger.last_step().by_group["outer"]
    itemsize = wire.itemsize if wire is not None else 4
    payload, dense = itemsize * (60 * 2 + 10), 4 * (40 * 20 + 10)
    assert outer.payload_bytes == payload // 2 and inner.payload_bytes == dense + payload // 2
    # Of 3 ranks each sends 4/3 of a sum; of 2, all of a sum, and its share in a gather. A message rounds down.
    assert 0 <= 4 * (payload // 2) / 3 - outer.moved_bytes < 2 and inner.moved_bytes == dense + payload // 2
    total = workers.ledger.last_step()
    assert total.moved_bytes == inner.moved_bytes + outer.moved_bytes and total.collectives == 1 + 2 + 2
    noted = workers.ledger.by_parameter()
    assert sum(one.payload_bytes for one in noted.values()) == total.payload_bytes
    assert noted["layer1"].payload_bytes == 4 * 10 + 2 * itemsize * 5


@both_policies
def test_an_inf_on_one_rank_spoils_the_step_on_all_and_is_committed_nowhere(policy: str) -> None:
    for name in ("powersgd", "top-k", "sign"):
        workers = Workers(
            Hierarchical(inner=make_compressor(name), size=2),
            4,
            zeros((40, 40), (600,)),
            buckets=2,
            policy=policy,
            atomic=policy == "fifo",
        )
        workers.step(normal(workers.parameters, 4, seed=0))
        before = [_state(workers, rank) for rank in range(4)]
        gradients = normal(workers.parameters, 4, seed=1)
        gradients[2][1][5] = torch.inf
        means = workers.step(gradients)
        for rank in range(4):
            assert not torch.isfinite(means[rank][1]).all(), name
            pairs = zip(before[rank], _state(workers, rank), strict=True)
            assert all(torch.equal(then, now) for then, now in pairs), name


def _state(workers: Workers, rank: int) -> list[Tensor]:
    return [kept.clone() for p in workers.parameters for kept in workers.states[rank].of(p).tensors.values()]


# --- steps that are not like the others, and checkpoints ------------------------------------------------------------


@both_policies
def test_a_rank_that_has_joined_goes_on_as_its_machine(policy: str) -> None:
    inner = make_compressor("top-k", ratio=0.1)
    workers = Workers(Hierarchical(inner=inner, size=2), 4, zeros((20, 10)), policy=policy)
    plain = Workers(inner, 2, zeros((20, 10)), policy=policy)
    for step in range(4):
        gradients = normal(workers.parameters, 4, seed=step)
        if step >= 2:
            gradients[1] = zeros((20, 10))
        check_alike(workers, plain, 2, gradients)


@both_policies
def test_a_parameter_counts_as_unused_only_if_no_machine_uses_it(policy: str) -> None:
    inner = make_compressor("top-k", ratio=0.1)
    workers = Workers(Hierarchical(inner=inner, size=2), 4, zeros((20,), (30,)), policy=policy, may_be_unused=True)
    workers.step(normal(workers.parameters, 4, seed=0))
    before = [workers.residual(rank, 1).clone() for rank in range(4)]
    for step, users in enumerate([(3,), ()], start=1):
        gradients = normal(workers.parameters, 4, seed=step)
        for rank in {0, 1, 2, 3}.difference(users):
            gradients[rank][1].zero_()
        means = workers.step(gradients)
        assert all(torch.equal(means[rank][1], means[0][1]) for rank in range(4))
        after = [workers.residual(rank, 1).clone() for rank in range(4)]
        assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [not users] * 4
        assert bool(means[0][1].count_nonzero()) is bool(users)
        before = after


LIKE = {"a": torch.zeros(9, 10, dtype=torch.float64), "b": torch.zeros(40, dtype=torch.float64)}


def train(workers: list[Exchanger], steps: Sequence[int]) -> None:
    for step in steps:
        average_in_lockstep(workers, gradients_of(LIKE, step, len(workers)))


@pytest.mark.parametrize("world_size", [2, 6, 8])
@pytest.mark.parametrize("name", ["sign", "top-k"])
def test_state_of_machines_is_spread_over_other_numbers_of_machines(name: str, world_size: int) -> None:
    """The sum over ranks stays, a machine's ranks hold the same, and servers hold the blocks that they serve."""
    inner = make_compressor(name, **({"block": 8} if name == "sign" else {"ratio": 0.1}))
    workers, others = (exchangers(LIKE, Hierarchical(inner=inner, size=2), size, "fifo") for size in (4, world_size))
    train(workers, range(3))
    merged = commhooks.merge_state_dicts([worker.state_dict() for worker in workers])
    for worker in others:
        worker.load_state_dict(merged, world_size="spread")
    states = [worker.state_dict()["local"][f"rank{rank}"] for rank, worker in enumerate(others)]
    for rank in range(0, world_size, 2):
        for key in LIKE:
            one, other = states[rank][key], states[rank + 1][key]
            assert one.keys() == other.keys() and all(torch.equal(one[entry], other[entry]) for entry in one)
    for key in LIKE:
        old = sum(merged["local"][f"rank{rank}"][key]["residual"] for rank in range(4))
        torch.testing.assert_close(sum(state[key]["residual"] for state in states), old, rtol=0, atol=1e-12)
    train(others, [3])


@pytest.mark.filterwarnings("ignore:.* holds what was not sent yet .*; it is lost")
@pytest.mark.parametrize("name", ["sign", "top-k"])
def test_what_ranks_had_each_of_their_own_is_not_taken_for_a_machines(name: str) -> None:
    inner = make_compressor(name, **({"block": 8} if name == "sign" else {"ratio": 0.1}))
    workers = Workers(inner, 4, zeros((9, 10), (16,)))
    workers.step(normal(workers.parameters, 4, seed=0))
    for engine in workers.engines:
        engine.replace(Hierarchical(inner=inner, size=2), torch.device("cpu"))
    workers.step(normal(workers.parameters, 4, seed=1))
    for rank in (0, 2):
        for parameter in workers.parameters:
            one, other = (workers.states[r].of(parameter).tensors for r in (rank, rank + 1))
            assert one and all(torch.equal(one[entry], other[entry]) for entry in one)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_ranks_that_are_not_whole_machines_are_refused_before_the_first_step() -> None:
    compressor = Hierarchical(inner=make_compressor("top-k"), size=2)
    fault = re.escape("Hierarchical(size=2): the number of ranks must be a multiple of size (got 3).")
    hidden = PerParameter(rules=(("*", StartAfter(inner=compressor, steps=1)),))
    for one in (compressor, hidden):
        with pytest.raises(SettingsError, match=fault):
            Exchanger({"a": torch.zeros(3)}, one, connection=lockstep_connections(3)[0])


# --- over processes -------------------------------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize(("kind", "policy"), in_turn(BOTH_DDPS, ("fifo", "fused")))
def test_machines_are_over_gloo_bit_for_bit_what_they_are_in_lockstep(rank: int, kind: str, policy: str) -> None:
    """Of two ranks, so that every sum has one order; over several buckets, on ranks that are delayed at random."""
    dawdling = random.Random(rank)
    for name in ("powersgd-2", "top-k", "two-hop-sign"):
        both = Mirrored(kind, Hierarchical(inner=BY_NAME[name].make(), size=2), policy, 4)
        for step in range(3):
            time.sleep(dawdling.random() * 0.02)
            ours, expected = both.step(normal(both.workers.parameters, 4, seed=step))
            same = all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
            assert same, f"{name}, step {step}: {largest_error(ours, expected)}"
        counted, simulated = both.attachment.statistics(), both.workers.traffic
        assert counted.by_group == simulated.by_group and counted.by_group.keys() == {"inner", "outer"}
        both.attachment.close()


@on_ranks(2)
def test_machines_are_refused_where_there_are_no_groups_of_ranks(rank: int) -> None:
    """As on NCCL; when they are attached, and when they take another's place."""
    machines = Hierarchical(inner=make_compressor("powersgd"), size=2)
    model = wrap("core", Given((4, 4)))
    said = "needs groups of some of the ranks, which NCCL does not support yet; use a Gloo group"
    with as_on_nccl():
        with pytest.raises(SettingsError, match=said) as raised:
            commhooks.attach(model, machines)
        attachment = commhooks.attach(model, "powersgd")
        with pytest.raises(SettingsError) as again:
            attachment.replace(machines)
        with pytest.raises(SettingsError):
            commhooks.Exchanger({"a": torch.zeros(3)}, machines)
        model(torch.ones(4, 4)).backward()
    assert str(raised.value) == str(again.value)


@pytest.mark.parametrize(
    ("inner", "elements"),
    [
        (TopK(ratio=0.05), 31),
        (TwoHop(codec=Int8(block=6)), 12),
        (SparseLoCo(k=1, chunk=8), 40),
        (SparseLoCo(k=2, chunk=4), 16),
    ],
    ids=["top-k", "int8", "places", "means"],
)
def test_answers_made_of_slices_of_one_element_are_in_order(
    inner: Compressor, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines of eight ranks send what two ranks do, compiled and not."""
    own = [[(64 * one).round() for one in of_rank] for of_rank in normal([torch.zeros(elements)], 2, seed=0)]
    of_all = [own[rank // 8] for rank in range(16)]
    for setting in ("", "off"):
        monkeypatch.setenv(library.VARIABLE, setting)
        flat = Workers(inner, 2, [torch.zeros(elements)]).step(own)
        machines = Workers(Hierarchical(inner=inner, size=8), 16, [torch.zeros(elements)]).step(of_all)
        assert all(torch.equal(mean, flat[0][0]) for (mean,) in machines)


@needs_library
@on_ranks(2)
def test_ranks_of_a_machine_that_would_choose_other_elements_are_refused(rank: int) -> None:
    """They send slices of one code: values in the order of one rank, and places in that of another."""
    if rank:
        os.environ[library.VARIABLE] = "off"
    model = wrap("core", Given((4, 4)))
    difference = re.escape("passes: compiled (rank 0), eager (rank 1).")
    with pytest.raises(commhooks.AttachError, match=difference):
        commhooks.attach(model, Hierarchical(inner=ErrorFeedback(inner=TopK()), size=2))
    with pytest.raises(commhooks.AttachError, match=difference):  # one product, of which they send slices, too
        commhooks.attach(model, Hierarchical(inner=make_compressor("powersgd"), size=2))
    commhooks.attach(model, Hierarchical(inner=make_compressor("fp16"), size=2))
    model(torch.ones(4, 4)).backward()
