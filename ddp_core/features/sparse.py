"""Sparse gradients, of embeddings with ``sparse=True``: a bucket for each, and a group for their sums.

Gloo's sum of sparse tensors corrupts the heap if another collective of its process group ends at the same moment: the
group's two threads write the name of the finished collective into one string, without a lock, and this is the only name
too long for the string's inline buffer (PyTorch 2.13; docs/guide/ddp_core.md). So that group has one thread.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo
from torch.nn import Parameter

from ddp_core.buckets import Bucket
from ddp_core.collectives import all_reduce, store_of

_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()


def sparse_parameters(module: nn.Module) -> set[int]:
    """Return the ids of parameters that will get sparse gradients: weights of embeddings with ``sparse=True``."""
    embeddings = [m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    return {id(m.weight) for m in embeddings if m.sparse}


class SparseBucket(Bucket):
    """A parameter whose gradient is sparse: the gradient itself is sent, so no memory is set aside."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        index: int,
        indices: Sequence[int],
        members: Sequence[Parameter],
        names: Sequence[str],
    ):
        super().__init__(index, indices, members, names)
        self.group = group
        self.eager, self.batched = [True], []

    def allocate(self) -> None:
        """Begin without a gradient."""
        self.flat = self.zeros()

    def zeros(self) -> Tensor:
        """Return a gradient without rows, in an embedding's form, for a rank without any gradient to send."""
        member = self.members[0].detach()
        rows = torch.empty(1, 0, dtype=torch.long, device=member.device)
        return torch.sparse_coo_tensor(
            rows, member.new_empty(0, *member.shape[1:]), member.shape, check_invariants=False
        )

    def gather(self, places: Sequence[int], divisor: int | None) -> None:
        """Prepare a copy of the gradient to be sent, divided by ``divisor`` if one is given.

        Autograd lets a sparse gradient share its values with other gradients, so nothing is written into it.
        """
        if not places:
            return
        grad = self.members[0].grad
        if grad is not None and not grad.is_sparse:
            raise RuntimeError(
                f"parameter {self.names[0]!r}: expected a sparse gradient, as its module has sparse=True, "
                f"but got one with layout {grad.layout}"
            )
        if grad is None:
            self.flat = self.zeros()
        else:
            self.flat = grad.clone() if divisor is None else grad / divisor

    def launch(self, group: dist.ProcessGroup, memory: Tensor) -> dist.Work:
        """Start to sum, on the group for such sums."""
        return all_reduce(self.group if memory.is_sparse else group, memory)

    def scatter(self, mean: Tensor, untouched: Container[int] = ()) -> None:
        """Make ``mean`` (of the parameter's shape) the gradient, unless the parameter is ``untouched``."""
        if self.indices[0] not in untouched:
            self.members[0].grad = mean


def making_sparse(
    make: Callable[..., Bucket], sparse: Container[int], group: dist.ProcessGroup, device: torch.device
) -> Callable[..., Bucket]:
    """Return a function that makes a `SparseBucket` for a sparse parameter, and lets ``make`` make all others.

    Every rank must call it; the first call for a group blocks until all have.
    """
    make_sparse = functools.partial(SparseBucket, group_for_sparse_sums(group, device))

    def make_either(index: int, indices: Sequence[int], members: Sequence[Parameter], names: Sequence[str]) -> Bucket:
        return (make_sparse if id(members[0]) in sparse else make)(index, indices, members, names)

    return make_either


def group_for_sparse_sums(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return a Gloo group with one thread over the ranks of ``group``, always the same one.

    Every rank must call it; the first call blocks until all have. Returns ``group`` itself if another backend reduces
    tensors on ``device``, or if it is written in Python, has one thread already, or has no store in which ranks could
    meet.
    """
    if group in _opened:
        return _opened[group]
    store = store_of(group) if type(group) is dist.ProcessGroup else None
    if store is None:
        return group
    backend: Any = group._get_backend(device)
    backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    if not isinstance(backend, ProcessGroupGloo):
        return group
    settings: Any = backend.options
    if settings._threads == 1:
        return group
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub calls it Options
    options._devices, options._timeout, options._threads = settings._devices, settings._timeout, 1
    _opened[group] = ProcessGroupGloo(PrefixStore("ddp_core/sparse", store), group.rank(), group.size(), options)
    return _opened[group]
