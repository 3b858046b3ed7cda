"""The registry of compressors: one line for each, so that a name and settings are enough to make one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.compressors.cast import Cast
from commhooks.compressors.codecs import Codec, Int4, Sign
from commhooks.compressors.demo import DeMo
from commhooks.compressors.noop import NoOp
from commhooks.compressors.powersgd import AdaptiveRank, PowerSGD, UnbiasedPowerSGD
from commhooks.compressors.random_block import RandomBlock
from commhooks.compressors.random_k import RandomK
from commhooks.compressors.sparse_loco import SparseLoCo
from commhooks.compressors.svd import SVD
from commhooks.compressors.top_k import TopK
from commhooks.compressors.two_hop import TwoHop
from commhooks.language.compressor import Compressor

__all__ = [
    "AdaptiveRank",
    "AllReduceMean",
    "COMPRESSORS",
    "Cast",
    "Codec",
    "DeMo",
    "Int4",
    "NoOp",
    "PowerSGD",
    "RandomBlock",
    "RandomK",
    "Registered",
    "SVD",
    "Sign",
    "SparseLoCo",
    "TopK",
    "TwoHop",
    "UnbiasedPowerSGD",
]


class Registered(NamedTuple):
    """How a compressor of some name is made."""

    make: Callable[..., Compressor]
    feeds_back: bool = False
    """Whether `make_compressor` puts `ErrorFeedback` around it, if that takes it and it is not told otherwise."""
    decay: float = 1.0
    """Of that `ErrorFeedback`, unless told otherwise."""


def _two_hop(
    codec: Callable[..., Codec],
    *,
    server_feedback: bool = True,
    damping: float | None = None,
    seed: int = 0,
    **settings: Any,
) -> Compressor:
    return TwoHop(codec=codec(**settings), server_feedback=server_feedback, damping=damping, seed=seed)


COMPRESSORS: dict[str, Registered] = {
    "adaptive-rank": Registered(AdaptiveRank, feeds_back=True),
    "all-reduce": Registered(AllReduceMean),
    "bf16": Registered(functools.partial(Cast, dtype=torch.bfloat16)),
    "demo": Registered(DeMo, feeds_back=True, decay=0.999),
    "distro": Registered(functools.partial(DeMo, k=4, one_bit=True, sign=True), feeds_back=True, decay=0.999),
    "fp16": Registered(functools.partial(Cast, dtype=torch.float16)),
    "int4": Registered(functools.partial(_two_hop, Int4), feeds_back=True),
    "noop": Registered(NoOp),
    "powersgd": Registered(PowerSGD, feeds_back=True),
    "powersgd-unbiased": Registered(UnbiasedPowerSGD),
    "random-block": Registered(RandomBlock, feeds_back=True),
    "random-k": Registered(RandomK, feeds_back=True),
    "sign": Registered(functools.partial(_two_hop, Sign), feeds_back=True),
    "sparse-loco": Registered(SparseLoCo, feeds_back=True, decay=0.95),
    "svd": Registered(SVD, feeds_back=True),
    "top-k": Registered(TopK, feeds_back=True),
}
