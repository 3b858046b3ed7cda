"""The sum of sparse gradients, by gathering every rank's rows.

Gloo has such a sum of its own, which corrupts the heap when another collective ends at the same moment: two threads of
its process group write the name of what ended last without a lock, and of all names that DDP causes only this one's is
too long to lie in place (PyTorch 2.13; docs/guide/ddp_core.md). NCCL has none.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.collectives import all_gather, finish, start_all_gather


class SparseSum:
    """A sum under way: how many rows each rank brings travels at once, the rows themselves when it is waited for."""

    def __init__(self, group: dist.ProcessGroup, gradient: Tensor):
        self.group = group
        self.own = gradient.coalesce()
        form = torch.tensor([self.own._nnz(), self.own.sparse_dim()], device=gradient.device)
        self.work, self.forms = start_all_gather(group, form)

    def wait(self) -> Tensor:
        """Return the sum, coalesced; every rank must ask for it after the same collectives.

        Raises RuntimeError, on every rank, if ranks differ in which dimensions are sparse.
        """
        finish(self.work)
        forms = [form.tolist() for form in self.forms]
        sparse_dims = {dims for rows, dims in forms if rows} or {self.own.sparse_dim()}
        if len(sparse_dims) > 1:
            raise RuntimeError(f"ranks bring sparse gradients with {forms} [rows, sparse dimensions]: make these alike")
        (sparse_dim,) = sparse_dims
        most = max(rows for rows, _ in forms)
        indices = self.own.indices().new_zeros(most, sparse_dim)
        values = self.own.values().new_zeros(most, *self.own.shape[sparse_dim:])
        if self.own._nnz():
            indices[: self.own._nnz()] = self.own.indices().t()
            values[: self.own._nnz()] = self.own.values()
        all_indices, all_values = (all_gather(self.group, padded) for padded in (indices, values))
        total = torch.zeros_like(self.own)
        for (rows, _), index, value in zip(forms, all_indices, all_values, strict=True):
            total += torch.sparse_coo_tensor(index[:rows].t(), value[:rows], total.shape, check_invariants=False)
        return total.coalesce()
