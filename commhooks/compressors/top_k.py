"""Top-k: the largest elements of each parameter's gradient, and their indices.

Source: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; with error feedback,
Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
Idea: few elements carry most of a gradient, so every rank sends its own k largest, and all ranks add them up.
Bytes on the wire: for each of k elements a value of 4 bytes (8 for float64) and an index of 1.5, 2 or 4, or 1/8 for
each element of the parameter (sparse/indices.py). Biased, ω ≤ 1 - k/n for any size. Weakness: every rank receives all
others' messages, so the bytes grow with the number of ranks. On a CPU, selecting elements and adding them up at
scattered indices take as long as 11 to 15 copies of the gradient at 1 %, or 5 to 6 compiled; and three times as long at
10 %.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from commhooks.compressors.sparse.indices import Indices, largest_error
from commhooks.compressors.sparse.own_places import OwnPlaces
from commhooks.language import Context, Loss, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(OwnPlaces):
    """A compressor that sends the `ratio` largest elements of each parameter: one collective per bucket.

    It has error feedback, unless it is inside `WithoutFeedback`.
    """

    ratio: float = setting(0.01, above=0, most=1)
    """Lower: smaller messages, but more left in the residual. At least one element of each parameter is sent."""
    indices: Indices = "auto"
    """The coding of indices. "int32" selects a parameter's largest elements; "block-12", "block-16" and "bitmap" the
    largest of each 4,096 or 65,536 elements, in smaller messages. "auto" takes the smallest."""

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Return 1 - k/n, unless everything is sent: the elements sent have at least the average size."""
        error = largest_error(self.indices, parameter.numel(), self.ratio)
        return Loss(error) if error else None

    @property
    def most(self) -> tuple[Indices, float]:
        """The coding of indices, and the fraction of the elements that is sent."""
        return self.indices, self.ratio

    def least(self, context: Context) -> float:
        """Return 0."""
        return 0.0
