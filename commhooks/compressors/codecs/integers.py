"""Int8 and int4: whole numbers from -127 to 127 or from -7 to 7, and one scale a block.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, with 4 bits as Markov et al., "CGX",
Middleware 2022, send gradients.
Idea: a block is divided by its largest magnitude over 127 (or 7), and rounded to whole numbers: down or up at random,
so that it is right on average, or to the nearest one, which is off by less and so better under error feedback.
Bytes: 1 an element and 4 a block, or 1/2 and 4. Stochastic: unbiased; of blocks of n elements and s levels at most
(√(1 + (n - 1)/s²) - 1)/2 is lost: 0.002 (int8) or 0.45 (int4) at 128. Nearest: 0.002 or 0.39, and biased.
Weakness: one large element makes the steps coarse for all of its block. On a processor to code and decode takes as long
as 17 to 55 copies of the memory, 7 to 20 if nothing is drawn.
"""

from __future__ import annotations

import dataclasses

from commhooks.compressors.codecs.uniform import Uniform
from commhooks.errors import SettingsError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Integers(Uniform):
    """Numbers of so many bits, with the largest magnitude as the largest number."""

    block: int = 128
    stochastic: bool = True
    """False: the nearest number. Less is lost, but not evenly: it wants error feedback."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.stochastic, bool):
            raise SettingsError(f"{type(self).__name__}(stochastic={self.stochastic!r}): stochastic must be a bool.")

    @property
    def draws(self) -> bool:
        """Whether rounding is stochastic."""
        return self.stochastic


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(Integers):
    """Numbers of 8 bits, and a 127th of the largest magnitude of each block."""

    @property
    def levels(self) -> int:
        """Return 127."""
        return 127


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4(Integers):
    """Numbers of 4 bits, packed two to a byte, and a seventh of the largest magnitude of each block."""

    @property
    def levels(self) -> int:
        """Return 7."""
        return 7
