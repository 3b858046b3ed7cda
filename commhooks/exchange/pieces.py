"""A warning of optimizers of whole matrices, such as Muon and Shampoo, that compute with pieces of them.

Given DTensors, PyTorch's operators compute whole matrices, and communicate. An optimizer that takes the shards out of
them and multiplies these orthogonalises each piece by itself, and neither a shape nor an error shows it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from commhooks.tensors import shard_of

PRIVATE_NAMES = (
    "torch.utils._python_dispatch:TorchDispatchMode",
    "torch.utils._python_dispatch:_get_current_dispatch_mode",
)
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
"""The operators that products of matrices consist of."""
_COMMUNICATES = {"c10d", "_c10d_functional", "c10d_functional"}
"""The namespaces of collectives."""

WITH_DTENSORS = (
    "Let it compute with the parameters and gradients themselves, which are DTensors, as torch.optim.Muon does, and "
    "not with to_local(); or with full_tensor()."
)
"""What to do about an optimizer of sharded parameters."""


class PiecesWatch:
    """A look at an optimizer's first `steps`, and one warning if it treats pieces of matrices as whole ones.

    `named` are the model's parameters, of which some are sharded; the optimizer trains them, or, in their places, plain
    tensors with the shards' shapes. What it does is certain if it multiplies or factorizes a plain tensor of a piece's
    shape, which no whole parameter has, in a step without any communication. Only the first of the ranks that share a
    model looks. `advice` ends the warning.
    """

    def __init__(self, optimizer: Optimizer, named: Mapping[str, Tensor], advice: str, *, steps: int = 1) -> None:
        shapes = {name: (_as_matrix(shard_of(one).shape), _as_matrix(one.shape)) for name, one in named.items()}
        whole = {shape for piece, shape in shapes.values() if piece == shape}
        self._pieces = {
            piece: (name, shape)
            for name, (piece, shape) in reversed([*shapes.items()])
            if piece != shape and piece not in whole and 0 not in piece and _is_on_first(named[name])
        }
        self._advice = advice
        self._left = steps if self._pieces else 0
        self._look: _Look | None = None
        self._handles = [
            register(hook)
            for register, hook in (
                (optimizer.register_step_pre_hook, self._before_step),
                (optimizer.register_step_post_hook, self._after_step),
            )
            if self._pieces
        ]

    def remove(self) -> None:
        """Stop looking."""
        self._end()
        for handle in self._handles:
            handle.remove()

    @_disable_dynamo  # it would be compiled into a compiled step
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._end()  # of a step that raised, after which no hook is called
        # A closure runs the model, whose products are of activations too. Looks of two watches would end in the order
        # in which they began, and a mode can only be left if it was entered last: another one looks at a later step.
        has_closure = any(callable(one) for one in (*args, *kwargs.values()) if one is not optimizer)
        if self._left and not has_closure and not isinstance(_get_current_dispatch_mode(), _Look):
            self._left -= 1
            self._look = _Look({*self._pieces, *(piece[::-1] for piece in self._pieces)})
            self._look.__enter__()  # type: ignore[no-untyped-call]  # of PyTorch

    @_disable_dynamo
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        look = self._look
        self._end()
        if look is None or look.found is None or look.communicates:
            return
        self._left = 0
        piece = look.found if look.found in self._pieces else look.found[::-1]
        name, whole = self._pieces[piece]
        warnings.warn(
            f"commhooks: {type(optimizer).__name__} treats this rank's piece of {name!r}, {piece[0]} x {piece[1]}, as "
            f"the whole matrix, which is {whole[0]} x {whole[1]}, so that training depends on the number of ranks. "
            f"{self._advice}",
            stacklevel=2,
        )

    def _end(self) -> None:
        # If another mode was entered since a step that raised, this one stays, and only passes calls on.
        if self._look is not None and _get_current_dispatch_mode() is self._look:
            self._look.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # of PyTorch
        self._look = None


class _Look(TorchDispatchMode):
    """Notes whether a tensor of one of these shapes is multiplied or factorized, and whether anything is sent."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of PyTorch
        self.found: tuple[int, ...] | None = None
        self.communicates = False
        self._shapes = shapes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: functions are compiled, and run, as without this; their products are called from here too."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and note what it is. Those of DTensors run without being seen within."""
        name = func.overloadpacket.__name__
        self.communicates = self.communicates or func.namespace in _COMMUNICATES
        if name in _PRODUCTS or ("linalg_" in name and name != "linalg_vector_norm"):
            for operand in args:
                if type(operand) is Tensor and operand.dim() > 1 and operand.shape[-2:] in self._shapes:
                    self.found = self.found or tuple(operand.shape[-2:])
        return func(*args, **(kwargs or {}))


def _is_on_first(parameter: Any) -> bool:
    """Return whether this is the first of the ranks that share a DTensor, which speaks for all of them."""
    return not any(parameter.device_mesh.get_coordinate() or ())


def _as_matrix(shape: torch.Size) -> tuple[int, ...]:
    """Return the shape in which optimizers treat a parameter as a matrix; that of vectors is no matrix's."""
    return (shape[0], shape[1:].numel()) if len(shape) > 1 else (0, 0)
