"""What `TwoHop` needs of a code for blocks of elements."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """A code for blocks of `block` elements. What it loses must be smaller than the block, in the Euclidean norm."""

    block: int
    """Larger: fewer scales are sent, and each suits its elements less."""

    @abstractmethod
    def encode(self, blocks: Tensor) -> Sequence[Tensor]:
        """Return the code of blocks [B, block]: tensors [B, ...] of any dtypes.

        Those of a floating-point dtype, the scales, must not be finite for a block that is not.
        """

    @abstractmethod
    def decode(self, code: Sequence[Tensor]) -> Tensor:
        """Return blocks [B, block], in fp32 at least."""

    @abstractmethod
    def relative_error(self) -> float:
        """Return the largest |block - decoded|² / |block|²."""
