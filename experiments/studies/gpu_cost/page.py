"""The tables of what was counted, and the page with everything that was assumed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from commhooks.units import three_digits
from experiments.studies.bench.given import GPT_SHAPES, Shape, resnet18_shapes
from experiments.studies.blocks import Block, Table, markdown
from experiments.studies.gpu_cost.counting import ASSUMPTIONS
from experiments.studies.gpu_cost.rank import (
    LAUNCH_SECONDS,
    PEERS,
    POWERSGD,
    RANKS,
    STEPS_BEFORE,
    VIEW_SECONDS,
    Counted,
)
from experiments.studies.leaderboard.contenders import USUAL

MODELS: dict[str, Sequence[Shape]] = {
    "ResNet-18": resnet18_shapes(),
    "GPT block": GPT_SHAPES[:8],
    "embedding": [(50_000, 800)],
}
"""Shapes of parameters, all in one bucket."""

BEGINNING = f"""# Launches on a GPU, counted

What hooks would ask of a GPU: launches, bytes and waits of the host, **counted, not measured**. No GPU was used, and
the page says nothing about the speed of one. Rows that begin with `torch.` are PyTorch's own hooks.

One rank of {RANKS} takes a step with all of a model's gradients in one fp32 bucket, over a process group that answers
at once (PyTorch's "fake" one). The step after the first {STEPS_BEFORE} is counted, on {{device}}. The times are
from a machine on which {{load}} processes wanted to run. The page was made with

    {{command}}

What it assumes:
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """A hook on a model."""

    model: str
    hook: str
    counted: Counted

    @property
    def elements(self) -> int:
        """The number of elements of the model's parameters."""
        return sum(map(math.prod, MODELS[self.model]))

    @property
    def least_bytes(self) -> int:
        """The bytes that any hook with this state must read or write: the gradient, the mean, and residuals twice."""
        return 2 * 4 * self.elements + 2 * self.counted.residual_bytes


def all_hooks(names: Sequence[str]) -> list[str]:
    """Return PyTorch's hooks, and all compressors of these names at their usual settings."""
    return [*PEERS, POWERSGD, *(hook for name in names for hook in USUAL.get(name, (name,)))]


def table(model: str, rows: Sequence[Row]) -> Table:
    """Return what was counted on a model."""
    columns = [
        *("hook", "launches", "collectives", "waits", "bytes/element", "bytes/least"),
        *("Python, ms", "host, ms"),
    ]
    own = [row for row in rows if row.model == model]
    title = f"{model}: {own[0].elements:,} elements in {len(MODELS[model])} parameters"
    return Table(title, columns, list(map(_cells, own)))


def render(rows: Sequence[Row], command: str, device: str, load: float | int | str) -> str:
    """Return the page, in Markdown; `load` is how many processes wanted to run meanwhile."""
    assumed = [*ASSUMPTIONS, _OF_BYTES, _OF_HOST]
    blocks: list[Block] = [
        BEGINNING.format(command=command, device=device, load=load).rstrip(),
        "\n".join(f"- {sentence}" for sentence in assumed),
        *(table(model, rows) for model in dict.fromkeys(row.model for row in rows)),
    ]
    return markdown(blocks).rstrip() + "\n"


_OF_BYTES = (
    "The least bytes are needed to read the gradient, to write the mean, and to read and write the hook's own state: "
    "residuals, momenta."
)
_OF_HOST = (
    "The host's time is the hook's Python, measured on the machine that counted in a step whose operators are left "
    f"out, {1e6 * LAUNCH_SECONDS:g} µs more for each launch, and {1e6 * VIEW_SECONDS:g} µs for each view or allocation."
)


def _cells(row: Row) -> Sequence[str]:
    cost = row.counted.cost
    python = row.counted.host_seconds
    host = python + cost.launches * LAUNCH_SECONDS + cost.views * VIEW_SECONDS
    return [
        f"`{row.hook}`",
        f"{cost.launches:,}",
        str(cost.collectives),
        str(cost.waits),
        three_digits(cost.bytes / row.elements),
        f"{cost.bytes / row.least_bytes:.2f}",
        f"{1e3 * python:.2f}",
        f"{1e3 * host:.2f}",
    ]
