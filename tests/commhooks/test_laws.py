"""What every compressor must obey, crossed with the table in tests/cases.py. N workers, one process."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from commhooks import LoadRules, PerParameter, Snapshot
from commhooks.compressors.two_hop import SERVER_ERROR
from commhooks.engine.resume import lay_out
from commhooks.language import Loss, Sends
from commhooks.language.compressor import loss_of_a_matrix
from commhooks.state.table import StateTable
from tests import bounds
from tests.cases import BY_NAME, CASES, Case
from tests.commhooks.workers import Workers, largest, low_rank, mean_of, normal, zeros

SHAPES = ((24, 40), (40,), (3, 5, 3, 3), (24, 40), (7,), (64, 33), (1, 1), ())
EXCHANGING = [case for case in CASES if case.exchanges]
EXACT = [case for case in EXCHANGING if case.exact_rank != 0]
FEEDING_BACK = [case for case in CASES if case.error_feedback]
CONSERVING = [case for case in FEEDING_BACK if not case.owes_as]

pytestmark = pytest.mark.kernels

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_exchanging_case = pytest.mark.parametrize("case", EXCHANGING, ids=str)
every_exact_case = pytest.mark.parametrize("case", EXACT, ids=str)
every_conserving_case = pytest.mark.parametrize("case", CONSERVING, ids=str)
every_feeding_back_case = pytest.mark.parametrize("case", FEEDING_BACK, ids=str)


@every_exchanging_case
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_replicas_agree_bit_for_bit(case: Case, world_size: int) -> None:
    workers = Workers(case.make(), world_size, zeros(*SHAPES))
    for step in range(4):
        means = workers.step(normal(workers.parameters, world_size, seed=step))
        for rank in range(1, world_size):
            for ours, first in zip(means[rank], means[0], strict=True):
                assert torch.equal(ours, first)


@every_case
def test_payload_bytes_equal_the_formula_and_are_fewer_than_dense(case: Case) -> None:
    workers = Workers(case.make(), 2, zeros(*SHAPES))
    dense = sum(p.numel() * p.element_size() for p in workers.parameters)
    for step in range(4):
        before = workers.traffic.payload_bytes
        workers.step(normal(workers.parameters, 2, seed=step))
        expected = case.bytes_on_wire(workers.parameters, step, 2)
        assert_sent(case, workers.traffic.payload_bytes - before, expected)
        assert (expected < dense) is case.smaller_than_dense


@every_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_payload_bytes_follow_the_dtype(case: Case, dtype: torch.dtype) -> None:
    workers = Workers(case.make(), 2, zeros((60, 60), (5,), dtype=dtype))
    workers.step(normal(workers.parameters, 2, seed=0))
    assert_sent(case, workers.traffic.payload_bytes, case.bytes_on_wire(workers.parameters, 0, 2))


def assert_sent(case: Case, sent: int, expected: int) -> None:
    assert 0 < sent <= expected if case.at_most else sent == expected


@every_case
@pytest.mark.parametrize("buckets", [1, 5])
def test_fused_makes_as_many_collectives_for_many_buckets_as_for_one(case: Case, buckets: int) -> None:
    workers = Workers(case.make(), 2, zeros(*[(24, 40), (12, 41)] * buckets), buckets=buckets, policy="fused")
    for step in range(4):
        before = workers.traffic.collectives
        workers.step(normal(workers.parameters, 2, seed=step))
        each = case.collectives[step % len(case.collectives)]
        assert workers.traffic.collectives - before == each * (buckets if case.travels_as_it_is else 1)


@every_case
@pytest.mark.parametrize("buckets", [1, 5])
def test_fifo_makes_its_collectives_for_each_bucket(case: Case, buckets: int) -> None:
    workers = Workers(case.make(), 2, zeros(*[(24, 40), (12, 41)] * buckets), buckets=buckets)
    for step in range(4):
        before = workers.traffic.collectives
        workers.step(normal(workers.parameters, 2, seed=step))
        assert workers.traffic.collectives - before == buckets * case.collectives[step % len(case.collectives)]


@pytest.mark.parametrize("case", [case for case in EXCHANGING if not case.depends_on_buckets], ids=str)
@pytest.mark.parametrize("world_size", [2, 4])
def test_under_fused_the_mean_does_not_depend_on_the_buckets(case: Case, world_size: int) -> None:
    """To the last bit, or to the last digits of products, which depend on where in its bucket a matrix lies."""
    one, many = (
        Workers(case.make(), world_size, zeros(*SHAPES, dtype=torch.float64), buckets=buckets, policy="fused")
        for buckets in (1, 4)
    )
    for step in range(4):
        gradients = normal(one.parameters, world_size, seed=step)
        for ours, theirs in zip(one.step(gradients)[0], many.step(gradients)[0], strict=True):
            assert_same_but_for_products(case, ours, theirs)


@every_case
@pytest.mark.parametrize("policy", ["fifo", "fused"])
def test_what_parameters_are_said_to_send_adds_up_to_what_is_sent(case: Case, policy: str) -> None:
    workers = Workers(case.make(), 3, zeros(*SHAPES), buckets=3, policy=policy)
    for step in range(2):
        workers.step(normal(workers.parameters, 3, seed=step))
    by_parameter = workers.ledger.by_parameter()
    # Messages of bytes are padded to the width of their widest elements, 4 bytes; padding belongs to no parameter.
    padding = 0 if workers.compressor.sends < Sends.ANYTHING else 3 * workers.traffic.collectives
    payload, moved = workers.traffic.payload_bytes, workers.traffic.moved_bytes
    assert sum(one.payload_bytes for one in by_parameter.values()) == pytest.approx(payload, abs=8 + padding)
    assert sum(one.moved_bytes for one in by_parameter.values()) == pytest.approx(moved, abs=16 + 2 * padding)
    assert set(by_parameter) == {f"layer{number}" for number in range(len(SHAPES))}
    for number, parameter in enumerate(workers.parameters):
        one = by_parameter[f"layer{number}"]
        assert (one.steps, one.gradient_bytes) == (2, 2 * 4 * parameter.numel())


@every_exact_case
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_mean_that_can_be_represented_comes_back(case: Case, world_size: int) -> None:
    shapes = ((24, 40), (40,), (24, 40), (24, 40), (6, 4, 3, 3), (64, 33))  # several of one shape
    workers = Workers(case.make(), world_size, zeros(*shapes, dtype=torch.float64))
    gradients = low_rank(workers.parameters, world_size, rank=case.exact_rank or 5, seed=1, rule=case.rule)
    for _ in range(case.exact_after):
        workers.step(gradients)
    for _ in range(3):
        assert_mean(case, workers.step(gradients)[0], gradients)


@pytest.mark.parametrize("case", [case for case in CASES if case.lossless], ids=str)
def test_a_lossless_mean_is_the_mean(case: Case) -> None:
    workers = Workers(case.make(), 3, zeros(*SHAPES, dtype=torch.float64))
    gradients = normal(workers.parameters, 3, seed=2)
    assert_mean(case, workers.step(gradients)[2], gradients)


@every_conserving_case
def test_sent_plus_residual_is_what_was_to_be_sent(case: Case) -> None:
    workers = Workers(case.make(), 3, zeros(*SHAPES))
    for step in range(5):
        before = [workers.unsent(index) for index in range(len(SHAPES))]
        residuals = [[workers.residual(rank, i).double() for i in range(len(SHAPES))] for rank in range(3)]
        gradients = normal(workers.parameters, 3, seed=step)
        means = workers.step(gradients)
        for index, allowed in enumerate(losses_of_a_step(case, gradients, residuals)):
            to_send = mean_of(gradients, index) + case.decay * before[index]
            assert largest(means[0][index] + workers.unsent(index) - to_send) <= allowed


@pytest.mark.parametrize("case", [case for case in CASES if case.owes_as], ids=str)
def test_what_is_owed_does_not_depend_on_what_a_sum_is_divided_by(case: Case) -> None:
    """Each rank keeps what it has not sent, bit for bit as in the row whose mean is over all ranks, which conserves."""
    ours, theirs = (Workers(one.make(), 3, zeros(*SHAPES)) for one in (case, BY_NAME[case.owes_as]))
    differs = False
    for step in range(5):
        gradients = normal(ours.parameters, 3, seed=step)
        means, others = ours.step(gradients)[0], theirs.step(gradients)[0]
        differs = differs or not all(torch.equal(a, b) for a, b in zip(means, others, strict=True))
        for rank, index in itertools.product(range(3), range(len(SHAPES))):
            assert torch.equal(ours.residual(rank, index), theirs.residual(rank, index))
    assert differs


@every_feeding_back_case
def test_on_one_rank_all_that_a_wire_rounds_away_is_owed(case: Case) -> None:
    """Nothing is summed there, so a narrow wire loses nothing of a matrix: fp32's rounding is the bound."""
    workers = Workers(case.make(), 1, zeros((24, 40), (12, 30)))
    for step in range(5):
        before = [workers.unsent(index) for index in range(2)]
        residuals = [[workers.residual(0, i).double() for i in range(2)]]
        gradients = normal(workers.parameters, 1, seed=step)
        means = workers.step(gradients)
        losses = losses_of_a_step(dataclasses.replace(case, wire=None), gradients, residuals)
        for index, allowed in enumerate(losses):
            to_send = gradients[0][index] + case.decay * before[index]
            assert largest(means[0][index] + workers.unsent(index) - to_send) <= allowed


