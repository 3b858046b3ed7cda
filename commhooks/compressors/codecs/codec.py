"""The interface of a code for blocks of elements, as used by `TwoHop`."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from commhooks.devices import runs_later
from commhooks.language.memory import surely
from commhooks.language.settings import check_settings, refusal, setting
from commhooks.language.text import spelled
from commhooks.tensors import smallest

_SMALL = 2.0**-64
"""Scales below this have no reciprocal that is safe in fp32."""


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

    @abstractmethod
    def decode(self, code: Sequence[Tensor]) -> Tensor:
        """Return blocks [B, block], in fp32 at least, in newly allocated memory."""

    def decode_into(self, code: Sequence[Tensor], blocks: Tensor) -> Tensor:
        """Decode into memory [B, block] and return it; override it to write `decode`'s numbers in fewer passes."""
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


def scales_of(largest: Tensor, levels: float) -> Tensor:
    """Return nonzero scales, in units of which no block's largest magnitude exceeds `levels`.

    A subnormal scale may be up to a third too small; the block's largest magnitude is then cut.
    """
    return (largest / levels).clamp_(min=smallest(largest.dtype))


def in_units_of(scales: Tensor, blocks: Tensor) -> Tensor:
    """Return blocks [B, n] times the reciprocals of their scales [B, 1], in new memory.

    The reciprocal of the smallest scales would be inf. Their blocks are multiplied by a power of two first, and so are
    the scales, which changes no digit.
    """
    if not runs_later(scales) and surely(scales.amin() >= _SMALL):
        return blocks * scales.reciprocal()
    up = (scales < _SMALL).mul(1 / _SMALL).clamp_(min=1).to(scales.dtype)  # `where` would make tensors of both numbers
    return (blocks * up).mul_((scales * up).reciprocal_())
