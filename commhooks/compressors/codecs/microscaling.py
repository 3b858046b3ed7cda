"""MXFP8 and MXFP4: floating-point numbers of 8 or 4 bits, and a power of two for each group of 32.

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023, sections 5 and 6.3.
Idea: a group's scale is the power of two that brings its largest magnitude to the format's largest exponent; its
elements are divided by it and rounded to E4M3 or E2M1 numbers; larger values become the largest number.
Bytes: 1 per element and 1 per group, or 1/2 and 1. Contractive, biased: at most 1/64 (MXFP8) or 0.11 (MXFP4) is lost.
Weakness: since scales are powers of two, a largest element may be cut by up to an eighth (MXFP8) or a quarter (MXFP4).
The standard's smallest scale is 2**-127, so elements of up to 2**-137 (MXFP8) or 2**-129 (MXFP4) become 0; with error
feedback they are sent once they have added up. On a CPU, a step of eager passes of MXFP4 takes as long as 34 to 42
copies of the gradient, as PyTorch has no cast to it; of compiled ones, 6 to 7.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.compressors.codecs.fp8 import from_e4m3, to_e4m3
from commhooks.packing import pack_small_floats, unpack_small_floats

GROUP = 32
_BIAS = 127
_EXPONENT = 255 << 23
"""The bits of fp32's exponent."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microscaled(Codec):
    """Groups of 32 elements with a shared exponent; a block consists of several groups."""

    block: int = 128

    multiple = GROUP

    @property
    @abstractmethod
    def largest_exponent(self) -> int:
        """The exponent of the largest number in the format."""

    @abstractmethod
    def to_bytes(self, blocks: Tensor, magnitudes: Tensor, inverses: Tensor) -> Tensor:
        """Return the nearest elements of blocks [B, block] divided by their scales, as bytes.

        `magnitudes` are the blocks', and may be overwritten; `inverses`, [B, block/32, 1], are one over each scale.
        """

    @abstractmethod
    def from_bytes(self, packed: Tensor, blocks: Tensor) -> Tensor:
        """Write the elements to blocks [B, block], and return these."""

    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        """Return the groups' exponents as bytes [B, block/32], 255 for inf and NaN, and the elements' bytes.

        Without its fraction bits, the largest magnitude is the power of two below it, and NaN is inf.
        """
        blocks = blocks.float()
        magnitudes = blocks.abs()
        largest = magnitudes.view(torch.int32).unflatten(1, (-1, GROUP)).amax(2).bitwise_and_(_EXPONENT)
        scales = largest.view(torch.float32).mul_(2.0**-self.largest_exponent).clamp_(min=2.0**-_BIAS)
        exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
        return exponents, self.to_bytes(blocks, magnitudes, scales.reciprocal_().unsqueeze(2))

    def decode_into(self, code: Sequence[Tensor], blocks: Tensor) -> Tensor:
        """Write the elements times their groups' powers of two."""
        exponents, packed = code
        self.from_bytes(packed, blocks).unflatten(1, (-1, GROUP)).mul_(_powers(exponents).unsqueeze(2))
        return blocks

    def evidence(self, code: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the groups' scales: inf if a group is not finite."""
        return [_powers(code[0])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8(Microscaled):
    """E4M3 elements, one per byte."""

    largest_exponent = 8  # of 448

    def to_bytes(self, blocks: Tensor, magnitudes: Tensor, inverses: Tensor) -> Tensor:
        """Return the nearest E4M3 numbers as bytes."""
        return to_e4m3((blocks.unflatten(1, (-1, GROUP)) * inverses).flatten(1))

    def from_bytes(self, packed: Tensor, blocks: Tensor) -> Tensor:
        """Write the elements."""
        return from_e4m3(packed, blocks)

    def relative_error(self) -> float:
        """Return 1/64, as 512 becomes 448, plus the loss of small numbers: at most 2**-10 each, if one is 256."""
        return 2.0**-6 + GROUP * (2.0**-10 / 256) ** 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP4(Microscaled):
    """E2M1 elements, packed two to a byte."""

    compiled: ClassVar[tuple[str, int] | None] = "mxfp4", 0
    largest_exponent = 2  # of 6

    def to_bytes(self, blocks: Tensor, magnitudes: Tensor, inverses: Tensor) -> Tensor:
        """Return the nearest of 0, 1/2, 1, 3/2, 2, 3, 4 and 6, with the sign as the fourth bit.

        A number from the power of two p to 2p, or from 0 to 2 with p = 1, is a multiple of p/2. fp32's sum with p·2**22
        is rounded to one, with ties towards even as the standard requires, and its last bits count how many: p + 1/2 is
        the third. p is as many bits up as powers of two are apart in codes: twice its exponent.
        """
        x = magnitudes.unflatten(1, (-1, GROUP)).mul_(inverses).flatten(1)
        p = x.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32).clamp_(min=1)
        bits = x.add_(p, alpha=2.0**22).view(torch.int32)
        codes = torch.add(bits, bits >> 22).to(torch.int8)
        return pack_small_floats(codes.sub_(2 * (_BIAS + 22) % 256).clamp_(max=7), blocks)

    def from_bytes(self, packed: Tensor, blocks: Tensor) -> Tensor:
        """Write the elements."""
        return unpack_small_floats(packed, 2, blocks)

    def relative_error(self) -> float:
        """Return 47/431 = 0.11: the worst group has one 5, which becomes 4, and 31 times 1/4, which become 0.

        No other element contributes as much to the error e², less 0.11·x², as these: for 1/4, e = x, and nothing from
        1/2 on comes close; among largest elements, from 4 to 8, 5 is the worst, ahead of 4 (e = 0) and 8 (e = 2).
        """
        return (1 + 31 / 16) / (25 + 31 / 16)


def _powers(exponents: Tensor) -> Tensor:
    """Return the powers of two of exponent bytes in fp32: its own bits, with 2**-127 for 0; inf for 255."""
    return (exponents.to(torch.int32) << 23).clamp_(min=1 << 22).view(torch.float32)