@every_conserving_case
def test_with_error_feedback_the_running_mean_converges_to_the_dense_mean(case: Case) -> None:
    """What is unsent is bounded, so the distance falls as 1/steps; or to what a residual loses in each, if it fades.

    If a step gets through at least the part 1 - error of what is to be sent, in squared norms, no more than
    2/(1 - decay²·error) norms are unsent (Karimireddy et al., "Error feedback fixes SignSGD", 2019, lemma 3, with the
    decay beside each residual); a server is given means that are no larger than what ranks have to send, and has as
    much. The same holds of largest magnitudes, which are the measure if the norm is no bound.
    """
    parameters = zeros((24, 40), (12, 30))
    workers = Workers(case.make(), 2, parameters)
    losses = [workers.compressor.loss(name, p) or Loss(0.0) for name, p in zip(workers.names, parameters, strict=True)]
    kept = 1 - case.decay**2 * max(loss.contraction for loss in losses)
    by_norm = all(loss.error < 1 for loss in losses)
    order = 2 if by_norm else math.inf
    horizon = max(120, round(8 / kept))
    gradients = normal(parameters, 2, seed=3)
    total = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    for step in range(horizon):
        if step == horizon - 1:
            unsent = [[workers.residual(rank, i).double() for i in range(2)] for rank in range(2)]
        for index, mean in enumerate(workers.step(gradients)[0]):
            total[index] += mean.double()
    floors = losses_of_a_step(case, gradients, unsent)
    for index, parameter in enumerate(parameters):
        distance = float((total[index] / horizon - mean_of(gradients, index)).norm(order))
        norm = max(float(own[index].double().norm(order)) for own in gradients)
        hops = 2 if SERVER_ERROR in workers.kinds()[f"layer{index}"] else 1
        lost = 1 / horizon + 1 - case.decay
        assert distance <= hops * 2 / kept * norm * lost + floors[index] * parameter.numel() ** 0.5


