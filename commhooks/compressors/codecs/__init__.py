"""Codes for `TwoHop`: blocks of elements in few bits."""

from commhooks.compressors.codecs.codec import Codec
from commhooks.compressors.codecs.int4 import Int4
from commhooks.compressors.codecs.sign import Sign

__all__ = ["Codec", "Int4", "Sign"]
