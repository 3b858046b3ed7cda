"""Codes for `TwoHop`: blocks of elements in a few bits each."""

from commhooks.compressors.codecs.codebook import Codebook
from commhooks.compressors.codecs.codec import Codec
from commhooks.compressors.codecs.e3m0 import E3M0
from commhooks.compressors.codecs.fp8 import FP8
from commhooks.compressors.codecs.half import Half
from commhooks.compressors.codecs.integers import Int4, Int8
from commhooks.compressors.codecs.microscaling import MXFP4, MXFP8
from commhooks.compressors.codecs.natural import Natural
from commhooks.compressors.codecs.qsgd import QSGD
from commhooks.compressors.codecs.sign import Sign
from commhooks.compressors.codecs.terngrad import TernGrad
from commhooks.compressors.codecs.vote import Vote

__all__ = [
    "Codebook",
    "Codec",
    "E3M0",
    "FP8",
    "Half",
    "Int4",
    "Int8",
    "MXFP4",
    "MXFP8",
    "Natural",
    "QSGD",
    "Sign",
    "TernGrad",
    "Vote",
]
