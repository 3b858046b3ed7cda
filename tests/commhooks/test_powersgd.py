"""PowerSGD: its numbers, its edges, and its agreement with PyTorch's own hook."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import commhooks
from commhooks import Context
from commhooks.compressors.powersgd import orthonormal_rows
from commhooks.randomness import stable_seed
from tests.commhooks.models import Given, Shape, gradients_of, lstm_shapes, resnet18_shapes, wrap
from tests.commhooks.ranks import run_ranks
from tests.commhooks.stock import RANDOM_SEED, stock_hook_from_our_basis
from tests.commhooks.workers import Workers, normal, zeros

# The paper's figures: floats a step, and MiB an epoch of 24 (ResNet-18) or 70 (LSTM) steps, for each rank.
RESNET = {1: (45_935, 4.205), 2: (82_260, 7.531), 4: (154_910, 14.182), 7: (263_885, 24.159)}
LSTM = {1: (93_488, 24.964), 2: (142_507, 38.053), 4: (240_545, 64.232), 7: (387_602, 103.50)}
RATIOS = {1: (243.26, 309.66), 2: (135.84, 203.14), 4: (72.13, 120.35), 7: (42.34, 74.69)}


@pytest.mark.parametrize("rank", [1, 2, 4, 7])
def test_resnet18_sends_as_many_floats_as_the_paper_says(rank: int) -> None:
    _check_volume(resnet18_shapes(), rank, RESNET[rank], RATIOS[rank][0], steps=24, dense=11_173_962)


@pytest.mark.parametrize("rank", [1, 2, 4, 7])
def test_the_lstm_sends_as_many_floats_as_the_paper_says(rank: int) -> None:
    _check_volume(lstm_shapes(), rank, LSTM[rank], RATIOS[rank][1], steps=70, dense=28_949_319)


def test_at_the_default_rate_the_last_layer_of_resnet18_stays_dense_at_rank_7() -> None:
    compressor = commhooks.PowerSGD(rank=7)
    assert sum(compressor.payload_elements(p) for p in _meta(resnet18_shapes())) == 265_351


def _check_volume(
    shapes: list[Shape], rank: int, figures: tuple[int, float], ratio: float, *, steps: int, dense: int
) -> None:
    floats, mebibytes = figures
    compressor = commhooks.PowerSGD(rank=rank, min_compression_rate=1 if rank == 7 else 2)
    assert sum(math.prod(shape) for shape in shapes) == dense
    assert sum(compressor.payload_elements(p) for p in _meta(shapes)) == floats
    workers = Workers(compressor, 1, zeros(*shapes))
    workers.step([workers.parameters])
    assert workers.traffic.payload_elements == floats
    assert workers.traffic.payload_bytes == 4 * floats
    assert workers.traffic.collectives == 2
    assert (
        f"{4 * floats * steps / 2**20:.5g}" == f"{mebibytes:.5g}" or round(4 * floats * steps / 2**20, 3) == mebibytes
    )
    assert round(dense / floats, 2) == ratio


def _meta(shapes: list[Shape]) -> list[Tensor]:
    return [torch.empty(shape, device="meta") for shape in shapes]


def test_the_mean_is_that_of_pytorchs_hook_over_50_steps() -> None:
    for distances in run_ranks(_distances_to_stock, 2, check_exit=False):
        assert max(distances) < 1e-8


def _distances_to_stock(rank: int) -> list[float]:
    return [_distance_to_stock(rank, matrix_rank) for matrix_rank in (1, 2, 4)]


def _distance_to_stock(rank: int, matrix_rank: int) -> float:
    """Feed both hooks the same gradients, in one bucket, from the same Q; return the largest relative distance."""
    shapes: list[Shape] = [(20, 30), (30,), (16, 40), (3,), (20, 30)]
    arguments: dict[str, Any] = {
        "matrix_approximation_rank": matrix_rank,
        "start_powerSGD_iter": 2,
        "random_seed": RANDOM_SEED,
    }
    ours_state = commhooks.PowerSGDState(None, **arguments)
    stock_state = stock.PowerSGDState(None, **arguments)
    ours = wrap("torch", Given(*shapes, dtype=torch.float64), bucket_cap_mb=100)
    theirs = wrap("torch", Given(*shapes, dtype=torch.float64), bucket_cap_mb=100)
    ours.register_comm_hook(ours_state, commhooks.powerSGD_hook)  # type: ignore[operator]
    theirs.register_comm_hook(stock_state, stock_hook_from_our_basis)  # type: ignore[operator]
    worst = 0.0
    for step in range(52):
        gradients = [g.double() for g in normal(zeros(*shapes), 2, seed=step)[rank]]
        for model in (ours, theirs):
            model.zero_grad()
            model(*gradients).backward()
        for mine, their in zip(gradients_of(ours), gradients_of(theirs), strict=True):
            worst = max(worst, float((mine - their).norm() / their.norm()))
    return worst


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("kind", ["zero", "zero row", "dependent", "1e30", "1e-30", "one", "random"])
def test_orthonormal_rows_are_orthonormal_whatever_comes(kind: str, rank: int) -> None:
    P = torch.randn(rank, 50, generator=torch.Generator().manual_seed(0))
    if kind == "zero":
        P.zero_()
    if kind == "zero row":
        P[0] = 0
    if kind == "dependent":
        P[:] = P[0]
    if kind in ("1e30", "1e-30"):
        P *= float(kind)
    if kind == "one":
        P = torch.randn(rank, rank, generator=torch.Generator().manual_seed(0))
    basis = orthonormal_rows(P)
    assert torch.allclose(basis @ basis.t(), torch.eye(rank), atol=1e-6)
    assert torch.allclose(
        P.double() @ basis.t().double() @ basis.double(), P.double(), atol=float(P.abs().max()) * 1e-5
    )


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_orthonormal_rows_of_something_not_finite_do_not_raise(bad: float) -> None:
    P = torch.ones(4, 50)
    P[2, 7] = bad
    orthonormal_rows(P)


def test_epsilon_damps_directions_of_its_own_size() -> None:
    P = torch.zeros(2, 10)
    P[0, 0], P[1, 1] = 1.0, 1e-3
    basis = orthonormal_rows(P, epsilon=1e-3)
    assert basis.norm(dim=1).tolist() == pytest.approx([1 / 1.001, 0.5])


def test_residuals_of_skewed_data_do_not_grow() -> None:
    """PyTorch's residual, kept against the global mean, grows 14-fold from step 200 to 2,000 and further."""
    ranks, steps = 4, 1000
    workers = Workers(commhooks.PowerSGD(rank=1), ranks, zeros((10, 32)))
    generator = torch.Generator().manual_seed(0)
    skew = torch.randn(ranks, 10, 32, generator=generator)
    norms = []
    for _ in range(steps):
        noise = torch.randn(ranks, 10, 32, generator=generator) * 0.1
        workers.step([[skew[rank] + noise[rank]] for rank in range(ranks)])
        norms.append(max(float(workers.residual(rank, 0).norm()) for rank in range(ranks)))
    assert max(norms[200:]) < 3 * norms[200]


