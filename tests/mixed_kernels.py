"""One rank of two that compute with different kernels: `python -m tests.mixed_kernels RANK FOLDER STEPS`.

Ranks are handed the same sequence of gradients with every compressor of the table, and write what must be equal on both
to RANK.json: digests by compressor, step, and name of what was computed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks import DiLoCo, Exchanger, ModelAverager
from commhooks.language.randomness import stable_seed
from tests.cases import CASES, Case
from tests.processors import kernels_here

SHAPES = ((24, 40), (40,), (3, 5, 3, 3), (24, 40), (7,), (65, 33), (3, 20, 16), ())
OUTER = ("all-reduce", "int8:block=32")
Found = dict[str, list[dict[str, str]]]


def gradient(rank: int, step: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a rank's gradient: uniform numbers, whose scale differs from element to element."""
    drawn = torch.Generator().manual_seed(stable_seed(rank, step, name))
    numbers = torch.rand((2, *shape), generator=drawn)
    return (numbers[0] - 0.5) * numbers[1]


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a digest of each tensor's bits."""
    return {
        name: hashlib.blake2b(tensor.detach().contiguous().numpy().tobytes(), digest_size=6).hexdigest()
        for name, tensor in tensors.items()
    }


def averaged(case: Case, rank: int, steps: int) -> Iterator[dict[str, str]]:
    """Yield digests of each step's means, and of the state that ranks share."""
    like = {f"layer{number}": torch.zeros(shape) for number, shape in enumerate(SHAPES)}
    with Exchanger(like, case.make()) as exchanger:
        for step in range(steps):
            tensors = {name: gradient(rank, step, name, tuple(one.shape)) for name, one in like.items()}
            exchanger.average(tensors)
            shared = {
                f"{name} of {state.key}": tensor
                for state in exchanger.state.states()
                for name, tensor in state.of_kind("replicated").items()
            }
            yield digests({f"mean of {name}": tensor for name, tensor in tensors.items()} | shared)


def trained(
    averager: type[DiLoCo] | type[ModelAverager], compressor: str, rank: int, steps: int
) -> Iterator[dict[str, str]]:
    """Yield digests of the parameters after each round of two local steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 48), nn.BatchNorm1d(48), nn.Linear(48, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    every = averager(model, optimizer, every=2, compressor=compressor)
    for step in range(steps + 1):
        for name, parameter in model.named_parameters():
            parameter.grad = gradient(rank, step, name, tuple(parameter.shape))
        optimizer.step()
        model(gradient(rank, step, "inputs", (8, 20)))  # for the buffers
        if isinstance(every, DiLoCo):
            every.step()
        else:
            every.average_parameters(model.parameters())
        if step and step % 2 == (0 if isinstance(every, ModelAverager) else 1):
            yield digests(model.state_dict())
    every.close()


def main(rank: int, folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    method = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", method, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found: Found = {case.name: list(averaged(case, rank, steps)) for case in CASES if case.exchanges}
    for averager in (DiLoCo, ModelAverager):
        for compressor in OUTER:
            found[f"{averager.__name__}, {compressor}"] = list(trained(averager, compressor, rank, steps))
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps({"kernels": vars(kernels_here()), "found": found}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
