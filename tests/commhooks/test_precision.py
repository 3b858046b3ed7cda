"""Where matrix products lose digits, what was sent and what is owed still add up.

Reduced precision is made up here: operands are rounded, as TF32 and bf16 do. tests/gpu has it on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from commhooks import make_compressor
from commhooks.compressors.powersgd import precision
from commhooks.compressors.powersgd.precision import in_full, is_reduced
from tests.commhooks.workers import Workers, normal

aten = torch.ops.aten
UNIT = 2.0**-24  # fp32's rounding
BITS = {"tf32": 11, "bf16": 8}
OPERANDS = {
    aten.mm.default: 0, aten.mm.out: 0, aten.addmm.default: 1, aten.addmm.out: 1, aten.addmm_.default: 1,
    aten.bmm.default: 0, aten.bmm.out: 0, aten.baddbmm.default: 1, aten.baddbmm.out: 1, aten.baddbmm_.default: 1,
}  # fmt: skip


class Reduced(TorchDispatchMode):
    """Round the operands of matrix products to so many significant bits."""

    def __init__(self, bits: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # 'Call to untyped function "__init__"'
        self.dropped = 24 - bits

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = OPERANDS.get(function)
        if first is not None:
            args = (*args[:first], *map(self._rounded, args[first : first + 2]), *args[first + 2 :])
        return function(*args, **(kwargs or {}))

    def _rounded(self, operand: Tensor) -> Tensor:
        bits = operand.contiguous().view(torch.int32)
        half = 1 << (self.dropped - 1)  # to the nearest; ties away from 0, which is as good
        return ((bits + half) & -(1 << self.dropped)).view(torch.float32)


@pytest.fixture(params=BITS)
def reduced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Reduced:
    monkeypatch.setattr(precision, "is_reduced", lambda like: like.dtype == torch.float32)
    return Reduced(BITS[request.param])


def test_a_product_in_full_has_fp32s_own_rounding_and_no_other(reduced: Reduced) -> None:
    rows, r, columns = 60, 5, 70
    generator = torch.Generator().manual_seed(0)
    P, Q = (torch.randn(shape, generator=generator) for shape in ((rows, r), (r, columns)))
    P *= torch.logspace(-12, 12, rows)[:, None]
    exact = P.double() @ Q.double()
    with reduced:
        ours, plain = torch.mm(*in_full(P, Q)), torch.mm(P, Q)
    bound = 9 * r * UNIT * (P.double().abs() @ Q.double().abs())  # products of parts are exact; so many are added
    assert ((ours.double() - exact).abs() <= bound).all()
    assert not ((plain.double() - exact).abs() <= bound).all(), "the made-up loss is too small to see"


@pytest.mark.parametrize("alternating", [False, True])
def test_sent_and_owed_add_up(alternating: bool, reduced: Reduced) -> None:
    ranks, r = 3, 2
    parameters = [torch.zeros(40, 50), torch.zeros(90, 60), torch.zeros(40, 50)]  # two of them side by side
    workers = Workers(make_compressor("powersgd", rank=r, alternating=alternating), ranks, parameters)
    gradients = normal(parameters, ranks, seed=0)
    with reduced:
        means = workers.step(gradients)[0]
    for number, mean in enumerate(means):
        own = [gradients[rank][number].double() for rank in range(ranks)]
        owed = [table.residuals()[number][-1].double().view_as(mean) for table in workers.states]
        # An element of a rank's product is at most its gradient's largest singular value, as P or Q is orthonormal, and
        # it is rounded 9r times, once in the subtraction, and once for each rank in the sum of the factors. The
        # mean's product is no larger than the sum of theirs.
        norms = sum(float(torch.linalg.matrix_norm(one, 2)) for one in own)
        bound = 2 * (9 * r + 1 + ranks) * UNIT * norms
        assert float((sum(own) - sum(owed) - ranks * mean.double()).abs().max()) <= bound


def test_what_a_transform_sends_and_what_is_owed_add_up(reduced: Reduced) -> None:
    """Coefficients may be off, for the inverse says what they stand for, and it is computed in full."""
    ranks, side = 3, 16
    workers = Workers(make_compressor("demo", k=8, chunk=side), ranks, [torch.zeros(32, 48)])
    gradients = normal(workers.parameters, ranks, seed=0)
    with reduced:
        (mean,) = workers.step(gradients)[0]
    # An element is a row times the coefficients times a column, 9·side products each, for the mean and for what is
    # owed; and rounded once in the subtraction, and once for each rank in the sum.
    norms = sum(float(own[0].double().norm()) for own in gradients)
    bound = (2 * 2 * 9 * side + 1 + ranks) * UNIT * norms
    left = ranks * (mean.double() + workers.unsent(0)) - sum(own[0].double() for own in gradients)
    assert float(left.abs().max()) <= bound


@pytest.mark.parametrize(("setting", "expected"), [("none", False), ("ieee", False), ("tf32", True), ("bf16", True)])
def test_the_setting_is_read_and_left_alone(setting: str, expected: bool) -> None:
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # 'Module has no attribute "matmul"'
    before = matmul.fp32_precision
    matmul.fp32_precision = setting
    try:
        assert is_reduced(torch.zeros(1)) is expected
        assert not is_reduced(torch.zeros(1, dtype=torch.float64))
        P, Q = torch.ones(3, 1), torch.ones(1, 3)
        assert (in_full(P, Q)[0] is P) is not expected
        assert matmul.fp32_precision == setting
    finally:
        matmul.fp32_precision = before
