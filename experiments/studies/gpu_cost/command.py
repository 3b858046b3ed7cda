"""The study `gpu-cost`: count what every hook would ask of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from commhooks.compressors import COMPRESSORS
from commhooks.experiments.commands.terminal import errors_in_words
from commhooks.experiments.machine import machine
from commhooks.experiments.stored import write_text
from commhooks.units import unknown
from experiments.studies.blocks import print_blocks
from experiments.studies.gpu_cost.counting import ASSUMPTIONS
from experiments.studies.gpu_cost.page import MODELS, Row, all_hooks, render, table
from experiments.studies.gpu_cost.rank import count, fake_group

DEVICES = ("cpu", "cuda")


def gpu_cost(
    hooks: Annotated[list[str] | None, typer.Argument(help="With settings, or 'torch.powersgd'; none: all.")] = None,
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}; none: all.")] = None,
    device: Annotated[str, typer.Option(help="'cpu' counts what runs on a CPU, 'cuda' what runs on a GPU.")] = "cuda",
    page: Annotated[Path | None, typer.Option(help="Write the tables and what they assume into this file.")] = None,
    command: Annotated[str, typer.Option(help="What the page says it was made with.")] = "make gpu-cost",
) -> None:
    """Count launches, bytes and host waits of a step under each hook."""
    with errors_in_words() as console, fake_group() as group:
        models = model or list(MODELS)
        for name in models:
            if name not in MODELS:
                raise ValueError(unknown("model", name, MODELS))
        if device not in DEVICES:
            raise ValueError(unknown("device", device, DEVICES))
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("there is no CUDA device; --device cpu counts the code for a CPU instead")
        rows: list[Row] = []
        for name in models:
            own = [
                Row(name, hook, count(hook, MODELS[name], group, torch.device(device)))
                for hook in hooks or all_hooks(sorted(COMPRESSORS))
            ]
            print_blocks([table(name, own)], console)
            rows += own
        print_blocks([f"- {sentence}" for sentence in ASSUMPTIONS], console)
        if page:
            write_text(page, render(rows, command, _in_words(device), machine()["load"]))


def _in_words(device: str) -> str:
    if device == "cpu":
        return "the CPU, so this is the code for a CPU"
    return f"a device whose name is {torch.cuda.get_device_name()!r}"
