"""PowerSGD: its numbers, its edges, and its agreement with PyTorch's own hook."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock

import commhooks
from commhooks import ErrorFeedback
from commhooks.compressors import PowerSGD
from commhooks.compressors.powersgd.orthonormal import orthonormal_rows
from experiments.studies.bench.given import GivenBucket as Bucket
from experiments.studies.bench.given import Shape, resnet18_shapes
from tests import bounds
from tests.commhooks.models import Given, lstm_shapes, wrap
from tests.commhooks.stock import draw_basis, hand_over
from tests.commhooks.workers import Workers, largest, low_rank, mean_of, normal, relative, zeros
from tests.tiers import covering, thorough
from tests.world import run_world

pytestmark = pytest.mark.kernels

# The paper's figures for each rank: floats a step, MiB an epoch of 24 (ResNet-18) or 70 (LSTM) steps, and how many
# times smaller that is. Texts, so that every digit counts.
RESNET = {
    1: (45_935, "4.205", "243.26"),
    2: (82_260, "7.531", "135.84"),
    4: (154_910, "14.182", "72.13"),
    7: (263_885, "24.159", "42.34"),
}
LSTM = {
    1: (93_488, "24.964", "309.66"),
    2: (142_507, "38.053", "203.14"),
    4: (240_545, "64.232", "120.35"),
    7: (387_602, "103.50", "74.69"),
}


@pytest.mark.parametrize("rank", thorough([1, 2, 4, 7], unless=lambda rank: rank in (1, 7)))
def test_models_send_as_many_floats_as_the_paper_says(rank: int) -> None:
    _check_volume(resnet18_shapes(), rank, RESNET[rank], steps=24, dense=(11_173_962, "1023.01"))
    _check_volume(lstm_shapes(), rank, LSTM[rank], steps=70, dense=(28_949_319, "7730.30"))


def _check_volume(
    shapes: list[Shape], rank: int, figures: tuple[int, str, str], *, steps: int, dense: tuple[int, str]
) -> None:
    floats, mebibytes, ratio = figures
    compressor = PowerSGD(rank=rank, min_compression_rate=1 if rank == 7 else 2)
    elements = sum(math.prod(shape) for shape in shapes)
    assert (elements, _mebibytes(elements * steps, like=dense[1])) == dense
    assert sum(map(compressor.payload_elements, zeros(*shapes))) == floats
    workers = Workers(commhooks.ErrorFeedback(inner=compressor), 1, zeros(*shapes))
    workers.step([workers.parameters])
    assert workers.traffic.payload_elements == floats
    assert workers.traffic.payload_bytes == 4 * floats
    assert workers.traffic.collectives == 2
    assert _mebibytes(workers.traffic.payload_elements * steps, like=mebibytes) == mebibytes
    assert f"{elements / floats:.2f}" == ratio


def _mebibytes(floats: int, like: str) -> str:
    """Return the size of so many floats in MiB, to as many digits as the figure it is compared with."""
    return f"{4 * floats / 2**20:.{len(like.split('.')[1])}f}"


MIXED: list[Shape] = [(20, 30), (30,), (16, 40), (3,), (20, 30), (8, 5, 3, 3)]
RANKS = (1, 2, 4)


def test_from_the_same_state_the_mean_is_that_of_pytorchs_hook_at_each_of_50_steps() -> None:
    """The state is copied every step, for PyTorch's residual is another one: against the global mean."""
    worst = max(max(world) for world in run_world(_distances_from_stock, 2, check_exit=False))
    print(f"largest relative distance of a step: {worst:.1e}")
    assert worst < bounds.IN_FLOAT64


