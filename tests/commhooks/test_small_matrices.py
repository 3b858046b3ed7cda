"""Small matrices, which are multiplied side by side: the same numbers as one by one, in far fewer calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import commhooks
from commhooks.compressors.powersgd import low_rank, orthonormal
from tests import bounds
from tests.commhooks.workers import Workers, normal, relative, zeros
from tests.tiers import covering

pytestmark = pytest.mark.kernels

SETTINGS: dict[str, dict[str, Any]] = {
    "fading residuals": {"rank": 2, "decay": 0.7},
    "rank 1": {"rank": 1},
    "rank 4": {"rank": 4},
    "alternating": {"rank": 2, "alternating": True},
    "cold": {"rank": 2, "warm_start": False},
    "twice": {"rank": 2, "iterations": 2},
    "square": {"rank": 2, "matrices": "most-square"},
}
MIXED = [(20, 30), (30,), (20, 30), (8, 4, 3, 3), (20, 30), (8, 4, 3, 3), (90, 80), (5,), (30, 20), (90, 80)]


STACKS = ["all together", "two at a time", "none", "launched"]


@pytest.fixture
def stacks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stacks have as many matrices as fit, or two, or be none; or let the code for a GPU run."""
    if request.param == "launched":
        launch(monkeypatch)
    if request.param == "two at a time":
        monkeypatch.setattr(low_rank, "STACK_ELEMENTS", 1300)
    if request.param == "none":
        monkeypatch.setattr(low_rank, "SMALL_ELEMENTS", 0)


def launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let matrices on the CPU be processed as on a GPU, where every call launches a kernel."""
    for module in (low_rank, orthonormal):
        monkeypatch.setattr(module, "runs_later", lambda tensor: True)


@pytest.mark.parametrize(
    ("settings", "dtype", "storage"),
    covering(
        [*SETTINGS.values(), {"rank": 2, "matrices": "whole-bucket"}],
        [torch.float64, torch.bfloat16, torch.float16],
        ["fp32", "bf16"],
        fast=6,
    ),
    ids=str,
)
def test_the_code_for_a_gpu_gives_the_same_numbers(
    settings: dict[str, Any], dtype: torch.dtype, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for is_launched in (False, True):
        if is_launched:
            launch(monkeypatch)
        workers = Workers(
            commhooks.make_compressor("powersgd", **settings), 2, zeros(*MIXED, dtype=dtype), storage=storage
        )
        means = [workers.step(normal(workers.parameters, 2, seed=step)) for step in range(3)][-1]
        found.append(
            [*(mean for of_rank in means for mean in of_rank), *(workers.residual(1, i) for i in range(len(MIXED)))]
        )
    stored = torch.bfloat16 if storage == "bf16" else dtype
    bound = max(bounds.IN_FLOAT64, 4 * torch.finfo(dtype).eps, 4 * torch.finfo(stored).eps)
    for launched, blocked in zip(*found[::-1], strict=True):
        assert relative(launched - blocked, blocked) < bound


def test_the_code_for_a_gpu_keeps_a_basis_where_a_row_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch)
    workers = Workers(commhooks.make_compressor("powersgd", rank=2), 1, zeros((16, 24), (16, 24), (30, 20)))
    workers.step(normal(workers.parameters, 1, seed=1))
    for number in range(3):  # nothing is left to send either
        workers.states[0].of(workers.parameters[number])["residual"].zero_()
    before = workers.saved()
    workers.step([[torch.zeros_like(p) for p in workers.parameters]])
    workers.step_number -= 1
    assert workers.saved() == before


@pytest.mark.usefixtures("stacks")
@pytest.mark.parametrize(
    ("settings", "stacks", "policy"),
    covering(list(SETTINGS.values()), STACKS, ["fifo", "fused"], fast=8),
    indirect=["stacks"],
    ids=str,
)
def test_each_matrix_gives_what_it_gives_alone(settings: dict[str, Any], policy: str) -> None:
    parameters = _channels_last(zeros(*MIXED, dtype=torch.float64), at=5)
    compressor = commhooks.make_compressor("powersgd", **settings)
    together = Workers(compressor, 2, parameters, policy=policy)
    alone = [Workers(compressor, 2, [p], names=[name]) for p, name in zip(parameters, together.names, strict=True)]
    for step in range(3):
        gradients = normal(parameters, 2, seed=step)
        means = together.step(gradients)
        for number, workers in enumerate(alone):
            for rank, (own,) in enumerate(workers.step([[of_rank[number]] for of_rank in gradients])):
                assert relative(means[rank][number] - own, own) < bounds.IN_FLOAT64
                left = workers.residual(rank, 0)
                assert relative(together.residual(rank, number) - left, left) < bounds.IN_FLOAT64


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_gradients_and_residuals_are_stacked_too(
    dtype: torch.dtype, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = zeros(*[(16, 24), (24,)] * 6, dtype=dtype)
    found = []
    for small in (low_rank.SMALL_ELEMENTS, 0):
        monkeypatch.setattr(low_rank, "SMALL_ELEMENTS", small)
        workers = Workers(commhooks.make_compressor("powersgd", rank=2), 2, parameters, storage=storage)
        means = [workers.step(normal(parameters, 2, seed=step))[0] for step in range(3)][-1]
        found.append((means, [workers.residual(1, index) for index in range(12)]))
    (means, left), (means_alone, left_alone) = found
    # A rounding of the last step or residual; three steps of products in fp32 lose less than a thousand.
    bound = max(1e3 * torch.finfo(torch.float32).eps, 4 * torch.finfo(dtype).eps, 4 * 2**-8 if storage == "bf16" else 0)
    for ours, theirs in zip([*means, *left], [*means_alone, *left_alone], strict=True):
        assert relative(ours - theirs, theirs) < bound


@pytest.mark.usefixtures("stacks")
@pytest.mark.parametrize("stacks", STACKS, indirect=True)
def test_an_inf_in_one_small_matrix_changes_no_residual_and_no_basis() -> None:
    workers = Workers(commhooks.make_compressor("powersgd", rank=2), 2, zeros(*[(16, 24), (24,)] * 6))
    workers.step(normal(workers.parameters, 2, seed=1))
    before = workers.saved()
    spoilt = normal(workers.parameters, 2, seed=2)
    spoilt[1][4][3, 5] = torch.inf
    for means in workers.step(spoilt):
        assert not any(mean.isfinite().all() for mean in means[::2])
    workers.step_number -= 1
    assert workers.saved() == before


@pytest.mark.parametrize("number", [0, 5])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_mean_that_fp16_cannot_hold_is_found_in_every_stack(
    number: int, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_rank, "STACK_ELEMENTS", 2 * 16 * 24)
    workers = Workers(commhooks.make_compressor("powersgd", rank=1), 1, zeros(*[(16, 24)] * 6, dtype=torch.float16))
    (gradients,) = normal(workers.parameters, 1, seed=1)
    gradients[number] = torch.full((16, 24), sign * 60_000.0, dtype=torch.float16)
    assert all(mean.isfinite().all() for mean in workers.step([gradients])[0])
    residual = workers.states[0].of(workers.parameters[number])["residual"]
    residual.fill_(sign * 40_000.0)
    assert not any(mean.isfinite().all() for mean in workers.step([gradients])[0])
    assert (residual == sign * 40_000.0).all()


class _Calls(TorchDispatchMode):
    """Counts calls of PyTorch's operations."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


def test_twice_as_many_small_matrices_take_as_many_calls() -> None:
    assert _calls(layers=8) == _calls(layers=16)


def _calls(layers: int) -> int:
    workers = Workers(commhooks.make_compressor("powersgd", rank=2), 1, zeros(*[(16, 24), (24,)] * layers))
    gradients = normal(workers.parameters, 1, seed=1)
    for _ in range(2):
        workers.step(gradients)
    calls = _Calls()  # type: ignore[no-untyped-call]  # PyTorch's constructor
    with calls:
        workers.step(gradients)
    return calls.number - 4 * layers  # two for each gradient are the test's own, which lays it out


def _channels_last(parameters: Sequence[Tensor], at: int) -> list[Tensor]:
    return [p.to(memory_format=torch.channels_last) if i == at else p for i, p in enumerate(parameters)]
