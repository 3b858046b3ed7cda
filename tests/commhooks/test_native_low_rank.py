"""PowerSGD's compiled passes: each level of this processor, on 1 and 2 threads, against eager steps and doubles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from commhooks.compressors.powersgd.orthonormal import orthonormal_rows
from commhooks.errors import CompressorError
from commhooks.native import library, passes
from commhooks.native.low_rank import (
    MOST_RANK,
    LowRankKernels,
    MatrixGroup,
    MatrixMemory,
    Probes,
    keep_scaled,
    level_for,
    orthonormalize,
)

BUILT = library.opened(library.PATH)
LEVELS = () if isinstance(BUILT, str) else library.levels_of(BUILT)
pytestmark = pytest.mark.skipif(isinstance(BUILT, str), reason=f"compiled passes: {BUILT}")
WAYS = [(level, threads) for level in LEVELS for threads in (1, 2)]
SHAPES = ((1, 1), (1, 40), (3, 7), (5, 16), (8, 33), (21, 530), (37, 1040), (64, 27), (130, 9))
"""Fewer rows and columns than a pass takes at once, and more; multiples of a line, and not."""
EPSILON = 2.0**-23


@pytest.fixture(autouse=True)
def pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Divide small matrices over threads too."""
    before = torch.get_num_threads()
    monkeypatch.setattr(passes, "_AT_LEAST", 1)
    yield
    torch.set_num_threads(before)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """Groups of one matrix of each shape, of rank at most r, two of them a stack, some places past alignment."""

    def __init__(self, r: int, shift: int = 0, in_place: bool = True, keeps: bool = True) -> None:
        self.ranks = [min(n, m, r) for n, m in SHAPES]
        self.sizes = [2 if at % 4 == 1 else 1 for at in range(len(SHAPES))]
        wide = [(k, n, m) for k, (n, m) in zip(self.sizes, SHAPES, strict=True)]
        self.g, self.e, self.mean = ([self._placed(one, shift, seed) for one in wide] for seed in (1, 2, 3))
        if in_place:
            self.mean = self.g
        self.residuals: list[Tensor | None] = [*self.e] if keeps else [None] * len(wide)
        factors = list(zip(self.sizes, self.ranks, SHAPES, strict=True))
        self.P, self.P_mean = ([drawn(k, q, n, seed=seed) for k, q, (n, _) in factors] for seed in (4, 5))
        self.Q, self.own, self.Q_mean = ([drawn(k, q, m, seed=seed) for k, q, (_, m) in factors] for seed in (6, 7, 8))
        self.directions = [drawn(m, seed=9) for _, m in SHAPES]
        self.shown = [torch.empty(k, n) for k, n, _ in wide]

    @staticmethod
    def _placed(shape: tuple[int, int, int], shift: int, seed: int) -> Tensor:
        return drawn(shift + math.prod(shape), seed=seed)[shift:].view(shape)

    def kernels(self, level: str) -> LowRankKernels:
        groups = [
            MatrixGroup(
                r, [MatrixMemory(g, e, mean) if len(g) > 1 else MatrixMemory(g[0], e if e is None else e[0], mean[0])]
            )
            for r, g, e, mean in zip(self.ranks, self.g, self.residuals, self.mean, strict=True)
        ]
        return LowRankKernels(level, groups)

    def step(self, level: str, *, decay: float = 1.0, probes: bool = True, keeps: bool = True) -> list[Tensor]:
        """Return M, own P, the probes' products, own Q, the means and the residuals after all passes."""
        kernels = self.kernels(level)
        kernels.left(self.Q, self.P, decay=decay, probes=Probes(self.directions, self.shown) if probes else None)
        formed, own = [g.clone() for g in self.g], [P.clone() for P in self.P]
        kernels.right(self.P_mean, self.own)
        kernels.finish(self.P_mean, self.own, self.Q_mean, keeps=keeps)
        return [*formed, *own, *self.shown, *self.own, *self.mean, *self.e]


def product(P: Tensor, Q: Tensor) -> Tensor:
    """Return P·Q, k×n×m, of factors kept transposed, each element in the order of the passes."""
    total = P[:, 0, :, None] * Q[:, 0, None]
    for k in range(1, P.shape[1]):
        total.add_(P[:, k, :, None] * Q[:, k, None])
    return total