def _distances_from_stock(rank: int) -> list[float]:
    """Return how far the two hooks are apart in each step, of gradients in one bucket, for each matrix rank."""
    distances = []
    for r in RANKS:
        ours, theirs = (Bucket(zeros(*MIXED, dtype=torch.float64)) for _ in range(2))
        our_state = commhooks.PowerSGDState(None, r, start_powerSGD_iter=0)
        stock_state = stock.PowerSGDState(None, r, start_powerSGD_iter=2)
        assert our_state.parameters is not None
        draw_basis(our_state.parameters, ours.parameters(), r, seed=3)
        for own in _like_training(seed=r):
            hand_over(our_state.parameters, stock_state, ours.parameters())
            for bucket in (ours, theirs):
                bucket.fill(own[rank])
            commhooks.powerSGD_hook(our_state, cast(Any, ours)).wait()
            stock.powerSGD_hook(stock_state, cast(Any, theirs)).wait()
            pairs = zip(ours.gradients(), theirs.gradients(), strict=True)
            distances.append(max(float((a - b).norm() / b.norm()) for a, b in pairs))
    return distances


def _like_training(seed: int) -> Iterator[list[list[Tensor]]]:
    """Yield gradients[rank][parameter]: a signal of slowly decaying spectrum that fades, and every rank's own noise."""
    generator = torch.Generator().manual_seed(seed)
    signal = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in MIXED]
    for index, shape in enumerate(MIXED):
        if len(shape) > 1:
            U, S, Vt = torch.linalg.svd(signal[index].reshape(shape[0], -1), full_matrices=False)
            S = 10 / torch.arange(1, len(S) + 1, dtype=torch.float64).sqrt()
            signal[index] = (U * S @ Vt).reshape(shape)
    for step in range(50):
        noise = normal(zeros(*MIXED), 2, seed=1000 * seed + step)
        yield [[s / (1 + step / 20) + 0.1 * z.double() for s, z in zip(signal, own, strict=True)] for own in noise]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", ["zero", "zero row", "dependent", "1e30", "1e-30", "square", "random"])
def test_orthonormal_rows_are_orthonormal_whatever_comes(kind: str, rank: int) -> None:
    P = torch.randn(rank, rank if kind == "square" else 50, generator=torch.Generator().manual_seed(0))
    if kind == "zero":
        P.zero_()
    if kind == "zero row":
        P[0] = 0
    if kind == "dependent":
        P[:] = P[0]
    if kind in ("1e30", "1e-30"):
        P *= float(kind)
    basis, P = orthonormal_rows(P).double(), P.double()
    bound = bounds.of_orthonormal_rows(rank, P.shape[1], torch.float32)
    assert largest(basis @ basis.t() - torch.eye(rank)) <= 2 * bound
    assert largest(P @ basis.t() @ basis - P) <= float(P.norm()) * 3 * bound  # the basis's error twice, and the input's


def test_epsilon_damps_directions_of_its_own_size() -> None:
    P = torch.zeros(2, 10, dtype=torch.float64)
    P[0, 0], P[1, 1] = 1.0, 1e-3
    basis = orthonormal_rows(P, epsilon=1e-3)
    assert basis.norm(dim=1).tolist() == pytest.approx([1 / 1.001, 0.5], rel=bounds.IN_FLOAT64)


def test_parameters_to_skip_are_averaged_exactly_and_keep_nothing() -> None:
    names = ["head.weight", "body.0.weight", "body.1.weight", "norm"]
    compressor = PowerSGD(rank=1, skip=("head.*", "body.[1-9].weight"))
    parameters = zeros((30, 40), (30, 40), (30, 40), (7,))
    workers = Workers(commhooks.ErrorFeedback(inner=compressor), 2, parameters, names=names)
    gradients = normal(workers.parameters, 2, seed=0)
    for _ in range(2):
        means = workers.step(gradients)[0]
    for index in (0, 2, 3):
        assert torch.equal(means[index], (gradients[0][index] + gradients[1][index]) / 2)
        assert workers.states[0].of(workers.parameters[index]).memory_bytes() == 0
    assert workers.residual(0, 1).norm() > 1
    assert workers.traffic.payload_elements == 2 * (2 * 1200 + (30 + 40) + 7)
    sent = [compressor.payload_elements(p, name) for p, name in zip(workers.parameters, names, strict=True)]
    assert sent == [1200, 70, 1200, 7]


