"""Measure the step time of ``ddp_core`` against PyTorch's C++ reducer, in turns, on Gloo and this machine's CPU.

Every model is trained by four copies, one after another within each round: without any DDP ("local"), with PyTorch's
class, with ours, and with PyTorch's class again. Each round gives one ratio ours/PyTorch's and one PyTorch's/PyTorch's;
the second is the noise, and shows how far the first may be from 1 by chance.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import ddp_core

Step = Callable[[], None]


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


def _transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(4, 32, 128)


def _cnn() -> tuple[nn.Module, Tensor]:
    blocks: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64), (64, 128)):
        blocks += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(512, 10)), torch.randn(8, 3, 32, 32)


def _large() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))), torch.randn(16, 1024)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "1,000 small parameters": lambda: (ManySmall(), torch.randn(8, 64)),
    "transformer": _transformer,
    "CNN": _cnn,
    "8 large layers": _large,
}


@dataclass(frozen=True)
class Row:
    """One model and mode: medians over rounds, and quartiles for the ratios."""

    model: str
    mode: str
    local_ms: float
    torch_over_local: float
    ours_over_local: float
    ours_over_torch: float
    ours_over_torch_quartiles: tuple[float, float]
    torch_over_torch: float
    torch_over_torch_quartiles: tuple[float, float]


def _training_step(wrap: Callable[[nn.Module], nn.Module], make: Callable[[], tuple[nn.Module, Tensor]]) -> Step:
    torch.manual_seed(0)
    module, inputs = make()
    model = wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def _seconds(step: Step, steps: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def _quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def _measure(model: str, view: bool, rounds: int, steps: int) -> Row:
    make = MODELS[model]
    copies = [
        _training_step(lambda m: m, make),
        _training_step(lambda m: nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=view), make),
        _training_step(lambda m: ddp_core.DistributedDataParallel(m, gradient_as_bucket_view=view), make),
        _training_step(lambda m: nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=view), make),
    ]
    for step in copies:
        _seconds(step, 3)
    times: list[list[float]] = []
    for round_number in range(rounds):
        order = [0, 1, 2, 3] if round_number % 2 == 0 else [3, 2, 1, 0]
        measured = {copy: _seconds(copies[copy], steps) for copy in order}
        times.append([measured[copy] for copy in range(4)])
    ours = [t[2] / statistics.mean((t[1], t[3])) for t in times]
    self_ratio = [t[3] / t[1] for t in times]
    return Row(
        model=model,
        mode="view" if view else "copy",
        local_ms=1e3 * statistics.median(t[0] for t in times),
        torch_over_local=statistics.median((t[1] + t[3]) / 2 / t[0] for t in times),
        ours_over_local=statistics.median(t[2] / t[0] for t in times),
        ours_over_torch=statistics.median(ours),
        ours_over_torch_quartiles=_quartiles(ours),
        torch_over_torch=statistics.median(self_ratio),
        torch_over_torch_quartiles=_quartiles(self_ratio),
    )


def _rank(rank: int, world_size: int, folder: str, models: list[str], rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    rows = [_measure(model, view, rounds, steps) for model in models for view in (False, True)]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def _table(rows: list[dict[str, Any]], world_size: int) -> Table:
    title = f"Step time, {world_size} ranks, Gloo, one thread a rank, torch {torch.__version__}: median (quartiles)"
    columns = ("model", "mode", "local, ms", "PyTorch / local", "ours / local", "ours / PyTorch", "PyTorch / itself")
    table = Table(*columns, title=title)
    for row in rows:
        ratios = [
            f"{row[key]:.3f} ({row[key + '_quartiles'][0]:.3f}-{row[key + '_quartiles'][1]:.3f})"
            for key in ("ours_over_torch", "torch_over_torch")
        ]
        over_local = [f"{row[key]:.2f}" for key in ("torch_over_local", "ours_over_local")]
        table.add_row(row["model"], row["mode"], f"{row['local_ms']:.2f}", *over_local, *ratios)
    return table


def main(
    rounds: Annotated[int, typer.Option(help="Rounds; each measures all four copies in turn.", min=2)] = 40,
    steps: Annotated[int, typer.Option(help="Steps of one copy in one round.", min=1)] = 10,
    world_size: Annotated[int, typer.Option(help="Ranks.", min=1, max=8)] = 2,
    model: Annotated[list[str] | None, typer.Option(help="Measure only this model; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the rows here as JSON.")] = None,
) -> None:
    """Compare step times and print a table."""
    if unknown := set(model or []) - set(MODELS):
        raise typer.BadParameter(f"unknown model {', '.join(sorted(unknown))}; expected one of {', '.join(MODELS)}")
    # Freed gradients stay with the process: otherwise page faults would hit one copy or another by chance.
    os.environ |= {"MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_MMAP_THRESHOLD_": "4294967296"}
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (world_size, folder, model or list(MODELS), rounds, steps), nprocs=world_size)
        rows = json.loads(Path(folder, "rows.json").read_text())
    Console(width=150).print(_table(rows, world_size))
    if out is not None:
        out.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    typer.run(main)
