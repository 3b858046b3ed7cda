"""The warning of optimizers that take pieces for whole matrices, with stand-ins for sharded parameters."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from commhooks.exchange.pieces import PiecesWatch


def half_of(whole: tuple[int, ...], first: bool = True) -> Any:
    """Return what is asked of a DTensor whose rows two ranks share."""
    mesh = types.SimpleNamespace(get_coordinate=lambda: [0 if first else 1])
    own = torch.zeros(whole[0] // 2, *whole[1:])
    return types.SimpleNamespace(shape=torch.Size(whole), device_mesh=mesh, to_local=lambda: own)


class Custom(torch.optim.Optimizer):
    """Does something with each gradient."""

    def __init__(self, parameters: Any, of: Callable[[Tensor], object]) -> None:
        super().__init__(parameters, {})
        self.of = of

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.of(p.grad)


def told(
    of: Callable[[Tensor], object], shape: tuple[int, ...] = (4, 6), named: Any = None, steps: int = 1
) -> list[str]:
    """Take steps with an outer copy of this shape, of which the whole has twice the rows; return the warnings."""
    parameter = torch.zeros(shape)
    parameter.grad = torch.ones(shape)
    optimizer = Custom([parameter], of)
    watch = PiecesWatch(optimizer, named or {"w": half_of((2 * shape[0], *shape[1:]))}, "Do.", steps=steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.step()
            assert _get_current_dispatch_mode() is None
    watch.remove()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    "of",
    [
        lambda g: g @ g.mT,
        lambda g: g.mT.bfloat16() @ g.bfloat16(),
        lambda g: torch.addmm(torch.zeros(4, 4), g, g.mT),
        lambda g: torch.stack([g, g]) @ torch.ones(2, 6, 3),
        torch.linalg.svd,
        lambda g: torch.linalg.qr(g.mT),
    ],
)
def test_products_and_factors_of_a_piece_are_warned_of_once(of: Callable[[Tensor], object]) -> None:
    (one,) = told(of, steps=3)
    assert "Custom treats this rank's piece of 'w', 4 x 6, as the whole matrix, which is 8 x 6, so that" in one
    assert one.endswith("Do.")


def test_two_looks_at_one_optimizer_leave_no_mode_behind() -> None:
    parameter = torch.zeros(4, 6)
    parameter.grad = torch.ones(4, 6)
    optimizer = Custom([parameter], lambda g: g @ g.mT)
    watches = [PiecesWatch(optimizer, {"w": half_of((8, 6))}, advice) for advice in ("One.", "Two.")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.step()
            assert _get_current_dispatch_mode() is None
    assert [str(one.message)[-4:] for one in caught] == ["One.", "Two."]
    for watch in watches:
        watch.remove()


@pytest.mark.parametrize(
    ("of", "named"),
    [
        (lambda g: g.norm() * g.sum(0), {"w": half_of((8, 6))}),
        (lambda g: torch.ones(5, 5) @ torch.ones(5, 5), {"w": half_of((8, 6))}),
        (lambda g: g @ g.mT, {"w": half_of((8, 6)), "of the piece's shape, whole": torch.zeros(4, 6)}),
        (lambda g: g @ g.mT, {"w": half_of((8, 6), first=False)}),
        (lambda g: g @ g.mT, {"w": torch.zeros(4, 6)}),
    ],
    ids=["elements", "others", "ambiguous", "not the first rank", "whole"],
)
def test_what_is_right_or_not_certain_is_not_warned_of(of: Callable[[Tensor], object], named: Any) -> None:
    assert told(of, named=named) == []


def test_a_step_that_raises_leaves_nothing_behind_for_long() -> None:
    def fail(_: Tensor) -> None:
        raise RuntimeError("of its own")

    for go_on in ("another step", "removal", "another mode"):
        parameter = torch.zeros(4, 6)
        parameter.grad = torch.ones(4, 6)
        optimizer = Custom([parameter], fail)
        watch = PiecesWatch(optimizer, {"w": half_of((8, 6))}, "")
        with pytest.raises(RuntimeError, match="of its own"):
            optimizer.step()
        left: Any = _get_current_dispatch_mode()
        assert left is not None
        if go_on == "another mode":
            with torch.utils._python_dispatch.TorchDispatchMode() as other:
                watch.remove()
                assert _get_current_dispatch_mode() is other
            left.__exit__(None, None, None)
        elif go_on == "another step":
            with pytest.raises(RuntimeError, match="of its own"):
                optimizer.step()
            assert _get_current_dispatch_mode() is None
        watch.remove()
        assert _get_current_dispatch_mode() is None