@pytest.mark.parametrize("residuals", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(24, 40), (300, 400), (600, 500)], ids=str)
def test_a_stack_gives_what_its_matrices_give_side_by_side(
    size: tuple[int, int], dtype: torch.dtype, residuals: str
) -> None:
    """One call multiplies all three on a CPU, or two and then one, or each in blocks of rows."""
    stack, apart = zeros((3, *size), dtype=dtype), zeros(*[size] * 3, dtype=dtype)
    compressor = ErrorFeedback(inner=PowerSGD(rank=2))
    together, alone = (Workers(compressor, 2, own, storage=residuals) for own in (stack, apart))
    bases = torch.randn(3, 2, size[1], generator=torch.Generator().manual_seed(0))
    for workers in (together, alone):
        workers.step([[torch.zeros_like(p) for p in workers.parameters]] * 2)  # lays out state
    for one, other in zip(together.states, alone.states, strict=True):
        one.of(stack[0])["Q"].copy_(bases)
        for parameter, basis in zip(apart, bases, strict=True):
            other.of(parameter)["Q"].copy_(basis)
    for step in range(3):
        gradients = normal(stack, 2, seed=step)
        (mean,) = together.step(gradients)[0]
        means = torch.stack(alone.step([list(own[0].unbind()) for own in gradients])[0])
        bound = 64 * max(size) * torch.finfo(dtype).eps * largest(means)
        assert largest(mean - means) <= bound, f"step {step}"


def test_a_pattern_that_matches_nothing_is_refused_with_the_names_there_are() -> None:
    named = {"layer.weight": torch.zeros(24, 40), "experts.weight": torch.zeros(8, 24, 40)}
    PowerSGD(stacked=("experts.*",)).check(named, 2)
    with pytest.raises(
        commhooks.SettingsError, match=r"three or more dimensions.*'layer.weight' has the shape \(24, 40\)"
    ):
        PowerSGD(stacked=("layer.*",)).check(named, 2)
    patterns: list[dict[str, Any]] = [{"stacked": ("expert.*",)}, {"skip": ("layer.*", "expert.?")}]
    for settings in patterns:
        with pytest.raises(
            ValueError, match=r"'expert\..' must match a parameter's name.*layer.weight, experts.weight"
        ):
            PowerSGD(**settings).check(named, 2)


def test_the_hook_state_keeps_pytorchs_arguments_and_counts() -> None:
    ours, theirs = run_world(_compression_stats, 1, check_exit=False)[0]
    sent = 2 * (60 + 50) + 2 * (50 + 60) + 50 + 4 * 5
    assert ours == theirs == [(0.0, 0, 0)] * 2 + [(6070 / sent, n * 6070, n * sent) for n in (1, 2, 3)]


def _compression_stats(rank: int) -> list[list[tuple[float, int, int]]]:
    """Return what our state and PyTorch's tell after each step, of which the first two are warm-up."""
    shapes = [(60, 50), (50,), (50, 60), (4, 5)]
    settings = (dist.group.WORLD, 2, 2, 2, True, True, 0, 7, 100, False)
    told = []
    for module in (commhooks, stock):
        state = module.PowerSGDState(*settings)
        assert (state.matrix_approximation_rank, state.start_powerSGD_iter) == (2, 2)
        assert getattr(state, "random_seed", 7) == 7  # PyTorch's keeps a generator instead
        if module is commhooks:
            with pytest.raises(commhooks.SettingsError, match="matrix_approximation_rank cannot be changed to 4 any"):
                state.matrix_approximation_rank = 4
        model = wrap("torch", Given(*shapes))
        model.register_comm_hook(state, module.powerSGD_hook)  # type: ignore[operator]  # 'Tensor not callable'
        stats = []
        for step in range(5):
            model(*normal(zeros(*shapes), 1, seed=step)[0]).backward()
            stats.append(state.compression_stats())
            assert state.iter == step + 1
        told.append(stats)
    return told


