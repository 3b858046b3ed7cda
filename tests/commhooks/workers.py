"""Run one compressor on N workers in this process, over the lockstep communicator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks import BucketView, Compressor, Context, LockstepGroup, RecordingCommunicator, Slot
from commhooks.policy import Fifo
from commhooks.state import StateTable
from commhooks.statistics import Traffic
from commhooks.task import BucketTask


class Workers:
    """Hold every worker's state, for one bucket of `parameters`."""

    def __init__(
        self,
        compressor: Compressor,
        world_size: int,
        parameters: Sequence[Tensor],
        names: Sequence[str] | None = None,
    ) -> None:
        self.compressor = compressor
        self.world_size = world_size
        self.parameters = list(parameters)
        self.states = [StateTable() for _ in range(world_size)]
        self.communicators = [RecordingCommunicator(c) for c in LockstepGroup(world_size).communicators()]
        self.step_number = 0
        sizes = [p.numel() for p in self.parameters]
        self.memories = [torch.zeros(sum(sizes), dtype=parameters[0].dtype) for _ in range(world_size)]
        named = zip(names or [f"layer{i}" for i in range(len(sizes))], self.parameters, strict=True)
        names_of = list(named)
        self.views = []
        for memory, table in zip(self.memories, self.states, strict=True):
            table.bind(names_of)
            slots = [Slot(p, part, table.of(p)) for p, part in zip(self.parameters, memory.split(sizes), strict=True)]
            self.views.append(BucketView(0, memory, slots))

    @property
    def traffic(self) -> Traffic:
        return self.communicators[0].traffic

    def step(self, gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Average gradients[rank][parameter]; return every worker's means, in the same form."""
        policies = []
        for rank, view in enumerate(self.views):
            view.memory.copy_(torch.cat([flat(g, p) for g, p in zip(gradients[rank], self.parameters, strict=True)]))
            task = BucketTask(
                exchange=self.compressor.compress(view, Context(rank, self.world_size, self.step_number)),
                future=torch.futures.Future(),
                memory=view.memory,
                step=self.step_number,
                index=0,
                is_last=True,
                parameters=lambda: "the test's",
            )
            policy = Fifo(self.communicators[rank], lambda pending: True, finish)
            policy.add(task)
            policies.append(policy)
        while any([policy.turn() for policy in policies]):  # noqa: C419 - every worker takes its turn
            pass
        self.step_number += 1
        return [self._cut(memory) for memory in self.memories]

    def residual(self, rank: int, index: int) -> Tensor:
        """Return a worker's residual for a parameter, in the parameter's shape; zeros where it keeps none."""
        parameter = self.parameters[index]
        kept = self.states[rank].of(parameter).local.get("residual")
        if kept is None:
            return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
        return kept.reshape(-1).as_strided(parameter.shape, parameter.stride())

    def _cut(self, memory: Tensor) -> list[Tensor]:
        parts = memory.clone().split([p.numel() for p in self.parameters])
        return [
            part.as_strided(p.shape, p.stride(), part.storage_offset())
            for part, p in zip(parts, self.parameters, strict=True)
        ]


def flat(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient's elements in the parameter's order in memory."""
    laid_out = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
    laid_out.copy_(gradient)
    return laid_out.as_strided((parameter.numel(),), (1,))


def finish(task: BucketTask) -> None:
    assert task.result is not None and task.result.mean.data_ptr() == task.memory.data_ptr()


def zeros(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def normal(parameters: Sequence[Tensor], world_size: int, seed: int, scale: float = 1.0) -> list[list[Tensor]]:
    """Return one standard normal gradient for each rank and parameter."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(p.shape, generator=generator).mul_(scale).to(p.dtype) for p in parameters]
        for _ in range(world_size)
    ]


def low_rank(parameters: Sequence[Tensor], world_size: int, rank: int, seed: int) -> list[list[Tensor]]:
    """Return gradients whose sum over ranks has at most `rank` for each matrix: one left factor for all ranks."""
    generator = torch.Generator().manual_seed(seed)
    left = [torch.randn(p.shape[0] if p.dim() else 1, rank, generator=generator) for p in parameters]
    gradients = []
    for _ in range(world_size):
        row = []
        for p, factor in zip(parameters, left, strict=True):
            if p.dim() < 2:
                row.append(torch.randn(p.shape, generator=generator).to(p.dtype))
            else:
                right = torch.randn(rank, p.numel() // p.shape[0], generator=generator)
                row.append((factor @ right / rank).view(p.shape).to(p.dtype))
        gradients.append(row)
    return gradients


def mean_of(gradients: Sequence[Sequence[Tensor]], index: int) -> Tensor:
    """Return the true mean over ranks, in float64."""
    return torch.stack([rank[index].double() for rank in gradients]).mean(0)


def relative(error: Tensor, reference: Tensor) -> float:
    """Return the largest error over the largest element."""
    if error.numel() == 0:
        return 0.0
    return float(error.double().abs().max() / reference.double().abs().max().clamp_min(1e-300))
