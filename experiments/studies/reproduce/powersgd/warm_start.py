"""PowerSGD's power iteration started from the last step's basis, from a random one, and replaced by an SVD.

Every variant trains both tasks with every seed. With four iterations a cold start comes closer to the best
approximation, for four times the bytes; the SVD is the best approximation of each worker's own gradient.
"""

from __future__ import annotations

from ..ablation import train_variants
from ..comparing import show_ablation
from ..reproduction import Reproduction
from .tasks import PAPER, sizes

REPRODUCTION = Reproduction(
    name="powersgd-warm-start",
    title="PowerSGD with and without warm start",
    source=f"{PAPER}, section 4.2",
    said=(
        "Each step's power iteration starts from the factor that the last step ended with, so that one iteration a "
        "step is enough.",
        "On CIFAR-10 at rank 2, warm start is as accurate as the best rank-2 approximation, and a new random start in "
        "every step loses a few tenths of a point (recalled).",
    ),
    sizes=sizes(
        variants={
            "all-reduce": "all-reduce",
            "rank 1": "powersgd:rank=1",
            "rank 1 from a cold start": "powersgd:rank=1,warm_start=false",
            "rank 2": "powersgd:rank=2",
            "rank 2 from a cold start": "powersgd:rank=2,warm_start=false",
            "rank 2, 4 cold iterations": "powersgd:rank=2,warm_start=false,iterations=4,min_compression_rate=1",
            "rank 2 by SVD": "svd:rank=2",
        },
        against={
            "rank 1 from a cold start": "rank 1",
            "rank 2 from a cold start": "rank 2",
            "rank 2, 4 cold iterations": "rank 2",
            "rank 2 by SVD": "rank 2",
        },
    ),
    measure=train_variants,
    show=show_ablation,
)
