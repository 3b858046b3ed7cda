"""PowerSGD on each layer's matrix, and on a whole bucket as one nearly square matrix.

Every variant trains both tasks with every seed; a model's parameters are one bucket here. A whole bucket's factors are
smaller at equal rank, so it is compared with layers at equal rank and, with a higher rank, at about equal bytes.
"""

from __future__ import annotations

from ..ablation import train_variants
from ..comparing import show_ablation
from ..reproduction import Reproduction
from .tasks import sizes

_BATCHED = "powersgd:matrices=whole-bucket,rank={}"

REPRODUCTION = Reproduction(
    name="powersgd-layers",
    title="PowerSGD on layers and on whole buckets",
    source="PyTorch's documentation of its hooks powerSGD_hook and batched_powerSGD_hook, which has no table",
    said=(
        "A bucket as one square matrix takes less time than a matrix for each layer, but usually loses accuracy.",
        "PyTorch's documentation recommends the layer-wise form unless the accuracy of the other is satisfactory.",
    ),
    sizes=sizes(
        variants={
            "all-reduce": "all-reduce",
            "layers at rank 1": "powersgd:rank=1",
            "bucket at rank 1": _BATCHED.format(1),
            "bucket at rank 4": _BATCHED.format(4),
            "layers at rank 2": "powersgd:rank=2",
            "bucket at rank 2": _BATCHED.format(2),
            "bucket at rank 6": _BATCHED.format(6),
        },
        against={
            "bucket at rank 1": "layers at rank 1",
            "bucket at rank 4": "layers at rank 1",
            "bucket at rank 2": "layers at rank 2",
            "bucket at rank 6": "layers at rank 2",
        },
    ),
    measure=train_variants,
    show=show_ablation,
)
