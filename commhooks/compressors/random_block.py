"""Random block: a contiguous range of each parameter's gradient, from a random start.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019, where it is compared with others.
Idea: all ranks draw the same start; the k elements from there on, wrapping around at the end, are summed. It is
random-k with adjacent indices, which memory serves fastest.
Bytes on the wire: 4 for each of k elements, and 4 for each parameter. Biased with ω = 1 - k/n, or unbiased with ω =
n/k - 1, for any size, on average over the starts. Weakness: neighbouring elements are similar, so a block says less
about the whole. With the default ratio training diverges under SGD with momentum 0.9, as with `RandomK`; ratio=0.1,
`ErrorFeedback(decay=0.9)`, or no momentum works.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commhooks.compressors.sparse.shared_places import SharedPlaces
from commhooks.language.randomness import stable_seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomBlock(SharedPlaces):
    """A compressor that averages a random range of each parameter's elements.

    It has error feedback, unless it is `unbiased` or inside `WithoutFeedback`.
    """

    def places(self, name: str, gradient: Tensor, step: int) -> Tensor:
        """Draw the start of the range, and return its indices."""
        elements = gradient.numel()
        start = stable_seed("random-block", self.seed, name, step) % elements
        return torch.arange(start, start + self.k(elements), dtype=torch.int64, device=gradient.device).remainder_(
            elements
        )