@pytest.mark.parametrize("case", [case for case in EXCHANGING if not case.only_signs], ids=str)
def test_zeros_stay_zero(case: Case) -> None:
    workers = Workers(case.make(), 2, zeros((24, 40), (24, 40), (5,)))
    silence = [[torch.zeros_like(p) for p in workers.parameters] for _ in range(2)]
    for _ in range(3):
        assert all(not mean.any() for mean in workers.step(silence)[0])


@every_exact_case
def test_zeros_do_not_harm_the_next_gradient(case: Case) -> None:
    workers = Workers(case.make(), 2, zeros((24, 40), (24, 40), (5,), dtype=torch.float64))
    silence = [[torch.zeros_like(p) for p in workers.parameters] for _ in range(2)]
    for _ in range(2):
        workers.step(silence)
    gradients = low_rank(workers.parameters, 2, rank=case.exact_rank or 3, seed=4)
    for _ in range(case.exact_after):
        workers.step(gradients)
    assert_mean(case, workers.step(gradients)[0], gradients)


@every_case
@pytest.mark.parametrize(
    "shapes", [((1,),), ((0,), (3, 0), (4, 4)), ((),), ((1, 200), (200, 1)), ((17, 31), (13,))], ids=str
)
def test_odd_shapes_keep_shape_and_dtype(case: Case, shapes: tuple[tuple[int, ...], ...]) -> None:
    workers = Workers(case.make(), 2, zeros(*shapes))
    gradients = normal(workers.parameters, 2, seed=5)
    for _ in range(2):
        for mean, parameter in zip(workers.step(gradients)[0], workers.parameters, strict=True):
            assert mean.shape == parameter.shape and mean.dtype == parameter.dtype
            assert torch.isfinite(mean).all()


