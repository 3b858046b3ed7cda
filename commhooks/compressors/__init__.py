"""The registry of compressors: one line for each, so that a name and settings are enough to make one."""

from __future__ import annotations

import functools

import torch

from commhooks.compressors.affine import Affine
from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.compressors.cast import Cast
from commhooks.compressors.codecs import (
    E3M0,
    FP8,
    MXFP4,
    MXFP8,
    QSGD,
    Codebook,
    Codec,
    Half,
    Int4,
    Int8,
    Natural,
    Sign,
    TernGrad,
    Vote,
)
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
from commhooks.language.registry import COMPRESSORS, Registered

__all__ = [
    "AdaptiveRank",
    "Affine",
    "AllReduceMean",
    "COMPRESSORS",
    "Cast",
    "Codebook",
    "Codec",
    "DGC",
    "DeMo",
    "E3M0",
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


_two_hop_unfed = functools.partial(TwoHop.of, server_feedback=False)
"""`TwoHop.of` without server feedback, for codes that are exactly or nearly right on average: feedback gains little."""

COMPRESSORS |= {
    "adaptive-rank": Registered(AdaptiveRank, feeds_back=True),
    "affine": Registered(Affine),
    "all-reduce": Registered(AllReduceMean),
    "bf16": Registered(functools.partial(Cast, dtype=torch.bfloat16)),
    "bf16-two-hop": Registered(functools.partial(_two_hop_unfed, Half, dtype=torch.bfloat16)),
    "codebook": Registered(functools.partial(TwoHop.of, Codebook), feeds_back=True),
    "demo": Registered(DeMo, feeds_back=True, decay=0.999),
    "dgc": Registered(DGC),
    "distro": Registered(functools.partial(DeMo, k=4, one_bit=True, sign=True), feeds_back=True, decay=0.999),
    "e3m0": Registered(functools.partial(TwoHop.of, E3M0), feeds_back=True),
    "fp16": Registered(functools.partial(Cast, dtype=torch.float16)),
    "fp16-two-hop": Registered(functools.partial(_two_hop_unfed, Half, dtype=torch.float16)),
    "fp8": Registered(functools.partial(TwoHop.of, FP8), feeds_back=True),
    "int4": Registered(functools.partial(TwoHop.of, Int4), feeds_back=True),
    "int8": Registered(functools.partial(TwoHop.of, Int8), feeds_back=True),
    "mxfp4": Registered(functools.partial(TwoHop.of, MXFP4), feeds_back=True),
    "mxfp8": Registered(functools.partial(TwoHop.of, MXFP8), feeds_back=True),
    "natural": Registered(functools.partial(_two_hop_unfed, Natural)),
    "noop": Registered(NoOp),
    "powersgd": Registered(PowerSGD, feeds_back=True),
    "powersgd-unbiased": Registered(UnbiasedPowerSGD),
    "qsgd": Registered(functools.partial(_two_hop_unfed, QSGD)),
    "random-block": Registered(RandomBlock, feeds_back=True),
    "random-k": Registered(RandomK, feeds_back=True),
    "sign": Registered(functools.partial(TwoHop.of, Sign), feeds_back=True),
    "signum": Registered(Signum),
    "sparse-loco": Registered(SparseLoCo, feeds_back=True, decay=0.95),
    "svd": Registered(SVD, feeds_back=True),
    "terngrad": Registered(functools.partial(_two_hop_unfed, TernGrad)),
    "threshold": Registered(Threshold, feeds_back=True),
    "top-k": Registered(TopK, feeds_back=True),
}
