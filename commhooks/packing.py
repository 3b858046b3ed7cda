"""Numbers of few bits as bytes, for codecs and compressors: integers, signs, and the scales that blocks are divided by.

In a codec each block is packed by itself, so that its code is a row; `pack_integers` packs a whole tensor, such as the
indices of a message.
"""

from commhooks.compressors.bits import pack as pack_integers
from commhooks.compressors.bits import packed_bytes
from commhooks.compressors.bits import unpack as unpack_integers
from commhooks.compressors.codecs.codec import in_units_of, scales_of
from commhooks.compressors.codecs.packing import pack as pack_blocks
from commhooks.compressors.codecs.packing import pack_signs, unpack_signs
from commhooks.compressors.codecs.packing import unpack_into as unpack_blocks_into

__all__ = [
    "in_units_of",
    "pack_blocks",
    "pack_integers",
    "pack_signs",
    "packed_bytes",
    "scales_of",
    "unpack_blocks_into",
    "unpack_integers",
    "unpack_signs",
]
