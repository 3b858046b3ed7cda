"""The registry of compressors: one line for each, so that a name and settings are enough to make one."""

from __future__ import annotations

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
from commhooks.language.text import COMPRESSORS, Registered

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


_UNFED = {"server_feedback": False}
"""For codes that are exactly or nearly right on average: feedback gains little."""

COMPRESSORS |= {
    "adaptive-rank": Registered(AdaptiveRank, feeds_back=True),
    "affine": Registered(Affine),
    "all-reduce": Registered(AllReduceMean),
    "bf16": Registered(Cast, {"dtype": torch.bfloat16}),
    "bf16-two-hop": Registered(TwoHop, _UNFED | {"dtype": torch.bfloat16}, codec=Half),
    "codebook": Registered(TwoHop, codec=Codebook, feeds_back=True),
    "demo": Registered(DeMo, feeds_back=True, decay=0.999),
    "dgc": Registered(DGC),
    "distro": Registered(DeMo, {"k": 4, "one_bit": True, "sign": True}, feeds_back=True, decay=0.999),
    "e3m0": Registered(TwoHop, codec=E3M0, feeds_back=True),
    "fp16": Registered(Cast, {"dtype": torch.float16}),
    "fp16-two-hop": Registered(TwoHop, _UNFED | {"dtype": torch.float16}, codec=Half),
    "fp8": Registered(TwoHop, codec=FP8, feeds_back=True),
    "int4": Registered(TwoHop, codec=Int4, feeds_back=True),
    "int8": Registered(TwoHop, codec=Int8, feeds_back=True),
    "mxfp4": Registered(TwoHop, codec=MXFP4, feeds_back=True),
    "mxfp8": Registered(TwoHop, codec=MXFP8, feeds_back=True),
    "natural": Registered(TwoHop, _UNFED, codec=Natural),
    "noop": Registered(NoOp),
    "powersgd": Registered(PowerSGD, feeds_back=True),
    "powersgd-unbiased": Registered(UnbiasedPowerSGD),
    "qsgd": Registered(TwoHop, _UNFED, codec=QSGD),
    "random-block": Registered(RandomBlock, feeds_back=True),
    "random-k": Registered(RandomK, feeds_back=True),
    "sign": Registered(TwoHop, codec=Sign, feeds_back=True),
    "signum": Registered(Signum),
    "sparse-loco": Registered(SparseLoCo, feeds_back=True, decay=0.95),
    "svd": Registered(SVD, feeds_back=True),
    "terngrad": Registered(TwoHop, _UNFED, codec=TernGrad),
    "threshold": Registered(Threshold, feeds_back=True),
    "top-k": Registered(TopK, feeds_back=True),
}
