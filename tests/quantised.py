"""Frozen weights kept as codes, in a tensor subclass that answers next to no operation, as quantised bases are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Codes(Tensor):
    """Weights as uint8 codes and one scale: its elements have no memory, and only a linear layer can use it."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Codes:
        make: Callable[..., Codes] = torch.Tensor._make_wrapper_subclass
        return make(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __repr__(self) -> str:  # type: ignore[override]  # a tensor's takes an argument
        return f"Codes({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return func(args[0], args[1].codes.to(args[1].scale.dtype) * args[1].scale, *args[2:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # it has no types

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # Tensor's is a static function
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"Codes dispatch: attempting to run {func}, this is not supported")


class OnCodes(nn.Module):
    """A trained layer behind one whose weight is codes, with more of them in a buffer, and a base of uint8 beside."""

    def __init__(self, rank: int = 0, *, width: int = 4, has_buffer: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(width, width, bias=False)
        self.base.weight = nn.Parameter(codes_of(rank, width), requires_grad=False)
        self.bytes = nn.Parameter(torch.full((width,), rank, dtype=torch.uint8), requires_grad=False)
        self.head = nn.Linear(width, width)
        if has_buffer:
            self.register_buffer("table", codes_of(rank, width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.base(x))
        return y

    def marks(self) -> list[int]:
        """Return the numbers of the ranks from which the weight of codes and the base of bytes come."""
        weight: Any = self.base.weight
        return [int(weight.codes[0, 0]), int(self.bytes[0])]


def codes_of(rank: int, width: int) -> Codes:
    return Codes(torch.full((width, width), rank, dtype=torch.uint8), torch.ones(()))
