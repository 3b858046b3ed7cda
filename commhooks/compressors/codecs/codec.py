"""What `TwoHop` needs of a code for blocks of elements."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from commhooks.errors import SettingsError
from commhooks.language.spelling import spelled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """A code for blocks of `block` elements.

    A code of zero bytes, which fills up messages, must decode to something finite.
    """

    block: int
    """Larger: fewer scales are sent, and each suits its elements less."""

    def __str__(self) -> str:
        """Return what `make_compressor` reads back inside a compressor."""
        return spelled(self)

    def check_block(self, multiple_of: int = 1) -> None:
        """Raise `SettingsError` for a size of blocks that fills no whole bytes or groups."""
        is_whole = isinstance(self.block, int) and not isinstance(self.block, bool)
        if not is_whole or self.block < 1 or self.block % multiple_of:
            what = f"a multiple of {multiple_of}" if multiple_of > 1 else "an integer of at least 1"
            raise SettingsError(f"{type(self).__name__}(block={self.block!r}): block must be {what}.")

    @property
    def draws(self) -> bool:
        """Whether `encode` uses random numbers."""
        return False

    @property
    def is_unbiased(self) -> bool:
        """Whether a block is the expectation of what is decoded."""
        return False

    @property
    def shows_non_finite(self) -> bool:
        """Whether `evidence` is inf or NaN for a block that is; if not, one element more travels for that."""
        return True

    @abstractmethod
    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        """Return the code of blocks [B, block]: tensors [B, ...] of any dtypes.

        `noise` is uniform in [0, 1) and of the blocks' shape; it is empty unless the codec `draws`.
        """

    @abstractmethod
    def decode(self, code: Sequence[Tensor]) -> Tensor:
        """Return blocks [B, block], in fp32 at least, in memory of their own."""

    def evidence(self, code: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what of a code is not finite for a block that is not: what is of a floating-point dtype, the scales.

        Where the scales travel as something else, decode them.
        """
        return [payload for payload in code if payload.is_floating_point()]

    @abstractmethod
    def relative_error(self) -> float:
        """Return the largest |block - decoded|² / |block|², or its expectation if the codec `draws`."""