@every_exact_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_come_back_in_their_own(case: Case, dtype: torch.dtype) -> None:
    """Gradients of rank 1 whose every element, and every mean, any of these dtypes can hold: integers and halves."""
    parameters = zeros((24, 40), (5,), (24, 40), dtype=dtype)
    generator = torch.Generator().manual_seed(6)
    left = torch.randint(-3, 4, (24, 1), generator=generator)
    gradients = [
        [left * integers((1, 40), generator), integers((5,), generator), left * integers((1, 40), generator)]
        for _ in range(2)
    ]
    gradients = [[gradient.to(dtype) for gradient in own] for own in gradients]
    workers = Workers(case.make(), 2, parameters)
    for _ in range(case.exact_after):
        workers.step(gradients)
    means = workers.step(gradients)[0]
    assert all(mean.dtype == dtype for mean in means)
    # It computes in fp32 at least, and rounds once more when it writes: that is what shows of a narrow dtype.
    assert_mean(case, means, gradients, narrowest=dtype if dtype.itemsize == 2 else None)


def integers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(-3, 4, shape, generator=generator)


@every_exact_case
@pytest.mark.parametrize("form", ["channels-last", "transposed", "middle"])
def test_the_order_of_dimensions_in_memory_does_not_matter(case: Case, form: str) -> None:
    parameter = _laid_out(form)
    gradients = low_rank([parameter], 2, rank=1, seed=7, rule=case.rule)
    workers = Workers(case.make(), 2, [parameter])
    for _ in range(case.exact_after):
        workers.step(gradients)
    assert_mean(case, workers.step(gradients)[0], gradients)


@every_exchanging_case
def test_a_non_finite_gradient_on_one_rank_commits_nothing_and_shows_on_every_rank(case: Case) -> None:
    """In a matrix or a vector; the mean of the next step is the one without it."""
    parameters = zeros((24, 40), (6,))
    workers, undisturbed = (Workers(case.make(), 3, parameters) for _ in range(2))
    for step in range(3):
        workers.step(normal(parameters, 3, seed=step))
        undisturbed.step(normal(parameters, 3, seed=step))
    for number, (where, bad) in enumerate(itertools.product((0, 1), (math.inf, -math.inf, math.nan))):
        workers.step_number = undisturbed.step_number = 3
        spoiled = normal(parameters, 3, seed=99)
        spoiled[1][where].view(-1)[3] = bad
        for means in workers.step(spoiled):
            assert not all(torch.isfinite(mean).all() for mean in means), (where, bad)
        undisturbed.step_number += 1  # a basis drawn anew every step is another one in the next
        after = normal(parameters, 3, seed=100 + number)
        for ours, theirs in zip(workers.step(after)[0], undisturbed.step(after)[0], strict=True):
            assert torch.equal(ours, theirs), (where, bad)


@every_feeding_back_case
def test_a_mean_that_the_gradients_dtype_cannot_hold_commits_nothing(case: Case) -> None:
    """The answers may be finite in fp32 and the mean not in fp16: a gradient scaler then skips the step."""
    parameters = zeros((24, 40), (6,), dtype=torch.float16)
    workers = Workers(case.make(), 2, parameters)
    for step in range(3):
        workers.step(normal(parameters, 2, seed=step))
    skips = 0
    for seed in range(12):  # what is not sent of such gradients adds up
        before = [[workers.residual(rank, index).clone() for index in range(2)] for rank in range(2)]
        large = [[g.sign() * 60_000 for g in rank] for rank in normal(parameters, 2, seed=seed)]
        means = workers.step(large)
        skipped = not all(torch.isfinite(mean).all() for mean in means[0])
        kept = [[torch.equal(workers.residual(r, i), before[r][i]) for i in range(2)] for r in range(2)]
        assert not skipped or all(all(row) for row in kept)
        skips += skipped
    assert bool(skips) is case.overshoots
    workers = Workers(case.make(), 2, parameters)
    workers.step(normal(parameters, 2, seed=100))
    assert torch.isfinite(workers.step(normal(parameters, 2, seed=101))[0][0]).all()


