"""`ddp_core` against PyTorch's C++ reducer: step time, memory and time to construct, on Gloo and this machine's CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import ddp_core
from commhooks.experiments.launch import Tell
from commhooks.experiments.report.words import seconds_in_words
from commhooks.experiments.tasks.images import ResNet18
from commhooks.units import bytes_in_words
from experiments.studies.bench.memory import KEEPS_FREED, growth_in_turns, is_countable, return_freed_memory
from experiments.studies.bench.rows import AGAIN, OURS, THEIRS, Row, Seconds, beside, pooled, ratios
from experiments.studies.ranks import on_ranks
from experiments.studies.turns import in_turns

SENTENCE = (
    "`ddp_core.DistributedDataParallel` over `torch.nn.parallel.DistributedDataParallel` on 2 ranks of one thread "
    "each: a training step (forward, backward, SGD), the memory that building the DDP and 4 steps take at most, and "
    "the time to build it (not that of 1,000 small parameters, which take less than an allocator rounds to). Every "
    "model is trained by a copy without any DDP, by one in ours, and by two in PyTorch's; noise is the second of "
    "those over the first. ResNet-18 is that for CIFAR, 11.2 million parameters, with 2 images of 8×8. Targets: no "
    "slower than PyTorch's, plus the noise."
)
RANKS = 2
TARGET = 1.0
SMALL = "1,000 small parameters"
LOCAL = "local"


class ManySmall(nn.Module):
    """A thousand parameters of 64 elements each: the cost of a parameter, not of its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(64)) for _ in range(1000)])

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by every parameter in turn."""
        for scale in self.scales:
            x = x * scale
        return x


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    SMALL: lambda: (ManySmall(), torch.randn(8, 64)),
    "transformer": lambda: (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True), 4, enable_nested_tensor=False
        ),
        torch.randn(4, 32, 128),
    ),
    "ResNet-18": lambda: (ResNet18(), torch.randn(2, 3, 8, 8)),
    "8 large layers": lambda: (nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))), torch.randn(16, 1024)),
}
MODES = {"default": False, "gradient_as_bucket_view": True}


def measure(quick: bool, tell: Tell) -> list[Row]:
    """Return the rows of all models and modes."""
    models = tuple(MODELS)[:2] if quick else tuple(MODELS)
    rounds, calls = (3, 1) if quick else (10, 3)
    steps = []
    for launch in range(1 if quick else 2):
        tell(f"ddp: step times, launch {launch + 1}")
        steps.append(on_ranks(partial(_time_steps, models, rounds, calls), RANKS, tell, variables=KEEPS_FREED))
    tell("ddp: time to construct")
    built = on_ranks(partial(_time_construction, models, 2 * rounds), RANKS, tell, variables=KEEPS_FREED)
    rows = [row for name in steps[0] for row in _step_rows(name, pooled([one[name] for one in steps]))]
    rows += [
        beside("PyTorch's", name, "time to construct", seconds, seconds_in_words) for name, seconds in built.items()
    ]
    if is_countable():
        tell("ddp: memory")
        grown = on_ranks(partial(_weigh, models, rounds // 2 + 1), RANKS, tell)
        rows += [beside("PyTorch's", name, "peak memory", taken, bytes_in_words) for name, taken in grown.items()]
    return rows


def _step_rows(name: str, seconds: Seconds) -> list[Row]:
    theirs = ratios(seconds[THEIRS], seconds[LOCAL])
    over_local = Row(
        name=name,
        quantity="step time over local training",
        spread=ratios(seconds[OURS], seconds[LOCAL]),
        absolute=f"PyTorch's {theirs.median:.3f} ({theirs.low:.3f}–{theirs.high:.3f})",
    )
    step = beside("PyTorch's", name, "step time", seconds, seconds_in_words, target=TARGET, allows_spread=True)
    return [step, over_local]


def wrapped(who: str, module: nn.Module, view: bool = False) -> nn.Module:
    """Return the module in our DDP, in PyTorch's, or as it is."""
    if who == LOCAL:
        return module
    if who == OURS:
        return ddp_core.DistributedDataParallel(module, gradient_as_bucket_view=view)
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=view)


def _training_step(who: str, model: str, view: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    module, inputs = MODELS[model]()
    ddp = wrapped(who, module, view)
    return partial(_step, ddp, torch.optim.SGD(ddp.parameters(), lr=1e-6), inputs)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def _time_steps(models: Sequence[str], rounds: int, calls: int, tell: Tell) -> dict[str, Seconds]:
    found = {}
    for model in models:
        for mode, view in MODES.items():
            steps = {who: _training_step(who, model, view) for who in (LOCAL, OURS, THEIRS, AGAIN)}
            found[f"{model}, {mode}"] = in_turns(steps, rounds, calls=calls)
    return found


def _time_construction(models: Sequence[str], rounds: int, tell: Tell) -> dict[str, Seconds]:
    """Time building a DDP around a model of its own, which is copied beforehand."""
    found = {}
    for model in models:
        site = _Site(MODELS[model]()[0])
        builders = {who: partial(site.build, who) for who in (OURS, THEIRS, AGAIN)}
        found[model] = in_turns(builders, rounds, prepare=site.clear)
    return found


class _Site:
    """A place in which DDPs are built, one at a time."""

    def __init__(self, module: nn.Module) -> None:
        self._pattern = module
        self._built: list[nn.Module] = []
        self.clear("")

    def clear(self, who: str) -> None:
        self._built.clear()  # a DDP at a time
        self._module = copy.deepcopy(self._pattern)

    def build(self, who: str) -> None:
        self._built.append(wrapped(who, self._module))


def _weigh(models: Sequence[str], rounds: int, tell: Tell) -> dict[str, Seconds]:
    return_freed_memory()
    found = {}
    for model in models:
        for mode, view in MODES.items() if model != SMALL else ():
            made = {who: partial(_training_step, who, model, view) for who in (OURS, THEIRS, AGAIN)}
            found[f"{model}, {mode}"] = growth_in_turns(made, rounds)
    return found
