"""Counting what calls of PyTorch's operators would ask of a GPU: launches, bytes touched, and waits of the host.

The operators are seen where PyTorch hands them to a device (a dispatch mode), so kernels are assumed: one for a call,
more for `LAUNCHES`, none for views and allocations; docs/guide/gpu-cost.md lists all assumptions. Bytes are those of
every tensor that a call reads or writes, as if nothing stayed in a cache; a collective is a launch, and no bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FOREACH_TENSORS = 64
"""The most tensors that a multi-tensor kernel takes."""
CAT_TENSORS = 128
"""The most tensors that a kernel of `cat` takes."""
LAUNCHES: Mapping[str, int] = {
    "linalg_cholesky_ex": 2,
    "linalg_qr": 2,
    "linalg_solve_triangular": 2,
    "linalg_svd": 20,
    "_linalg_svd": 20,
    "nonzero": 4,
    "sort": 8,
    "topk": 16,
}
"""Launches of each operator that has more than one; for QR, in addition to two library calls for each matrix of a
batch."""
_OF_EACH_MATRIX = {"linalg_qr": 2, "_linalg_svd": 20, "linalg_svd": 20}

_NO_LAUNCH = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"),
    *("detach", "alias", "lift_fresh", "_reshape_alias", "_unsafe_view", "unbind", "split", "split_with_sizes"),
}
"""Allocations, and aliases that PyTorch does not call views."""
_OVERWRITING = {"copy_", "_foreach_copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_"}
"""In-place operators that do not read the memory they overwrite."""
_READ_BY_INDEX = {"index", "index_select", "gather", "take", "embedding"}
_WRITTEN_BY_INDEX = {"index_put_", "index_add_", "index_copy_", "scatter_", "scatter_add_", "put_", "index_fill_"}
_OF_VALUES = {"nonzero", "masked_select", "_unique2", "equal", "is_nonzero", "repeat_interleave"}


@dataclasses.dataclass
class Cost:
    """The counted work."""

    launches: int = 0
    bytes: int = 0
    waits: int = 0
    collectives: int = 0
    """Collectives, which also count as launches."""
    by_operator: Counter[str] = dataclasses.field(default_factory=Counter)
    """Launches."""


class Counting(TorchDispatchMode):
    """A context in which this thread's operators on a device are counted."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # 'Call to untyped function "__init__"'
        self.cost = Cost()
        self._device = device.type

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and count it."""
        kwargs = kwargs or {}
        answer = func(*args, **kwargs)
        if self._reaches_device(func, args, kwargs, answer):
            self._count(func, args, kwargs, answer)
        return answer

    def _reaches_device(self, func: Any, args: Any, kwargs: Any, answer: Any) -> bool:
        if func.namespace == "c10d":
            return True
        return any(tensor.device.type == self._device for tensor in _tensors((args, kwargs, answer)))

    def _count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], answer: Any) -> None:
        name = str(func.overloadpacket.__name__)
        if func.namespace == "c10d":
            self.cost.collectives += 1
            self._launch(name, 1)
            return
        if not launches(func):
            return
        given, got = list(_tensors((args, kwargs))), list(_tensors(answer))
        self._launch(name, launches_of(name, args))
        self.cost.bytes += bytes_of(func, args, kwargs, got)
        self.cost.waits += self._waits(name, args, kwargs, [*given, *got])

    def _launch(self, name: str, count: int) -> None:
        self.cost.launches += count
        self.cost.by_operator[name] += count

    def _waits(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> bool:
        if name in ("copy_", "_to_copy"):
            crosses = len({tensor.device.type for tensor in tensors}) > 1
            in_place = bool(args[2]) if name == "copy_" and len(args) > 2 else False
            return crosses and not (kwargs.get("non_blocking") or in_place)
        by_mask = name in ("index", "index_put_") and any(one.dtype == torch.bool for one in _indices(args))
        return by_mask or name == "_local_scalar_dense" or name in _OF_VALUES


def launches(func: Any) -> bool:
    """Return whether an operator does more than make a view or allocate memory."""
    return not func.is_view and str(func.overloadpacket.__name__) not in _NO_LAUNCH


def launches_of(name: str, args: Sequence[Any]) -> int:
    """Return how many kernels a call of an operator launches."""
    if name.startswith("_foreach_"):
        lists = [one for one in args if isinstance(one, (list, tuple)) and one and isinstance(one[0], Tensor)]
        kinds = zip(
            *(
                [tensor.shape if name == "_foreach_copy_" else (tensor.shape, tensor.dtype) for tensor in one]
                for one in lists
            ),
            strict=True,
        )
        is_one_kind = all(len(set(of_each)) == 1 for of_each in kinds)
        return math.ceil(len(lists[0]) / FOREACH_TENSORS) if is_one_kind else len(lists[0])
    if name in ("cat", "stack"):
        return math.ceil(len(args[0]) / CAT_TENSORS)
    of_each = _OF_EACH_MATRIX.get(name, 0)
    matrices = math.prod(args[0].shape[:-2]) if of_each else 0
    return LAUNCHES.get(name, 1) + of_each * (matrices if name == "linalg_qr" else max(matrices - 1, 0))


def bytes_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], got: Sequence[Tensor]) -> int:
    """Return how many bytes a call of an operator reads and writes."""
    name = str(func.overloadpacket.__name__)
    indices = _indices(args)
    if name in _READ_BY_INDEX:
        return sum(2 * _memory(tensor) for tensor in got) + sum(map(_memory, indices))
    if name in _WRITTEN_BY_INDEX:
        values = [one for one in _tensors((args[1:], kwargs)) if all(one is not index for index in indices)]
        written = max((_memory(one) for one in values), default=args[0].element_size() * indices[0].numel())
        is_read = name in ("index_add_", "scatter_add_")
        return sum(map(_memory, [*values, *indices])) + written * (2 if is_read else 1)
    total, seen = 0, set()
    for number, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name) if number >= len(args) else args[number]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not is_written or (not argument.is_out and name not in _OVERWRITING)
        for tensor in _tensors(value):
            seen.add(id(tensor))
            total += _memory(tensor) * (is_written + is_read)
    return total + sum(_memory(tensor) for tensor in got if id(tensor) not in seen)


def _indices(args: Sequence[Any]) -> list[Tensor]:
    return [one for one in _tensors(args[1:]) if one.dtype in (torch.int64, torch.int32, torch.bool)]


def _memory(tensor: Tensor) -> int:
    """Return the bytes of the memory that a tensor's elements lie in, each once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return (math.prod(sizes) if tensor.numel() else 0) * tensor.element_size()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
