"""PowerSGD at rank 1 that begins after 0 to 50 % of the steps, with uncompressed gradients before.

Every variant trains both tasks with every seed. The bytes are means over a whole run, uncompressed steps included.
"""

from __future__ import annotations

from ..ablation import train_variants
from ..comparing import show_ablation
from ..reproduction import Reproduction
from .tasks import sizes

_LABELS = {share: f"rank 1 after {share} %" for share in (5, 10, 25, 50)}

REPRODUCTION = Reproduction(
    name="powersgd-start-step",
    title="The step at which PowerSGD begins",
    source="PyTorch's documentation of its PowerSGD hook (start_powerSGD_iter), which has no table",
    said=(
        "PyTorch's hook sends uncompressed gradients in its first 1,000 steps by default (`start_powerSGD_iter`), "
        "because compressing early gradients may cost accuracy.",
        "The PowerSGD paper compresses from the first step, with a warm-up of the learning rate (recalled).",
    ),
    sizes=sizes(
        variants={
            "all-reduce": "all-reduce",
            "rank 1 from the start": "powersgd:rank=1",
            **{label: f"powersgd:rank=1,start_after={share}%" for share, label in _LABELS.items()},
        },
        against=dict.fromkeys(_LABELS.values(), "rank 1 from the start"),
    ),
    measure=train_variants,
    show=show_ablation,
)