@pytest.mark.parametrize("r", range(1, MOST_RANK + 1))
def test_all_levels_and_threads_compute_the_bits_of_eager_products(r: int) -> None:
    first: list[Tensor] | None = None
    for (level, threads), shift in zip(WAYS, itertools.cycle((0, 1, 3)), strict=False):
        torch.set_num_threads(threads)
        before, case = Case(r), Case(r, shift)
        for ours, theirs in zip([*case.g, *case.e], [*before.g, *before.e], strict=True):
            ours.copy_(theirs)
        found = case.step(level, decay=0.7)
        first = first or found
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, first, strict=True)), (level, threads)
        for at, (g, e) in enumerate(zip(before.g, before.e, strict=True)):
            M = g + e * 0.7
            assert torch.equal(found[at], M)
            assert torch.equal(case.mean[at], product(case.P_mean[at], case.Q_mean[at]))
            assert torch.equal(case.e[at], M - product(case.P_mean[at], case.own[at]))


def close(sums: Tensor, left: Tensor, right: Tensor) -> bool:
    """Return whether sums are left·right within n·ε of the sum of magnitudes."""
    left, right = left.double(), right.double()
    bound = left.shape[-1] * EPSILON * (left.abs() @ right.abs())
    return bool(((sums - left @ right).abs() <= bound).all())


@pytest.mark.parametrize("r", [1, 3, 8])
def test_own_factors_are_those_of_products_in_double(r: int) -> None:
    case = Case(r)
    case.step(LEVELS[0])
    M = [g + e for g, e in zip(Case(r).g, Case(r).e, strict=True)]
    for at, formed in enumerate(M):
        assert close(case.P[at], case.Q[at], formed.mT)
        assert close(case.own[at], case.P_mean[at], formed)
        assert close(case.shown[at].unsqueeze(2), formed, case.directions[at].unsqueeze(1))


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_not_asked_for_stays(level: str) -> None:
    """A residual that is not kept, a gradient that is not formed again, or has its mean elsewhere or no residual."""
    case, before = Case(4, in_place=False), Case(4, in_place=False)
    kernels = case.kernels(level)
    kernels.left(case.Q, case.P, forms=False)
    kernels.finish(case.P_mean, case.own, case.Q_mean, keeps=False)
    assert all(map(torch.equal, [*case.g, *case.e], [*before.g, *before.e]))
    assert all(torch.equal(*pair) for pair in zip(case.mean, map(product, case.P_mean, case.Q_mean), strict=True))
    kernels.left(case.Q, case.P)
    kernels.finish(case.P_mean, case.own, case.Q_mean)
    assert all(map(torch.equal, case.g, [g + e for g, e in zip(before.g, before.e, strict=True)]))
    assert not any(map(torch.equal, case.e, before.e))
    without = Case(4, keeps=False)
    without.step(level)
    assert all(map(torch.equal, [*without.mean, *without.e], [*case.mean, *before.e]))


def orthonormal(P: Tensor, level: str = LEVELS[0] if LEVELS else "", epsilon: float = 0.0) -> Tensor:
    """Return the rows of one batch, made orthonormal."""
    to = torch.full_like(P, math.nan)
    orthonormalize(level, [P], [to], epsilon)
    return to


HARD: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda P: P,
    "of all scales": lambda P: P * 10.0 ** torch.linspace(-30, 30, P.shape[1]).unsqueeze(1),
    "with zero rows": lambda P: P.index_fill(1, torch.tensor([0, P.shape[1] - 1]), 0.0),
    "all zero": torch.zeros_like,
    "dependent": lambda P: P[:, :1].expand_as(P) * torch.arange(1, P.shape[1] + 1).unsqueeze(1),
    "alike": lambda P: P[:, :1] + P * 1e-4,
    "sparse": lambda P: torch.where(P.abs() > 1.5, P, 0.0),
    "denormal": lambda P: P * 1e-42,
}


