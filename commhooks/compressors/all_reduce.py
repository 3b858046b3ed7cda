"""All-reduce: the plain mean, with nothing compressed.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
Idea: every rank divides its gradient by the number of ranks, and the sum over ranks is the mean.
Bytes on the wire: those of the gradient. Weakness: those are many.
A sparse gradient's rows are gathered from every rank and added up here: see `sparse_mean`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commhooks.compressor import BucketView, Compressor, Context, Exchange, Result
from commhooks.errors import GradientError
from commhooks.requests import AllGather, AllReduce


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduceMean(Compressor):
    """Average the gradient as it is: one collective a bucket. Takes complex and sparse gradients (three) too."""

    def takes(self, gradient: Tensor) -> bool:
        """Return True: sparse and complex gradients are fine too."""
        return True

    def remembers(self, step: int) -> bool:
        """Return False: no state is kept."""
        return False

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Ask for the mean of the bucket's memory."""
        if bucket.memory.is_sparse:
            return (yield from sparse_mean(bucket.memory, context))
        mean = yield AllReduce(bucket.memory, average=True, last=True, layout=bucket.layout)
        return Result(mean)


def sparse_mean(gradient: Tensor, context: Context) -> Exchange:
    """Return the mean of sparse gradients whose numbers of rows differ, by gathering counts, then indices, then values.

    Gloo has a sum of sparse tensors of its own, which corrupts the heap when two are under way: PyTorch 2.13 writes the
    name of what ended last from two threads at once, and the name of this operation alone is too long to lie in place.

    The gradient is only read: autograd lets its values share memory with gradients that are still on their way through
    the backward pass. Raises `GradientError`, on every rank, if ranks differ in what is an index and what a value.
    """
    own = (gradient / context.world_size).coalesce()
    form = torch.tensor([own._nnz(), own.sparse_dim()], device=own.device)
    forms = (yield AllGather(form)).tolist()
    most = max(rows for rows, _ in forms)
    sparse_dims = {dims for rows, dims in forms if rows} or {own.sparse_dim()}
    if len(sparse_dims) > 1:
        raise GradientError(f"ranks bring sparse gradients with {forms} (rows, sparse dimensions): make these alike.")
    (sparse_dim,) = sparse_dims
    indices = own.indices().new_zeros(most, sparse_dim)
    values = own.values().new_zeros(most, *own.shape[sparse_dim:])
    if own._nnz():
        indices[: own._nnz()] = own.indices().t()
        values[: own._nnz()] = own.values()
    all_indices = yield AllGather(indices)
    all_values = yield AllGather(values, last=True)
    mean = torch.zeros_like(own)
    for (rows, _), index, value in zip(forms, all_indices, all_values, strict=True):
        mean += torch.sparse_coo_tensor(index[:rows].t(), value[:rows], mean.shape, check_invariants=False)
    return Result(mean.coalesce())
