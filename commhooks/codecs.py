"""Codes for `TwoHop`: blocks of elements in a few bits each. `Codec` is the base class of your own."""

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
