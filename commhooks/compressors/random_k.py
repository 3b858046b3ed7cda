"""Random-k: some elements of each parameter's gradient, at random indices.

Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, section 2; unbiased, Wangni, Wang, Liu,
Zhang, "Gradient Sparsification for Communication-Efficient Distributed Optimization", NeurIPS 2018.
Idea: all ranks draw the same k of n indices from a shared seed, so values are summed on the wire and no indices are
sent.
Bytes on the wire: 4 for each of k elements, and 4 for each parameter. Biased with ω = 1 - k/n, or unbiased with ω =
n/k - 1, for any size, on average over the indices. Weakness: large elements are sent no sooner than small ones. An
element that is sent stands for n/k gradients, so with the default ratio training diverges under SGD with momentum 0.9;
ratio=0.1, `ErrorFeedback(decay=0.9)`, or no momentum works. On a CPU, drawing many indices takes time: at 10 % as long
as 40 copies of the gradient.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from commhooks.compressors.sparse.shared_places import SharedPlaces
from commhooks.language.randomness import seeded_places, stable_seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomK(SharedPlaces):
    """A compressor that averages a random `ratio` of each parameter's elements.

    It has error feedback, unless it is `unbiased` or inside `WithoutFeedback`.
    """

    def places(self, name: str, gradient: Tensor, step: int) -> Tensor:
        """Draw k different indices."""
        elements = gradient.numel()
        return seeded_places(elements, self.k(elements), stable_seed("random-k", self.seed, name, step), gradient)
