"""PyTorch's PowerSGD hook, started from our random basis so that the two can be compared.

No postponed annotations here: PyTorch's DDP refuses a hook that has them.
"""

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock

import commhooks
from commhooks.randomness import stable_seed

RANDOM_SEED = 3

_positions: dict[Tensor, int] = {}
"""In which order parameters were first seen: what seeds a basis where nobody told the names."""


def stock_hook_from_our_basis(state: stock.PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Give PyTorch's hook our first Q, by laying it where the hook keeps a warm one (there Q is m by r)."""
    if state.iter == 0:
        _positions.update({parameter: position for position, parameter in enumerate(bucket.parameters())})
    if state.iter == state.start_powerSGD_iter and not state.p_memory_dict:
        r, bases, P_elements = state.matrix_approximation_rank, [], 0
        matrices = [p for p in bucket.parameters() if commhooks.PowerSGD(rank=r).compresses(p)]
        shapes = list(dict.fromkeys(p.shape for p in matrices))  # the hook lays matrices of one shape side by side
        for parameter in sorted(matrices, key=lambda p: shapes.index(p.shape)):
            n, m = parameter.shape
            seed = stable_seed("powersgd", RANDOM_SEED, f"#{_positions[parameter]}", r, m)
            basis = torch.randn(r, m, generator=torch.Generator().manual_seed(seed))
            bases.append(basis.double().t().reshape(-1))
            P_elements += n * r
        state.p_memory_dict[bucket.index()] = torch.empty(P_elements, dtype=torch.float64)
        state.q_memory_dict[bucket.index()] = torch.cat(bases)
    return stock.powerSGD_hook(state, bucket)
