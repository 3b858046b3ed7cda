"""Data whose classes are spread unevenly over the ranks, as on devices of different owners."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from commhooks.experiments.tasks.task import generator_for


@dataclass(frozen=True, eq=False)
class Skewed:
    """Batches of a labelled set in which each rank has a share of its own, the same in every epoch.

    Before the images are dealt out, a fraction of them, chosen at random, is sorted by label.
    """

    images: Tensor
    labels: Tensor
    _: KW_ONLY
    skew: (
        float  # the fraction of the images that is sorted; 0: all ranks have the same mix, 1: each has its own classes
    )
    batch_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.skew <= 1:
            raise ValueError(f"skew must be between 0 and 1 (got {self.skew})")

    def __call__(self, seed: int, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Return the images and labels of a rank's batch; each rank shuffles its share once per epoch."""
        share = self.share(seed, rank, ranks)
        steps = len(self.labels) // ranks // self.batch_size  # of an epoch, on every rank
        if steps == 0:
            raise ValueError(
                f"a batch of {self.batch_size} images is more than the {len(self.labels) // ranks} that each of "
                f"{ranks} ranks has; use fewer ranks or a smaller batch_size"
            )
        epoch, position = divmod(step, steps)
        order = torch.randperm(len(share), generator=generator_for(seed, epoch, rank))
        chosen = share[order[position * self.batch_size : (position + 1) * self.batch_size]]
        return self.images[chosen], self.labels[chosen]

    def share(self, seed: int, rank: int, ranks: int) -> Tensor:
        """Return the indices of a rank's own images."""
        count = len(self.labels)
        order = torch.randperm(count, generator=generator_for(seed))
        by_label, mixed = order.tensor_split([round(self.skew * count)])
        by_label = by_label[self.labels[by_label].argsort(stable=True)]
        # Parts that the ranks do not divide leave a few images over: of one part the first ranks get them, of the other
        # the last ones, so that no share is smaller than a step of every epoch needs.
        return torch.cat([by_label.tensor_split(ranks)[rank], mixed.tensor_split(ranks)[ranks - 1 - rank]])
