"""Threshold: elements that have reached a fixed magnitude, in a message of fixed size.

Source: Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015, which sends ±τ
for each; with the elements themselves, Sahu et al., "Rethinking Gradient Sparsification as Total Error Minimization",
NeurIPS 2021.
Idea: an element below the threshold τ waits in the residual until it has reached it. All ranks must send the same
number of elements, and comparing counts first would make the host wait for the GPU, so the k largest elements of each
parameter are sent, with zeros in place of those below τ.
Bytes on the wire: the same as top-k's, whatever τ is. Biased: for n elements at most 1 - k/n of |input|² is left, as
for top-k, or n·τ² if that is more, whatever the size. Weakness: the same bytes are sent even if nothing is large, and
the largest τ that training tolerates must be found by trial. It takes as long as top-k.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from torch import Tensor

from commhooks.compressors.sparse.indices import Indices, largest_error
from commhooks.compressors.sparse.own_places import OwnPlaces
from commhooks.language import Context, Loss, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threshold(OwnPlaces):
    """A compressor that sends the elements that reach `threshold`: one collective per bucket.

    It has error feedback, unless it is inside `WithoutFeedback`.
    """

    threshold: float = setting(above=0, below=math.inf)
    """τ, in units of the gradient without its loss scale. Higher: elements wait longer, and fewer are sent at once."""
    capacity: float = setting(0.01, above=0, most=1)
    """The fraction of a parameter's elements that a message holds. Lower: smaller messages, but more elements wait."""
    indices: Indices = "auto"
    """The coding of indices, and the elements that the largest are chosen from; see `TopK`."""

    def loss(self, name: str, parameter: Tensor) -> Loss:
        """Return the loss of top-k; an element of the residual that waits below τ is bounded by it."""
        return Loss(largest_error(self.indices, parameter.numel(), self.capacity))

    @property
    def exempt(self) -> Mapping[str, str]:
        """Name the law of losses."""
        return {"loss": "what is below the threshold is left, and does not grow"}

    @property
    def most(self) -> tuple[Indices, float]:
        """The coding of indices, and the fraction of the elements that a message holds."""
        return self.indices, self.capacity

    def least(self, context: Context) -> float | Tensor:
        """Return the threshold, times the loss scale."""
        return self.threshold * context.loss_scale
