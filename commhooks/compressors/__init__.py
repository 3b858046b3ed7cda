"""The registry of compressors: one line for each, so that a name and settings are enough to make one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from commhooks.compressors.affine import Affine
from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.compressors.cast import Cast
from commhooks.compressors.codecs import FP8, MXFP4, MXFP8, QSGD, Codec, Half, Int4, Int8, Natural, Sign, TernGrad, Vote
from commhooks.compressors.demo import DeMo
from commhooks.compressors.dgc import DGC
from commhooks.compressors.noop import NoOp
from commhooks.compressors.powersgd import AdaptiveRank, PowerSGD, UnbiasedPowerSGD
from commhooks.compressors.random_block import RandomBlock
from commhooks.compressors.random_k import RandomK
from commhooks.compressors.signum import Signum
from commhooks.compressors.sparse_loco import SparseLoCo
from commhooks.compressors.svd import SVD
from commhooks.compressors.threshold import Threshold
from commhooks.compressors.top_k import TopK
from commhooks.compressors.two_hop import TwoHop
from commhooks.language.compressor import Compressor

__all__ = [
    "AdaptiveRank",
    "Affine",
    "AllReduceMean",
    "COMPRESSORS",
    "Cast",
    "Codec",
    "DGC",
    "DeMo",
    "FP8",
    "Half",
    "Int4",
    "Int8",
    "MXFP4",
    "MXFP8",
    "Natural",
    "NoOp",
    "PowerSGD",
    "QSGD",
    "RandomBlock",
    "RandomK",
    "Registered",
    "SVD",
    "Sign",
    "Signum",
    "SparseLoCo",
    "TernGrad",
    "Threshold",
    "TopK",
    "TwoHop",
    "UnbiasedPowerSGD",
    "Vote",
]


class Registered(NamedTuple):
    """How to make the compressor of some name."""

    make: Callable[..., Compressor]
    feeds_back: bool = False
    """Whether `make_compressor` wraps it in `ErrorFeedback` by default, if it takes feedback."""
    decay: float = 1.0
    """The default decay of that `ErrorFeedback`."""


def _two_hop(
    codec: Callable[..., Codec],
    *,
    server_feedback: bool = True,
    damping: float | None = None,
    seed: int = 0,
    **settings: Any,
) -> Compressor:
    return TwoHop(codec=codec(**settings), server_feedback=server_feedback, damping=damping, seed=seed)


_two_hop_unfed = functools.partial(_two_hop, server_feedback=False)
"""For codes that are exactly or nearly right on average: error feedback gains little."""

COMPRESSORS: dict[str, Registered] = {
    "adaptive-rank": Registered(AdaptiveRank, feeds_back=True),
    "affine": Registered(Affine),
    "all-reduce": Registered(AllReduceMean),
    "bf16": Registered(functools.partial(Cast, dtype=torch.bfloat16)),
    "bf16-two-hop": Registered(functools.partial(_two_hop_unfed, Half, dtype=torch.bfloat16)),
    "demo": Registered(DeMo, feeds_back=True, decay=0.999),
    "dgc": Registered(DGC),
    "distro": Registered(functools.partial(DeMo, k=4, one_bit=True, sign=True), feeds_back=True, decay=0.999),
    "fp16": Registered(functools.partial(Cast, dtype=torch.float16)),
    "fp16-two-hop": Registered(functools.partial(_two_hop_unfed, Half, dtype=torch.float16)),
    "fp8": Registered(functools.partial(_two_hop, FP8), feeds_back=True),
    "int4": Registered(functools.partial(_two_hop, Int4), feeds_back=True),
    "int8": Registered(functools.partial(_two_hop, Int8), feeds_back=True),
    "mxfp4": Registered(functools.partial(_two_hop, MXFP4), feeds_back=True),
    "mxfp8": Registered(functools.partial(_two_hop, MXFP8), feeds_back=True),
    "natural": Registered(functools.partial(_two_hop_unfed, Natural)),
    "noop": Registered(NoOp),
    "powersgd": Registered(PowerSGD, feeds_back=True),
    "powersgd-unbiased": Registered(UnbiasedPowerSGD),
    "qsgd": Registered(functools.partial(_two_hop_unfed, QSGD)),
    "random-block": Registered(RandomBlock, feeds_back=True),
    "random-k": Registered(RandomK, feeds_back=True),
    "sign": Registered(functools.partial(_two_hop, Sign), feeds_back=True),
    "signum": Registered(Signum),
    "sparse-loco": Registered(SparseLoCo, feeds_back=True, decay=0.95),
    "svd": Registered(SVD, feeds_back=True),
    "terngrad": Registered(functools.partial(_two_hop_unfed, TernGrad)),
    "threshold": Registered(Threshold, feeds_back=True),
    "top-k": Registered(TopK, feeds_back=True),
}
