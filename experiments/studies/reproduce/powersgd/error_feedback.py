"""PowerSGD with and without error feedback, and top-k for contrast.

Every variant trains both tasks with every seed; each form without error feedback is compared with the one that has it.
"""

from __future__ import annotations

from ..ablation import train_variants
from ..comparing import show_ablation
from ..reproduction import Reproduction
from .tasks import PAPER, sizes

REPRODUCTION = Reproduction(
    name="powersgd-error-feedback",
    title="PowerSGD with and without error feedback",
    source=f"{PAPER}, table 1 and section 3",
    said=(
        "What a step does not send is added to the next step's gradient; without this feedback, a biased compressor "
        "need not converge.",
        "On CIFAR-10 with ResNet-18, accuracy is several points lower without error feedback (recalled).",
    ),
    sizes=sizes(
        variants={
            "all-reduce": "all-reduce",
            "rank 1": "powersgd:rank=1",
            "rank 1 without feedback": "powersgd:rank=1,error_feedback=false",
            "rank 2": "powersgd:rank=2",
            "rank 2 without feedback": "powersgd:rank=2,error_feedback=false",
            "top-k 2 %": "top-k:ratio=0.02",
            "top-k 2 % without feedback": "top-k:ratio=0.02,error_feedback=false",
        },
        against={f"{label} without feedback": label for label in ("rank 1", "rank 2", "top-k 2 %")},
    ),
    measure=train_variants,
    show=show_ablation,
)