def test_state_takes_little_more_than_what_is_compressed() -> None:
    workers = Workers(commhooks.PowerSGD(rank=1), 1, zeros(*resnet18_shapes()))
    workers.step([workers.parameters])
    compressed = sum(4 * p.numel() for p in workers.parameters if commhooks.PowerSGD(rank=1).compresses(p))
    bases = sum(4 * p.numel() // p.shape[0] for p in workers.parameters if p.dim() > 1)
    assert workers.states[0].memory_bytes() <= 1.05 * compressed + bases


class _NewMemory(TorchDispatchMode):
    """Note the largest tensor that an operation returns in memory of its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {a.untyped_storage().data_ptr() for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_steady_step_makes_nothing_of_a_gradients_size(dtype: torch.dtype) -> None:
    workers = Workers(commhooks.PowerSGD(rank=2), 2, zeros((200, 300), (200, 300), (300,), dtype=dtype))
    gradients = normal(workers.parameters, 2, seed=0)
    workers.step(gradients)
    exchanges = [workers.compressor.compress(view, Context(rank, 2, 1)) for rank, (view,) in enumerate(workers.views)]
    with _NewMemory() as memory:
        commhooks.run_lockstep(exchanges)
    assert 0 < memory.largest < 4000  # two Ps, two Qs and a vector are 2,300


@pytest.mark.parametrize(
    "settings",
    [
        {"rank": 0},
        {"rank": 1.5},
        {"rank": True},
        {"min_compression_rate": 0},
        {"epsilon": -1e-8},
        {"min_compression_rate": math.nan},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=rf"PowerSGD\({name}=.*\): {name} must"):
        commhooks.PowerSGD(**settings)


def test_a_low_rate_never_makes_a_message_larger_and_leaves_vectors_alone() -> None:
    compressor = commhooks.PowerSGD(rank=4, min_compression_rate=0.5)
    for shape in ((100,), (4, 4), (5, 100), (100, 100), ()):
        parameter = torch.zeros(shape)
        assert compressor.payload_elements(parameter) <= parameter.numel()
    assert not compressor.compresses(torch.zeros(100))


def test_another_seed_or_name_gives_another_basis_and_the_same_gives_the_same() -> None:
    seeds = {stable_seed("powersgd", seed, name, 1, 5) for seed in (0, 1) for name in ("a", "b", "#0")}
    assert len(seeds) == 6
    assert stable_seed("powersgd", 0, "a", 1, 5) == 9189204050170386570
    assert stable_seed("a", "b") != stable_seed("ab") and stable_seed(1) != stable_seed("1")


def test_the_hook_state_keeps_pytorchs_arguments_and_counts() -> None:
    (before, after, rate) = run_ranks(_compression_stats, 1, check_exit=False)[0]
    assert (before, after) == (3 * 6000, 6000 + 2 * (2 * (60 + 50) * 2))
    assert rate == before / after


def _compression_stats(rank: int) -> tuple[int, int, float]:
    state = commhooks.PowerSGDState(dist.group.WORLD, 2, 1, 2, True, True, 0, 7, 100, False)
    assert (state.matrix_approximation_rank, state.start_powerSGD_iter, state.random_seed) == (2, 1, 7)
    model = wrap("torch", Given((60, 50), (50, 60)))
    model.register_comm_hook(state, commhooks.powerSGD_hook)  # type: ignore[operator]
    for step in range(3):
        model(*normal(zeros((60, 50), (50, 60)), 1, seed=step)[0]).backward()
    rate, before, after = state.compression_stats()
    assert state.iter == 3
    return before, after, rate
