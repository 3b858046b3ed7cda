"""PowerSGD at rank 1, 2, 4 and 7 beside uncompressed gradients: what each rank sends, and what it costs.

Every variant trains both tasks with every seed, and is compared with uncompressed gradients.
"""

from __future__ import annotations

from ..ablation import train_variants
from ..comparing import show_ablation
from ..reproduction import Reproduction
from .tasks import PAPER, sizes

REPRODUCTION = Reproduction(
    name="powersgd-rank",
    title="PowerSGD at rank 1, 2, 4 and 7",
    source=f"{PAPER}, table 3",
    said=(
        "Accuracy on CIFAR-10 with ResNet-18: SGD 94.3 %, rank 1 93.6 %, rank 2 94.4 %, rank 4 94.5 % (recalled).",
        "Perplexity of an LSTM on WikiText-2, lower is better: SGD 91, rank 1 102, rank 2 93, rank 4 91 (recalled).",
    ),
    sizes=sizes(
        variants={"all-reduce": "all-reduce"} | {f"rank {rank}": f"powersgd:rank={rank}" for rank in (1, 2, 4, 7)},
    ),
    measure=train_variants,
    show=show_ablation,
)