@every_conserving_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["a whole bucket", "some of its parameters"])
def test_what_16_bits_hold_of_a_step_is_sent_or_kept(case: Case, dtype: torch.dtype, how: str) -> None:
    """Besides what a step in fp32 rounds, the mean is rounded once when it is written."""
    compressor = case.make()
    if how != "a whole bucket":
        if loss_of_a_matrix(compressor).of_bucket:
            pytest.skip("it refuses to be given some of a bucket's parameters")
        compressor = PerParameter(rules=(("layer[013]", compressor),))
    shapes = ((24, 40), (12, 30), (7,), (9, 16))
    workers = Workers(compressor, 3, zeros(*shapes, dtype=dtype))
    for step in range(4):
        before = [workers.unsent(index) for index in range(len(shapes))]
        residuals = [[workers.residual(rank, i).double() for i in range(len(shapes))] for rank in range(3)]
        gradients = normal(workers.parameters, 3, seed=step)
        means = workers.step(gradients)
        for index, allowed in enumerate(losses_of_a_step(case, gradients, residuals)):
            to_send = mean_of(gradients, index) + case.decay * before[index]
            left = means[0][index].double() + workers.unsent(index) - to_send
            written = bounds.unit_roundoff(dtype) * largest(means[0][index])
            averaged = bounds.of_mean(3, dtype) * largest(*(own[index] for own in gradients))
            assert largest(left) <= allowed + 2 * written + averaged


@every_conserving_case
def test_what_a_wire_cannot_hold_stays_owed(case: Case) -> None:
    """At 1e-8 a factor's elements are at the end of fp16's range; what is rounded to zero there is not lost."""
    parameters = zeros((24, 40), (12, 30))
    workers = Workers(case.make(), 2, parameters)
    gradients = normal(parameters, 2, seed=3, scale=1e-8)
    sent = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    allowed = [0.0, 0.0]
    for _ in range(40):
        before = [[workers.residual(rank, i).double() for i in range(2)] for rank in range(2)]
        for index in range(2):
            sent[index] += (1 - case.decay) * workers.unsent(index)  # faded
        for index, loss in enumerate(losses_of_a_step(case, gradients, before)):
            allowed[index] += loss
        for index, mean in enumerate(workers.step(gradients)[0]):
            sent[index] += mean.double()
    for index, total in enumerate(sent):
        assert largest(total + workers.unsent(index) - 40 * mean_of(gradients, index)) <= allowed[index]


@every_feeding_back_case
def test_under_fused_an_inf_in_one_bucket_commits_nothing_in_any(case: Case) -> None:
    parameters = zeros((24, 40), (6,), (30, 20), (24, 40))
    workers = Workers(case.make(), 2, parameters, buckets=4, policy="fused")
    for step in range(3):
        workers.step(normal(parameters, 2, seed=step))
    before = [[workers.residual(rank, index).clone() for index in range(4)] for rank in range(2)]
    spoiled = normal(parameters, 2, seed=99)
    spoiled[1][1][3] = float("inf")
    workers.step(spoiled)
    for rank in range(2):
        assert all(torch.equal(workers.residual(rank, index), before[rank][index]) for index in range(4))
    workers.step(normal(parameters, 2, seed=100))
    assert not torch.equal(workers.residual(0, 0), before[0][0])


@pytest.mark.parametrize("case", [case for case in EXACT if case.wire is None], ids=str)
@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_extreme_scales_stay_exact(case: Case, scale: float) -> None:
    """But not on a wire of 16 bits, which cannot hold them."""
    workers = Workers(case.make(), 2, zeros((24, 40), (24, 40), dtype=torch.float64))
    gradients = [
        [g * scale for g in rank] for rank in low_rank(workers.parameters, 2, rank=case.exact_rank or 3, seed=8)
    ]
    for _ in range(case.exact_after):
        workers.step(gradients)
    for _ in range(3):
        assert_mean(case, workers.step(gradients)[0], gradients)


