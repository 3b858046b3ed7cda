"""Error feedback by optimizer: hooks with feedback, with a decaying one and without, under AdamW and SGD."""

from __future__ import annotations

from experiments.studies.reproduce.ablation import Ablation, train_variants
from experiments.studies.reproduce.comparing import show_ablation
from experiments.studies.reproduce.results import Reproduction

_HOOKS = {
    "sign": "sign",
    "int4": "int4",
    "top-k 10 %": "top-k:ratio=0.1",
    "powersgd rank 1": "powersgd:rank=1",
}
_FORMS = {"": "error_feedback=true", ", decay 0.9": "decay=0.9", " without feedback": "error_feedback=false"}
_VARIANTS = {"all-reduce": "all-reduce"} | {
    f"{label}{words}": f"{hook}{',' if ':' in hook else ':'}{setting}"
    for label, hook in _HOOKS.items()
    for words, setting in _FORMS.items()
}
_TASKS = (
    "gpt:size=tiny",
    "lstm:size=tiny",
    "gpt:size=tiny under sgd:lr=0.1,momentum=0.9",
    "lstm:size=tiny under sgd:lr=0.3,momentum=0.9",
)

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
        "default": Ablation(tasks=_TASKS, variants=_VARIANTS),
        "tiny": Ablation(
            tasks=("digits:size=tiny,steps=3",),
            variants=dict(list(_VARIANTS.items())[:4]),
            seeds=2,
            workers=2,
            processes=1,
        ),
    },
    measure=train_variants,
    show=show_ablation,
)
