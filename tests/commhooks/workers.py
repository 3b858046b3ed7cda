"""Run one compressor on N workers in this process, over the lockstep communicator."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks import BucketView, Compressor, Context, LockstepGroup, RecordingCommunicator, Slot, StepVerdict
from commhooks.compressors.powersgd.matrices import form_of
from commhooks.scheduling.fused import Fused
from commhooks.scheduling.ledger import Ledger, Traffic
from commhooks.scheduling.task import BucketTask
from commhooks.scheduling.thread import POLICIES
from commhooks.state.table import StateTable


class Workers:
    """Hold every worker's state, for `parameters` dealt out to so many buckets."""

    def __init__(
        self,
        compressor: Compressor,
        world_size: int,
        parameters: Sequence[Tensor],
        names: Sequence[str] | None = None,
        buckets: int = 1,
        policy: str = "fifo",
        storage: str = "fp32",
    ) -> None:
        self.compressor = compressor
        self.world_size = world_size
        self.parameters = list(parameters)
        self.states = [StateTable(storage) for _ in range(world_size)]
        self.communicators = [RecordingCommunicator(c) for c in LockstepGroup(world_size).communicators()]
        # Policies take turns, each doing the same at its turn, so an answer is there when it is waited for.
        self.policies = [POLICIES[policy](c, lambda pending: True, self._finish) for c in self.communicators]
        self.ledger = Ledger()
        self.step_number = 0
        self._finished = 0
        order = list(range(len(self.parameters)))
        named = list(zip(names or [f"layer{i}" for i in order], self.parameters, strict=True))
        for table in self.states:
            table.bind(named)
        self.deal([order[bucket::buckets] for bucket in range(buckets)])

    def _view(self, table: StateTable, index: int, members: Sequence[int]) -> BucketView:
        parameters = [self.parameters[member] for member in members]
        sizes = [p.numel() for p in parameters]
        memory = torch.zeros(sum(sizes), dtype=parameters[0].dtype)
        slots = [Slot(p, part, table.of(p)) for p, part in zip(parameters, memory.split(sizes), strict=True)]
        return BucketView(index, memory, slots)

    @property
    def traffic(self) -> Traffic:
        return self.communicators[0].traffic

    @property
    def memories(self) -> list[Tensor]:
        return [view.memory for views in self.views for view in views]

    def step(self, gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Average gradients[rank][parameter]; return every worker's means, in the same form."""
        self._finished = 0
        for rank, views in enumerate(self.views):
            verdict = StepVerdict() if isinstance(self.policies[rank], Fused) else None
            for view, members in zip(views, self.dealt, strict=True):
                view.memory.copy_(torch.cat([flat(gradients[rank][i], self.parameters[i]) for i in members]))
                context = Context(rank, self.world_size, self.step_number, verdict)
                self.policies[rank].add(self._task(view, context, is_last=view is views[-1]))
        while any([policy.turn() for policy in self.policies]):  # noqa: C419 - every worker takes its turn
            pass
        assert self._finished == self.world_size * len(self.dealt), "some bucket was left without its mean"
        self.step_number += 1
        return [self._means(views) for views in self.views]

    def _task(self, view: BucketView, context: Context, *, is_last: bool) -> BucketTask:
        return BucketTask(
            exchange=self.compressor.compress(view, context),
            future=torch.futures.Future(),
            memory=view.memory,
            step=self.step_number,
            index=view.index,
            is_last=is_last,
            parameters=lambda: "the test's",
            layout=view.layout,
            world_size=self.world_size,
            verdict=context.verdict,
        )

    def _finish(self, task: BucketTask) -> None:
        assert task.result is not None and task.result.mean.data_ptr() == task.memory.data_ptr()
        self._finished += 1
        if any(view.memory is task.memory for view in self.views[0]):
            self.ledger.enter(task, self.traffic)

    def saved(self) -> bytes:
        """Return every worker's state as a file of torch.save holds it."""
        file = io.BytesIO()
        torch.save({"step": self.step_number, "states": [table.export() for table in self.states]}, file)
        return file.getvalue()

    def resume(self, saved: bytes) -> None:
        """Go on from what other workers saved; read as torch.load reads by default."""
        read = torch.load(io.BytesIO(saved))
        self.step_number = read["step"]
        for table, (replicated, local) in zip(self.states, read["states"], strict=True):
            table.load(replicated, local)
        self.deal(self.dealt)

    def deal(self, dealt: list[list[int]]) -> None:
        """Put the parameters of these numbers into one bucket each."""
        self.dealt = dealt
        self.views = [
            [self._view(table, index, members) for index, members in enumerate(dealt)] for table in self.states
        ]

    def residual(self, rank: int, index: int) -> Tensor:
        """Return a worker's residual for a parameter, in the parameter's shape; zeros where it keeps none."""
        parameter = self.parameters[index]
        kept = self.states[rank].of(parameter).local.get("residual")
        if kept is None:
            return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
        return kept.reshape(-1).as_strided(parameter.shape, parameter.stride())

    def _means(self, views: Sequence[BucketView]) -> list[Tensor]:
        means: dict[int, Tensor] = {}
        for view, members in zip(views, self.dealt, strict=True):
            parts = view.memory.clone().split([self.parameters[i].numel() for i in members])
            means |= dict(zip(members, parts, strict=True))
        return [
            means[i].as_strided(p.shape, p.stride(), means[i].storage_offset()) for i, p in enumerate(self.parameters)
        ]


def flat(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient's elements in the parameter's order in memory."""
    laid_out = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
    laid_out.copy_(gradient)
    return laid_out.as_strided((parameter.numel(),), (1,))


def zeros(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def normal(parameters: Sequence[Tensor], world_size: int, seed: int, scale: float = 1.0) -> list[list[Tensor]]:
    """Return one standard normal gradient for each rank and parameter."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(p.shape, generator=generator).mul_(scale).to(p.dtype) for p in parameters]
        for _ in range(world_size)
    ]


def low_rank(
    parameters: Sequence[Tensor], world_size: int, rank: int, seed: int, rule: str = "first-dimension"
) -> list[list[Tensor]]:
    """Return gradients whose mean has at most `rank`, as matrices by `rule`: all ranks share a left factor.

    In float64; parameters that are narrower hold them rounded.
    """
    generator = torch.Generator().manual_seed(seed)
    forms = [form_of(p, rule) for p in parameters]
    left = [torch.randn(form.n if form else 1, rank, generator=generator).double() for form in forms]
    gradients = []
    for _ in range(world_size):
        row = []
        for p, form, factor in zip(parameters, forms, left, strict=True):
            memory = torch.randn(p.numel(), generator=generator).double()
            if form:
                form.view(memory).copy_(factor @ torch.randn(rank, form.m, generator=generator).double() / rank)
            row.append(memory.to(p.dtype).as_strided(p.shape, p.stride()))
        gradients.append(row)
    return gradients


def mean_of(gradients: Sequence[Sequence[Tensor]], index: int) -> Tensor:
    """Return the true mean over ranks, in float64."""
    return torch.stack([rank[index].double() for rank in gradients]).mean(0)


def largest(*tensors: Tensor) -> float:
    """Return the largest magnitude of any element; 0 if there are none. NaN, which no comparison finds, is an error."""
    magnitudes = [float(tensor.double().abs().max()) for tensor in tensors if tensor.numel()]
    assert not any(map(math.isnan, magnitudes))
    return max(magnitudes, default=0.0)


def relative(error: Tensor, reference: Tensor) -> float:
    """Return the largest error over the largest element."""
    if error.numel() == 0:
        return 0.0
    return largest(error) / max(largest(reference), 1e-300)
