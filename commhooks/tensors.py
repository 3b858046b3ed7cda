"""Facts about tensors that several packages need."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

PRIVATE_NAMES = (
    "torch:Tensor._indices",
    "torch:Tensor._values",
    "torch:Tensor._version",
    "torch:_foreach_add_",
    "torch:_foreach_copy_",
    "torch:_foreach_mul_",
    "torch:_foreach_norm",
    "torch:_foreach_zero_",
    "torch._C:Future",
    "torch._C:_current_graph_task_id",
    "torch._C._distributed_c10d:GradBucket",
    "torch._compile:_disable_dynamo",
    "torch.autograd:Variable._execution_engine.queue_callback",
    "torch.nn:Module._modules",
)
"""Those that all of commhooks uses, and that belong to no seam."""


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a contiguous range of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def cloned(data: Any) -> Any:
    """Return a copy of plain data; each tensor is copied alone, unlike `copy.deepcopy`, which copies whole storages."""
    if isinstance(data, Tensor):
        return data.detach().clone()
    if isinstance(data, dict):
        return {key: cloned(held) for key, held in data.items()}
    return type(data)(map(cloned, data)) if isinstance(data, (list, tuple)) else data


def has_numpy(tensor: Tensor) -> bool:
    """Return whether NumPy can read a tensor's memory, if it knows the dtype: a plain CPU tensor's."""
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for state and computation, given a gradient of `dtype`: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements as bytes, 1-D, in the order of its indices: a view if it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or any other tensor, in the same memory and detached."""
    return shard_of(tensor).detach()


def shard_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or any other tensor itself."""
    sharded: Any = tensor
    own: Tensor = sharded.to_local() if hasattr(tensor, "to_local") else tensor
    return own


def answers_itself(tensor: Tensor) -> bool:
    """Return whether a tensor is of a subclass with a `__torch_dispatch__` of its own, such as weights kept as codes.

    It may have no memory, and may refuse to be flattened, viewed, copied or overwritten.
    """
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def has_own_bytes(tensor: Tensor) -> bool:
    """Return whether every element has bytes of its own, which can be sent and overwritten.

    False for sparse and quantised tensors, expanded ones, and those that answer operations themselves.
    """
    if answers_itself(tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def power_below(terms: int) -> float:
    """Return the largest power of two that is at most 1/terms: a sum of terms, scaled by it first, cannot overflow."""
    return 2.0 ** -(terms - 1).bit_length()


def mean_in_order(first: Tensor, others: Iterable[Tensor], terms: int) -> Tensor:
    """Overwrite a tensor with its mean over `terms` tensors, itself and the others, in order, and return it.

    It rounds every element alike; the rounding of a sum over a dimension may depend on lengths. Finite terms never
    overflow.
    """
    shrunk = power_below(terms)
    first *= shrunk
    for other in others:
        first.add_(other, alpha=shrunk)
    return first.div_(terms * shrunk)


def root(numbers: Tensor) -> Tensor:
    """Return square roots, correctly rounded on every processor; PyTorch's depend on its kernels in the last bit."""
    return torch.from_numpy(np.sqrt(numbers.numpy())) if has_numpy(numbers) else numbers.sqrt()


def smallest(dtype: torch.dtype) -> float:
    """Return the smallest positive number of `dtype`, which is not a normal one."""
    kind = torch.finfo(dtype)
    return kind.smallest_normal * kind.eps


def tensor_elements(tensor: Tensor) -> int:
    """Return the number of elements in a dense or sparse tensor's payload; indices do not count."""
    return tensor._values().numel() if tensor.is_sparse else tensor.numel()


def tensor_bytes(tensor: Tensor, wire: torch.dtype | None = None) -> int:
    """Return the bytes of a dense or sparse tensor's payload, with its values in `wire` if given."""
    value_bytes = tensor.element_size() if wire is None else wire.itemsize * (2 if tensor.is_complex() else 1)
    if tensor.is_sparse:
        indices, values = tensor._indices(), tensor._values()
        return indices.numel() * indices.element_size() + values.numel() * value_bytes
    return tensor.numel() * value_bytes


_LARGE = 1 << 11
"""The number of elements from which on a CPU finds the extremes faster than the norm."""


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return a 0-dim bool: true if no element of any tensor is inf or NaN. Integers are finite."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    device, extremes = None, list[Tensor]()
    for tensor in tensors:
        values = tensor._values() if tensor.is_sparse else tensor
        device = values.device
        if device.type == "cpu" and values.numel() >= _LARGE and values.is_floating_point():
            extremes += [values.amax(), values.amin()]
        elif values.numel() and (values.is_floating_point() or values.is_complex()):
            by_dtype.setdefault(values.dtype, []).append(values)
    # The largest magnitude reveals inf and NaN, in one pass and without a mask of all elements.
    norms = [torch.stack(torch._foreach_norm(alike, math.inf)) for alike in by_dtype.values()]
    if extremes:
        norms.append(torch.stack(extremes).abs_())
    if not norms:
        return torch.ones((), dtype=torch.bool, device=device)
    are_finite = [of_dtype < math.inf for of_dtype in norms]  # `isfinite` would be four calls
    return (are_finite[0] if len(are_finite) == 1 else torch.cat(are_finite)).all()


def memory_order(parameter: Tensor) -> list[int]:
    """Return the dimensions with more than one element, from the outermost in memory to the innermost."""
    dimensions = [dimension for dimension, size in enumerate(parameter.shape) if size > 1]
    if not is_dense(parameter):  # a gradient has no gaps: it is laid out in the order of dimensions
        return dimensions
    return sorted(dimensions, key=parameter.stride, reverse=True)
