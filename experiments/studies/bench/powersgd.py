"""PowerSGD against the memory traffic that it cannot avoid, timed as a copy in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

import commhooks
from experiments.launch import Tell, on_ranks
from experiments.report.words import seconds_in_words
from experiments.results.summary import Spread
from experiments.turns import in_turns

from .given import GPT_SHAPES, GivenBucket, Shape, refill, resnet18_shapes
from .rows import Row, Seconds, ratios

SENTENCE = (
    "The CPU time of `powerSGD_hook` in a backward pass on one thread, over that of moving 28 bytes an element: "
    "the gradient and the residual are read and M is written (12), M is read again for Q (4), and once more at the "
    "end, where residual and mean are written (12). The limit is 3.5 times one copy of the whole model's gradients, "
    "which moves 8 bytes an element. Noise is that copy against itself."
)
COPIES = 28 / 8
RANKS = (1, 2, 4)
TARGETS = {1: 1.25, 4: 1.45}  # rank 4 makes 32 floating-point operations of an element besides
MODELS: dict[str, list[Shape]] = {
    "ResNet-18, 11.2 M parameters": resnet18_shapes(),
    "four layers of a GPT, 28.3 M": GPT_SHAPES,
}
COPY, AGAIN = "copy", "again"


def measure(quick: bool, tell: Tell) -> list[Row]:
    """Return a row for each model and rank."""
    models: dict[str, list[Shape]] = {"a tiny model": [(64, 64), (64,)]} if quick else MODELS
    tell("powersgd: a hook's calls and copies in turns")
    found = on_ranks(partial(_take_turns, models, 3 if quick else 20), 1, tell)
    return [row for model, seconds in found.items() for row in rows_of(model, seconds)]


def rows_of(model: str, seconds: Seconds) -> list[Row]:
    """Return a row for each rank."""
    noise = ratios(seconds[AGAIN], seconds[COPY])
    limit = [COPIES * (one + other) / 2 for one, other in zip(seconds[COPY], seconds[AGAIN], strict=True)]
    return [
        Row(
            name=f"rank {rank}, {model}",
            quantity="compute over its memory traffic",
            spread=ratios(seconds[f"rank {rank}"], limit),
            noise=noise,
            target=TARGETS.get(rank),
            absolute=(
                f"{seconds_in_words(Spread.of(seconds[f'rank {rank}']).median)}, the limit "
                f"{seconds_in_words(Spread.of(limit).median)}"
            ),
        )
        for rank in RANKS
    ]


def _take_turns(models: Mapping[str, list[Shape]], rounds: int, tell: Tell) -> dict[str, Seconds]:
    found = {}
    for model, shapes in models.items():
        buckets = {f"rank {r}": GivenBucket([torch.zeros(shape) for shape in shapes]) for r in RANKS}
        gradient = torch.randn(buckets["rank 1"].buffer().shape)
        room = torch.empty_like(gradient)
        contenders: dict[str, Callable[[], object]] = {COPY: partial(room.copy_, gradient)}
        contenders[AGAIN] = contenders[COPY]
        for r in RANKS:
            state = commhooks.PowerSGDState(None, r, start_powerSGD_iter=2)
            contenders[f"rank {r}"] = partial(_in_a_backward_pass, partial(_call, state, buckets[f"rank {r}"]))
        prepare = partial(refill, buckets, gradient)
        found[model] = in_turns(contenders, rounds, warm_up=6, clock=time.process_time, prepare=prepare)
    return found


def _call(state: commhooks.PowerSGDState, bucket: GivenBucket) -> None:
    commhooks.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]  # 'expected "GradBucket"', PyTorch's class


def _in_a_backward_pass(call: Callable[[], None]) -> None:
    """Call a function from within a backward pass, as DDPs call hooks."""
    leaf = torch.zeros((), requires_grad=True)
    leaf.register_hook(lambda _: call())
    leaf.clone().backward()
