"""The interface of a code for blocks of elements, as used by `TwoHop`."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from commhooks.errors import CompressorError
from commhooks.language.settings import check_settings, refusal, setting
from commhooks.language.text import spelled
from commhooks.tensors import computing_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """A code for blocks of `block` elements.

    Messages are padded with code bytes of zero, which must decode to something finite.
    """

    block: int = setting(least=1)
    """Larger: fewer scales are sent, but each suits its elements less well."""

    def __str__(self) -> str:
        """Return text that `make_compressor` can parse inside a compressor."""
        return str(spelled(self))

    def __post_init__(self) -> None:
        check_settings(self)
        kind = type(self)
        if kind.decode is Codec.decode and kind.decode_into is Codec.decode_into:
            raise CompressorError(f"{kind.__name__} has no way back: define decode(code) or decode_into(code, blocks).")
        if self.block % self.multiple:
            raise refusal(self, "block", f"must be a multiple of {self.multiple}")

    @property
    def multiple(self) -> int:
        """The number that `block` must be a multiple of: the elements that fill whole bytes, or groups."""
        return 1

    @property
    def draws(self) -> bool:
        """True if `encode` uses random numbers."""
        return False

    @property
    def compiled(self) -> tuple[str, int] | None:
        """The kind of its compiled passes and its largest integer (0: it has none); None: it has only eager ones."""
        return None

    @property
    def is_unbiased(self) -> bool:
        """True if the expectation of the decoded block is the block itself."""
        return False

    @property
    def shows_non_finite(self) -> bool:
        """True if `evidence` shows an inf or NaN in a block; if not, an extra element is sent for that."""
        return True

    @abstractmethod
    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        """Return the code of blocks [B, block]: tensors [B, ...] of any dtypes.

        `noise` is uniform in [0, 1), in fp32, and has the shape of `blocks`; it is empty unless the codec `draws`.
        `TwoHop` passes multiples of 2**-17 that are pairwise independent, see `language.noise.Noise`; neither 0 nor 1.
        """

    def decode(self, code: Sequence[Tensor]) -> Tensor:
        """Return blocks [B, block], in fp32 at least, in newly allocated memory; define this or `decode_into`."""
        return self.decode_into(code, code[0].new_empty(len(code[0]), self.block, dtype=computing_dtype(code[0].dtype)))

    def decode_into(self, code: Sequence[Tensor], blocks: Tensor) -> Tensor:
        """Decode into memory [B, block] and return it; it takes fewer passes than to copy what `decode` returns."""
        return blocks.copy_(self.decode(code))

    def evidence(self, code: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors of a code that are not finite if a block is not: the floating-point ones, its scales.

        Override it if the scales are sent in another form, and decode them.
        """
        return [payload for payload in code if payload.is_floating_point()]

    @abstractmethod
    def relative_error(self) -> float:
        """Return the largest |block - decoded|² / |block|², or its expectation if the codec `draws`."""

    def contraction(self) -> float:
        """Return `relative_error`, or the same in another norm if that is smaller; error feedback needs less than 1."""
        return self.relative_error()
