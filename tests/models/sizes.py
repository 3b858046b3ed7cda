"""The bytes that a rank passes to collectives in a round, counted from the papers and the layout of messages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.cases import Formula, LowRankBytes, TwoHopBytes
from tests.formulas_sparse import GatheredBytes
from tests.models.kinds import Kind

RANK, BLOCK, RATIO = 2, 128, 0.05
COMPRESSORS = {"PowerSGD": f"powersgd:rank={RANK}", "int8": f"int8:block={BLOCK}", "top-k": f"top-k:ratio={RATIO}"}
ORDER, FLAG = 32, 4
"""What compares the order of collectives before each of a channel, and a number that tells of something unusual."""


def payload_of(kind: Kind, way: str, compressor: str, model: nn.Module, ranks: int) -> int:
    """Return the bytes of all trained parameters in one round: in a step, or in one of DiLoCo's averages."""
    if way == "FSDP2":
        modules = [*model.blocks]  # type: ignore[misc]  # each kind has blocks
        inner = {id(one) for module in modules for one in module.parameters()}
        units = [[*module.parameters()] for module in modules] + [
            [one for one in model.parameters() if id(one) not in inner]
        ]
        return sum(_of_shards(compressor, [one for one in unit if one.requires_grad], ranks) for unit in units)
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    formulas: dict[str, Formula] = {
        "PowerSGD": LowRankBytes(rank=RANK),
        "int8": TwoHopBytes(block=BLOCK, bits=8, names=tuple(named)),
        "top-k": GatheredBytes(ratio=RATIO),
    }
    tells_unused = not kind.uses_all and "dd" in way.lower()
    return formulas[compressor](list(named.values()), 0, ranks) + FLAG * len(named) * tells_unused


def _of_shards(compressor: str, parameters: Sequence[Tensor], ranks: int) -> int:
    """Return the bytes of a module's rows, one of shards for each rank, with a flag for each and the order."""
    chunks = [torch.empty(-(-one.shape[0] // ranks) * math.prod(one.shape[1:]), device="meta") for one in parameters]
    if compressor == "int8":
        row = sum(one.numel() // BLOCK * (BLOCK + 4) + one.numel() % BLOCK * 4 for one in chunks)
    else:
        row = GatheredBytes(ratio=RATIO)(chunks, 0, ranks)
    return ranks * (row + FLAG) + ORDER