@pytest.mark.parametrize("kind", HARD)
def test_rows_are_orthonormal_and_the_same_everywhere(kind: str) -> None:
    for r, n in ((1, 1), (1, 2), (1, 5), (2, 2), (3, 4), (4, 4), (5, 67), (8, 8), (8, 1000), (11, 30)):
        P = HARD[kind](drawn(3, r, n, seed=n)).contiguous()
        for epsilon in (0.0, 1e-8, 10.0):
            expected = orthonormal_rows(P, epsilon)
            for level, threads in WAYS:
                torch.set_num_threads(threads)
                assert torch.equal(orthonormal(P, level, epsilon), expected), (r, n, level, threads)
        rows = orthonormal_rows(P, 0.0).double()
        assert ((rows @ rows.mT - torch.eye(r)).abs() <= 4 * EPSILON).all(), "each element is rounded once, to float"
    rows = P.clone()
    orthonormalize(LEVELS[0], [rows], [rows])
    assert torch.equal(rows, orthonormal(P)), "in place"


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_row_that_is_not_finite_makes_itself_and_later_rows_nan_in_its_matrix_alone(bad: float) -> None:
    P = drawn(3, 4, 9)
    alone = orthonormal(P)
    P[1, 1, 5] = bad
    found = orthonormal(P)
    assert found[1, 1:].isnan().all()
    assert torch.equal(found[::2], alone[::2])


def test_kept_rows_have_a_largest_magnitude_of_1_and_the_bits_of_eager_ones() -> None:
    means = [drawn(3, 2, 37) * 1e-20, drawn(1, 4, 5, seed=1)]
    means[0][0, 1] = 0
    means[0][2, 0, 3] = math.nan
    means[1][0, 2, 1] = math.inf
    for level, threads in WAYS:
        torch.set_num_threads(threads)
        memory = [drawn(1, 5, 37, seed=2), drawn(2, 3, 37, seed=3), drawn(1, 4, 5, seed=4)]
        kept = [[memory[0][:, :2], memory[1][:, :2]], [memory[2]]]
        expected = []
        for of_group, mean in zip(kept, means, strict=True):
            largest = mean.abs().amax(dim=-1, keepdim=True)
            expected.append(torch.where(largest > 0, mean / largest, torch.cat(of_group)))
        spared = memory[0][:, 2:].clone()
        keep_scaled(level, kept, means)
        for of_group, rows in zip(kept, expected, strict=True):
            torch.testing.assert_close(torch.cat(of_group), rows, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(memory[0][:, 2:], spared)


def test_there_are_passes_for_fp32_on_a_cpu_up_to_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert level_for(drawn(3), MOST_RANK) == library.in_use()
    assert [level_for(drawn(3), MOST_RANK + 1), level_for(drawn(3).double()), level_for(drawn(3).to("meta"))] == [
        None
    ] * 3
    assert "powersgd" in library.compiled().kinds
    monkeypatch.setenv(library.VARIABLE, "off")
    assert level_for(drawn(3)) is None


def test_tensors_that_are_not_as_the_passes_need_them_are_errors() -> None:
    level, g, e = LEVELS[0], drawn(6, 4), drawn(6, 4)
    kernels = LowRankKernels(level, [MatrixGroup(2, [MatrixMemory(g, e, g)])])
    P, Q, shown = [drawn(1, 2, 6)], [drawn(1, 2, 4)], [drawn(1, 6)]

    def of(*memories: MatrixMemory, r: int = 2) -> Callable[[], object]:
        return lambda: LowRankKernels(level, [MatrixGroup(r, list(memories))])

    wrong: list[Callable[[], object]] = [
        of(MatrixMemory(g, e, g), r=9),
        of(MatrixMemory(g, e.double(), g)),
        of(MatrixMemory(g, e, g.T)),
        of(MatrixMemory(g.T, None, g.T)),
        of(MatrixMemory(g, e, g), MatrixMemory(g[1:], None, g[1:])),
        lambda: kernels.left([drawn(1, 2, 5)], P),
        lambda: kernels.left(Q, [P[0].double()]),
        lambda: kernels.left(Q, P, probes=Probes([drawn(5)], shown)),
        lambda: kernels.right([drawn(1, 6, 2).mT], Q),
        lambda: kernels.finish(P, Q, [drawn(2, 4)]),
        lambda: orthonormalize(level, [drawn(1, 3, 2)], [drawn(1, 3, 2)]),
        lambda: orthonormalize(level, P, Q),
        lambda: keep_scaled(level, [[drawn(1, 2, 4).double()]], Q),
        lambda: keep_scaled(level, [[drawn(1, 4, 2).mT]], Q),
        lambda: keep_scaled(level, [Q + Q], Q),
    ]
    for call in wrong:
        with pytest.raises(CompressorError, match="compiled passes need|need as many bases"):
            call()