@every_exchanging_case
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_extreme_scales_are_finite_or_shown_to_all(case: Case, scale: float) -> None:
    workers = Workers(case.make(), 2, zeros((24, 40), (24, 40)))
    for step in range(4):
        means = workers.step(normal(workers.parameters, 2, seed=step, scale=scale))
        fits = scale < torch.finfo(case.range or torch.float32).max
        for ours, first in zip(means[1], means[0], strict=True):
            assert torch.isfinite(ours).all() == torch.isfinite(first).all() == fits
            assert not fits or torch.equal(ours, first)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mean_goes_where_its_bucket_says(case: Case, dtype: torch.dtype) -> None:
    parameters = zeros(*SHAPES, dtype=dtype)
    in_place, apart = (
        Workers(case.make(), 2, parameters, buckets=2, policy="fused", apart=where) for where in (False, True)
    )
    for step in range(3):
        gradients = normal(parameters, 2, seed=step)
        for means, others in zip(in_place.step(gradients), apart.step(gradients), strict=True):
            assert all(map(torch.equal, means, others))
    for one, other in zip(in_place.states, apart.states, strict=True):
        for parameter in parameters:
            kept, there = one.of(parameter).tensors, other.of(parameter).tensors
            assert kept.keys() == there.keys() and all(torch.equal(kept[name], there[name]) for name in kept)


@every_exchanging_case
def test_the_gradient_of_another_step_is_not_held_on_to(case: Case) -> None:
    """Memory handed in is free to be overwritten once the mean is there."""
    parameters = zeros((24, 40), (6,))
    ours, theirs = (Workers(case.make(), 2, parameters) for _ in range(2))
    for step in range(3):
        gradients = normal(parameters, 2, seed=step)
        first = ours.step(gradients)[0]
        second = theirs.step(gradients)[0]
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        for memory in ours.memories:
            memory.fill_(float("nan"))


def _laid_out(form: str) -> Tensor:
    if form == "channels-last":
        return torch.zeros(16, 8, 3, 3, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    if form == "transposed":
        return torch.zeros(40, 24, dtype=torch.float64).t()
    return torch.zeros(8, 16, 12, dtype=torch.float64).permute(1, 0, 2)


@every_case
@pytest.mark.parametrize("policy", ["fifo", "fused"])
def test_a_run_resumed_from_a_file_is_bit_for_bit_the_one_that_was_not_interrupted(case: Case, policy: str) -> None:
    ran_through, interrupted, resumed = (
        Workers(case.make(), 3, odd_parameters(), buckets=3, policy=policy) for _ in range(3)
    )
    for step in range(3):
        for workers in (ran_through, interrupted):
            workers.step(normal(workers.parameters, 3, seed=step))
    resumed.resume(interrupted.saved())
    for step in range(3, 6):
        gradients = normal(ran_through.parameters, 3, seed=step)
        for ours, theirs in zip(resumed.step(gradients), ran_through.step(gradients), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert states_of(resumed) == states_of(ran_through)


@pytest.mark.parametrize("case", [case for case in CASES if not case.depends_on_buckets], ids=str)
def test_state_follows_parameters_into_other_buckets(case: Case) -> None:
    ran_through, resumed = (
        Workers(case.make(), 2, [p.double() for p in odd_parameters()], buckets=buckets) for buckets in (3, 1)
    )
    for step in range(3):
        ran_through.step(normal(ran_through.parameters, 2, seed=step))
    resumed.resume(ran_through.saved())
    for step in range(3, 6):
        gradients = normal(ran_through.parameters, 2, seed=step)
        for ours, theirs in zip(resumed.step(gradients)[0], ran_through.step(gradients)[0], strict=True):
            assert_same_but_for_products(case, ours, theirs)  # at two ranks a sum's bits do not depend on where it lies


@every_case
def test_all_state_is_declared(case: Case) -> None:
    """So a checkpoint of a run that has made no step has a place for everything."""
    workers = Workers(case.make(), 2, odd_parameters())
    lay_out(workers.engines[0], set())
    made = names_of_state(workers.states[0])
    for step in range(4):
        workers.step(normal(workers.parameters, 2, seed=step))
    if not case.depends_on_buckets:
        assert made == names_of_state(workers.states[0])
        assert any(made.values()) or not case.error_feedback


@every_feeding_back_case
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (3, 2), (2, 5), (4, 1)], ids=str)
def test_another_world_size_keeps_what_is_unsent(case: Case, sizes: tuple[int, int]) -> None:
    """The sum over the ranks, or the mean. Shares are computed in float64, and each is rounded once."""
    before = Workers(case.make(), sizes[0], odd_parameters())
    for step in range(3):
        before.step(normal(before.parameters, sizes[0], seed=step))
    snapshot = Snapshot(
        step=3, world_size=sizes[0], policy="fifo", grad_scale=1.0, settings={}, shapes={}, bucket_plan={},
        kinds=before.states[0].kinds(), replicated=before.states[0].export()[0],
        local={rank: table.export()[1] for rank, table in enumerate(before.states)},
    )  # fmt: skip
    for how, ratio in (("spread", sizes[0] / sizes[1]), ("spread-mean", 1.0)):
        after = Workers(case.make(), sizes[1], odd_parameters())
        rules = LoadRules(world_size=how)
        for rank, table in enumerate(after.states):
            table.load(snapshot.replicated, snapshot.entries_for(rank, sizes[1], rules), snapshot.kinds)
        for index in range(len(before.parameters)):
            now = after.unsent(index)
            held = [after.residual(rank, index) for rank in range(sizes[1])]
            rounded = bounds.unit_roundoff(torch.float32) * (largest(now) + 2 * sum(map(largest, held)))
            assert largest(now - before.unsent(index) * ratio) <= rounded, how
        after.step_number = before.step_number
        means = after.step(normal(after.parameters, sizes[1], seed=9))
        assert all(torch.isfinite(mean).all() for mean in means[0])


