"""The reproductions that train variants of a hook, and nothing else: a row for each.

Every variant trains all tasks with every seed, and is compared with the first one unless `against` names another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from experiments.studies.reproduce.ablation import Ablation, train_variants
from experiments.studies.reproduce.comparing import show_ablation
from experiments.studies.reproduce.reproduction import Reproduction

PAPER = "PowerSGD paper (Vogels et al., NeurIPS 2019)"
TASKS = ("digits:batch_size=8,channels=16,size=small,steps=80", "lstm:size=small,steps=300")
"""A CNN with batch norm under SGD with momentum, and an LSTM under AdamW: small models of the paper's two kinds. Both
keep their own optimizers, learning rates and schedules; nothing was tuned for any variant."""
TINY: Final[Mapping[str, Any]] = {"tasks": ("digits:size=tiny,steps=3",), "seeds": 2, "workers": 2, "processes": 1}

_BATCHED = "powersgd:matrices=whole-bucket,rank={}"
_AFTER = {share: f"rank 1 after {share} %" for share in (5, 10, 25, 50)}
_HOOKS = {
    "sign": "sign",
    "int4": "int4",
    "top-k 10 %": "top-k:ratio=0.1",
    "powersgd rank 1": "powersgd:rank=1",
}
_FORMS = {"": "error_feedback=true", ", decay 0.9": "decay=0.9", " without feedback": "error_feedback=false"}


def _row(
    name: str,
    title: str,
    source: str,
    said: tuple[str, ...],
    variants: Mapping[str, str],
    *,
    against: Mapping[str, str] | None = None,
    tasks: tuple[str, ...] = TASKS,
    tried: int | None = None,
) -> Reproduction:
    """Return the reproduction of hooks beside all-reduce; a tiny one has the first `tried` variants, or all."""
    variants = {"all-reduce": "all-reduce", **variants}
    tiny = dict(list(variants.items())[:tried])
    return Reproduction(
        name=name,
        title=title,
        source=source,
        said=said,
        sizes={
            "default": Ablation(tasks=tasks, variants=variants, against=against or {}),
            "tiny": Ablation(variants=tiny, against=against or {}, **TINY),
        },
        measure=train_variants,
        show=show_ablation,
    )


_ROWS = (
    _row(
        "powersgd-error-feedback",
        "PowerSGD with and without error feedback",
        f"{PAPER}, table 1 and section 3",
        (
            "What a step does not send is added to the next step's gradient; without this feedback, a biased "
            "compressor need not converge.",
            "On CIFAR-10 with ResNet-18, accuracy is several points lower without error feedback (recalled).",
        ),
        {
            "rank 1": "powersgd:rank=1",
            "rank 1 without feedback": "powersgd:rank=1,error_feedback=false",
            "rank 2": "powersgd:rank=2",
            "rank 2 without feedback": "powersgd:rank=2,error_feedback=false",
            "top-k 2 %": "top-k:ratio=0.02",
            "top-k 2 % without feedback": "top-k:ratio=0.02,error_feedback=false",
        },
        against={f"{label} without feedback": label for label in ("rank 1", "rank 2", "top-k 2 %")},
    ),
    # From the last step's basis, from a random one, and an SVD in place of the iteration. With four iterations a cold
    # start comes closer to the best approximation, for four times the bytes; the SVD is the best of each worker's own.
    _row(
        "powersgd-warm-start",
        "PowerSGD with and without warm start",
        f"{PAPER}, section 4.2",
        (
            "Each step's power iteration starts from the factor that the last step ended with, so that one iteration a "
            "step is enough.",
            "On CIFAR-10 at rank 2, warm start is as accurate as the best rank-2 approximation, and a new random start "
            "in every step loses a few tenths of a point (recalled).",
        ),
        {
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
    _row(
        "powersgd-rank",
        "PowerSGD at rank 1, 2, 4 and 7",
        f"{PAPER}, table 3",
        (
            "Accuracy on CIFAR-10 with ResNet-18: SGD 94.3 %, rank 1 93.6 %, rank 2 94.4 %, rank 4 94.5 % (recalled).",
            "Perplexity of an LSTM on WikiText-2, lower is better: SGD 91, rank 1 102, rank 2 93, rank 4 91 "
            "(recalled).",
        ),
        {f"rank {rank}": f"powersgd:rank={rank}" for rank in (1, 2, 4, 7)},
    ),
    # The bytes are means over a whole run, uncompressed steps included.
    _row(
        "powersgd-start-step",
        "The step at which PowerSGD begins",
        "PyTorch's documentation of its PowerSGD hook (start_powerSGD_iter), which has no table",
        (
            "PyTorch's hook sends uncompressed gradients in its first 1,000 steps by default (`start_powerSGD_iter`), "
            "because compressing early gradients may cost accuracy.",
            "The PowerSGD paper compresses from the first step, with a warm-up of the learning rate (recalled).",
        ),
        {"rank 1 from the start": "powersgd:rank=1"}
        | {label: f"powersgd:rank=1,start_after={share}%" for share, label in _AFTER.items()},
        against=dict.fromkeys(_AFTER.values(), "rank 1 from the start"),
    ),
    # A model's parameters are one bucket here. A whole bucket's factors are smaller at equal rank, so it is compared
    # with layers at equal rank and, with a higher rank, at about equal bytes.
    _row(
        "powersgd-layers",
        "PowerSGD on layers and on whole buckets",
        "PyTorch's documentation of its hooks powerSGD_hook and batched_powerSGD_hook, which has no table",
        (
            "A bucket as one square matrix takes less time than a matrix for each layer, but usually loses accuracy.",
            "PyTorch's documentation recommends the layer-wise form unless the accuracy of the other is satisfactory.",
        ),
        {
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
    _row(
        "feedback-and-optimizers",
        "Error feedback, by optimizer",
        "1-bit Adam paper (Tang et al., ICML 2021), section 3",
        (
            "Error feedback works for SGD, because its steps are linear in the gradients: what is sent late still "
            "arrives.",
            "It does not work for Adam in the same way: the second moments are sums of squares, in which compression "
            "errors of successive steps do not cancel (recalled).",
        ),
        {
            f"{label}{words}": f"{hook}{',' if ':' in hook else ':'}{setting}"
            for label, hook in _HOOKS.items()
            for words, setting in _FORMS.items()
        },
        tasks=(
            "gpt:size=tiny",
            "lstm:size=tiny",
            "gpt:size=tiny under sgd:lr=0.1,momentum=0.9",
            "lstm:size=tiny under sgd:lr=0.3,momentum=0.9",
        ),
        tried=4,
    ),
)
REPRODUCTIONS = {row.name: row for row in _ROWS}