@pytest.mark.parametrize("rank", RANKS)
def test_a_mean_of_low_rank_comes_back_though_no_ranks_own_gradient_is_of_low_rank(rank: int) -> None:
    workers = Workers(commhooks.make_compressor("powersgd", rank=rank), 2, zeros(*[(24, 40)] * 3, dtype=torch.float64))
    (shared,), (own,) = low_rank(workers.parameters, 1, rank, seed=1), normal(workers.parameters, 1, seed=2)
    gradients = [[s + z for s, z in zip(shared, own, strict=True)], [s - z for s, z in zip(shared, own, strict=True)]]
    for _ in range(3):
        assert _worst(workers.step(gradients)[0], gradients) < bounds.IN_FLOAT64


def _worst(means: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> float:
    return max(relative(mean - mean_of(gradients, i), mean_of(gradients, i)) for i, mean in enumerate(means))


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alternating": {"alternating": True},
    "twice": {"iterations": 2},
    "square": {"matrices": "most-square"},
    "bucket": {"matrices": "whole-bucket"},
    "cold": {"warm_start": False},
}


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_alternating_steps_go_on_with_the_side_after_the_last(iterations: int) -> None:
    compressor = PowerSGD(rank=2, alternating=True, iterations=iterations)
    assert [side for step in range(4) for side in compressor.sides(step)] == ["P", "Q"] * (2 * iterations)


AWKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "dependent": lambda g: g[:1].expand_as(g),
    "zero column": lambda g: g * (torch.arange(g.shape[-1]) != 3),
    "tiny": lambda g: g * (6e-8 if g.dtype == torch.float16 else 1e-30),  # the least that fp16 holds
    "huge": lambda g: g * (1e3 if g.dtype == torch.float16 else 1e30),
    "tiny and huge": lambda g: torch.cat([AWKWARD["tiny"](g[::2]), AWKWARD["huge"](g[1::2])]),
}
NARROW = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(("kind", "form", "dtype"), covering(list(AWKWARD), list(FORMS), NARROW, fast=10), ids=str)
def test_awkward_matrices_give_finite_means_the_same_on_every_rank(kind: str, form: str, dtype: torch.dtype) -> None:
    for rank in RANKS:
        compressor = commhooks.make_compressor("powersgd", rank=rank, **FORMS[form])
        workers = Workers(compressor, 3, zeros((24, 40), (24, 40), (5,), dtype=dtype))
        for step in range(4):
            means = workers.step([[AWKWARD[kind](g) for g in own] for own in normal(workers.parameters, 3, seed=step)])
            assert all(mean.isfinite().all() for mean in means[0])
            assert all(all(map(torch.equal, other, means[0])) for other in means)
            assert all(torch.isfinite(workers.residual(r, i)).all() for r in range(3) for i in range(3))


@pytest.mark.parametrize("rank", RANKS)
def test_alternating_a_step_of_p_and_the_next_of_q_sum_to_twice_a_gradient_of_low_rank(rank: int) -> None:
    """Neither is right by itself."""
    shapes = ((24, 40), (24, 40), (64, 33))
    workers = Workers(
        commhooks.make_compressor("powersgd", rank=rank, alternating=True), 2, zeros(*shapes, dtype=torch.float64)
    )
    gradients = low_rank(workers.parameters, 2, rank, seed=1)
    for _ in range(4):
        pair = [workers.step(gradients)[0] for _ in range(2)]
        assert _worst([(a.double() + b) / 2 for a, b in zip(*pair, strict=True)], gradients) < bounds.IN_FLOAT64
        assert _worst(pair[0], gradients) > 1e-2


def test_four_iterations_come_within_a_thousandth_of_the_best_approximation() -> None:
    """Of a matrix whose singular values halve: the angle to the best rows falls 4-fold an iteration."""
    U, _, Vt = torch.linalg.svd(normal(zeros((100, 150)), 1, seed=1)[0][0], full_matrices=False)
    values = 0.5 ** torch.arange(100)
    left = []
    for iterations in (1, 4):
        workers = Workers(commhooks.make_compressor("powersgd", rank=4, iterations=iterations), 1, zeros((100, 150)))
        workers.step([[U * values @ Vt]])
        left.append(float(workers.residual(0, 0).norm() / values[4:].norm()))
    assert left[0] > 1.01
    assert left[1] == pytest.approx(1, abs=1e-3)