def assert_mean(
    case: Case, means: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]], narrowest: torch.dtype | None = None
) -> None:
    """Assert that a mean that can be represented came back, but for what computing in float64 and the wire round.

    narrowest: the gradient's dtype, if it is narrow and so rounds too.
    """
    for index, mean in enumerate(means):
        terms = largest(*(own[index] for own in gradients))
        rounding = bounds.IN_FLOAT64
        for dtype in (case.wire, narrowest):
            rounding += bounds.of_mean(len(gradients), dtype) if dtype else 0.0
        assert largest(mean - mean_of(gradients, index)) <= terms * rounding, index


def assert_same_but_for_products(case: Case, ours: Tensor, theirs: Tensor) -> None:
    """Assert that float64 tensors are equal: bit for bit, unless products whose operands lie elsewhere made them."""
    assert largest(ours - theirs) <= (largest(theirs) * bounds.IN_FLOAT64 if case.rank else 0.0)


def losses_of_a_step(
    case: Case, gradients: Sequence[Sequence[Tensor]], owed: Sequence[Sequence[Tensor]]
) -> list[float]:
    """Return for each parameter how much of what was to be sent a step may round away, on the mean over ranks."""
    to_send = [
        [g.double() + case.decay * e for g, e in zip(*both, strict=True)] for both in zip(gradients, owed, strict=True)
    ]
    if case.depends_on_buckets:  # all of a bucket is one matrix
        to_send = [[torch.cat([part.flatten() for part in own])] * len(own) for own in to_send]
    dtype = torch.promote_types(gradients[0][0].dtype, torch.float32)
    return [
        bounds.of_conservation(of_ranks, case.rank, dtype, case.wire, case.roundings)
        for of_ranks in zip(*to_send, strict=True)
    ]


def odd_parameters() -> list[Tensor]:
    return [*zeros(*SHAPES), torch.zeros(12, 8, 3, 3).contiguous(memory_format=torch.channels_last)]


def states_of(workers: Workers) -> list[bytes]:
    return [table_bytes(table) for table in workers.states]


def table_bytes(table: StateTable) -> bytes:
    return b"".join(
        f"{name} {entry}".encode() + tensor.contiguous().numpy().tobytes()
        for part in table.export()
        for name, kept in sorted(part.items())
        for entry, tensor in sorted(kept.items())
    )


def names_of_state(table: StateTable) -> dict[str, list[str]]:
    replicated, local = table.export()
    return {name: sorted({*replicated.get(name, {}), *local.get(name, {})}) for name in {*replicated, *local}}
