"""Error feedback under AdamW and under SGD with momentum: with it, without it, and with a residual that decays.

Every variant trains both models under both optimizers with every seed; each form is compared with all-reduce.
"""

from __future__ import annotations

from .ablation import Ablation, train_variants
from .comparing import show_ablation
from .powersgd.tasks import TINY
from .reproduction import Reproduction

_HOOKS = {
    "sign": "sign",
    "int4": "int4",
    "top-k 10 %": "top-k:ratio=0.1",
    "powersgd rank 1": "powersgd:rank=1",
}
_FORMS = {"": "error_feedback=true", ", decay 0.9": "decay=0.9", " without feedback": "error_feedback=false"}
VARIANTS = {"all-reduce": "all-reduce"} | {
    f"{label}{words}": f"{hook}{',' if ':' in hook else ':'}{setting}"
    for label, hook in _HOOKS.items()
    for words, setting in _FORMS.items()
}

REPRODUCTION = Reproduction(
    name="feedback-and-optimizers",
    title="Error feedback, by optimizer",
    source="1-bit Adam paper (Tang et al., ICML 2021), section 3",
    said=(
        "Error feedback works for SGD, because its steps are linear in the gradients: what is sent late still arrives.",
        "It does not work for Adam in the same way: the second moments are sums of squares, in which compression "
        "errors of successive steps do not cancel (recalled).",
    ),
    sizes={
        "default": Ablation(
            tasks=(
                "gpt:size=tiny",
                "lstm:size=tiny",
                "gpt:size=tiny under sgd:lr=0.1,momentum=0.9",
                "lstm:size=tiny under sgd:lr=0.3,momentum=0.9",
            ),
            variants=VARIANTS,
        ),
        "tiny": Ablation(variants=dict(list(VARIANTS.items())[:4]), **TINY),
    },
    measure=train_variants,
    show=show_ablation,
)
