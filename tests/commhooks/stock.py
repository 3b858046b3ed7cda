"""PyTorch's PowerSGD hook beside ours: our state in the layout that theirs keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock

from commhooks.compressors import PowerSGD
from commhooks.language import Place, Slot
from commhooks.state.table import StateTable


def compressed(parameters: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Return what both hooks compress, in PyTorch's order: matrices of one shape lie side by side."""
    matrices = [p for p in parameters if PowerSGD(rank=rank).compresses(p)]
    shapes = list(dict.fromkeys(_matrix_shape(p) for p in matrices))
    return sorted(matrices, key=lambda p: shapes.index(_matrix_shape(p)))


def draw_basis(ours: StateTable, parameters: Sequence[Tensor], rank: int, seed: int) -> None:
    """Let our hook start from a random Q."""
    generator = torch.Generator().manual_seed(seed)
    matrices = compressed(parameters, rank)
    for parameter in matrices:
        slot = Slot(parameter, parameter.detach().reshape(-1), ours.of(parameter))
        ours.lay_out_entries(slot, PowerSGD(rank=rank).state(Place(slot.name, parameter, 1)))
        n, m = _matrix_shape(parameter)
        Q = torch.randn(min(n, m, rank), m, generator=generator, dtype=parameter.dtype)
        ours.of(parameter)["Q"].copy_(Q)


def hand_over(ours: StateTable, theirs: stock.PowerSGDState, parameters: Sequence[Tensor]) -> None:
    """Copy our Q and this rank's residual to where PyTorch's hook keeps its own (there Q is m by r)."""
    matrices = compressed(parameters, theirs.matrix_approximation_rank)
    bases = [ours.of(p)["Q"] for p in matrices]
    rows = sum(Q.shape[0] * p.shape[0] for Q, p in zip(bases, matrices, strict=True))
    none = {p: torch.zeros(p.numel(), dtype=p.dtype) for p in parameters}
    theirs.q_memory_dict[0] = torch.cat([Q.t().reshape(-1) for Q in bases])
    theirs.p_memory_dict[0] = torch.empty(rows, dtype=bases[0].dtype)
    theirs.error_dict[0] = torch.cat([ours.of(p).tensors.get("residual", none[p]) for p in parameters])
    theirs.iter = max(theirs.iter, theirs.start_powerSGD_iter)


def _matrix_shape(parameter: Tensor) -> tuple[int, int]:
    return parameter.shape[0], parameter[0].numel()
