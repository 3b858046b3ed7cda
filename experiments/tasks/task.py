"""What is trained: a model, its data and its loss, returned by a function that anyone can write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, default_collate

from ..specs import Spec
from .optimizers import make_optimizer

SizeType = TypeVar("SizeType")
Draw = Callable[[int, int, int, int], Any]
"""(seed, step, rank, ranks) -> this rank's batch of one step: a function of its arguments alone."""

_HELD_OUT_EVERY = 10  # every tenth example, if the task names no held-out data
_HELD_OUT_BATCHES = 8  # if the data is a function
_HELD_OUT_SEED = 2**31 - 1  # larger than the seed of any run


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data and its loss: everything except how gradients are communicated.

    A task is made by a function, which is called in every rank under the run's seed: random numbers drawn from torch
    while it builds the model are the same on every rank.
    """

    model: nn.Module
    """A fresh model, on the CPU."""
    data: Dataset[Any] | Draw
    """A dataset with a length, which is shuffled once per epoch and divided among the ranks; or a function
    `(seed, step, rank, ranks) -> batch`."""
    loss: Callable[[nn.Module, Any], Tensor]
    """`loss(model, batch)` calls the model and returns the mean loss over the batch, a scalar."""
    held_out: Dataset[Any] | None = None
    """Data that is never trained on. None: every tenth example of the dataset is held out; or, if the data is a
    function, batches of a seed that no run has."""
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    """Metrics of the model on held-out data: "loss", and others such as "accuracy" (0 to 1). None: the mean loss."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    """Returns the optimizer for the model. None: SGD with a learning rate of 0.1 and momentum 0.9."""
    schedule: Callable[[int, int], float] | None = None
    """`schedule(step, steps)` is what the optimizer's learning rate is multiplied by in a step, from 0 on. None: 1."""
    batch_size: int = 32
    """Examples per rank and step, if the data is a dataset."""
    collate: Callable[[list[Any]], Any] = default_collate
    """Makes a batch from a list of a dataset's examples."""
    steps: int = 100
    """Optimizer steps of a run that does not say how many."""
    description: str = ""
    """A sentence about model, data and optimizer, for the report."""


@dataclass(frozen=True)
class LoadedTask:
    """A task of one run: its function's result, under one seed."""

    spec: Spec
    seed: int
    task: Task
    source: str  # hash of the file with its function: a result is only continued with the same one

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.task.model

    @property
    def name(self) -> str:
        """The task as it is written on the command line."""
        return self.spec.label

    @property
    def steps(self) -> int:
        """How many optimizer steps a run takes by default."""
        return self.task.steps

    @property
    def description(self) -> str:
        """One sentence for the report."""
        return self.task.description or f"the model of {self.spec.name}"

    def optimizer(self, spec: Spec | None = None) -> torch.optim.Optimizer:
        """Return the optimizer for the model: the task's own, or another one by name.

        Raises:
            ValueError: There is no such optimizer, or it has no such setting.

        """
        if spec is not None:
            return make_optimizer(spec, self.model)
        if self.task.optimizer is None:
            return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        return self.task.optimizer(self.model)

    def schedule(self, step: int, steps: int) -> float:
        """Return what the learning rate is multiplied by in one step of `steps`."""
        return 1.0 if self.task.schedule is None else self.task.schedule(step, steps)

    def set_learning_rate(self, optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
        """Give each group of the optimizer its learning rate for one step of `steps`."""
        factor = self.schedule(step, steps)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def batch(self, step: int, rank: int, ranks: int) -> Any:
        """Return this rank's batch of one step: a function of its arguments and the seed alone.

        Raises:
            ValueError: There are fewer examples than one step of all ranks takes.

        """
        if not isinstance(self.task.data, Dataset):
            return self.task.data(self.seed, step, rank, ranks)
        training, size = self._split[0], self.task.batch_size
        together = size * ranks
        if together > _length(training):
            raise ValueError(
                f"task {self.name!r}: {ranks} ranks with {size} examples each want more than the {_length(training)} "
                "there are; use fewer ranks or a smaller batch size"
            )
        epoch, position = divmod(step, _length(training) // together)
        order = torch.randperm(_length(training), generator=generator_for(self.seed, epoch))
        begin = position * together + rank * size
        return self.task.collate([training[int(n)] for n in order[begin : begin + size]])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over the batch, a scalar.

        Raises:
            TypeError: The task's function returned something else.

        """
        loss = self.task.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"task {self.name!r}: loss(model, batch) must return a scalar tensor (got {got})")
        return loss

    def evaluate(self) -> dict[str, float]:
        """Return the model's metrics on held-out data, "loss" among them; the model's mode is left unchanged."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                own = self.task.evaluate
                found = {"loss": self._held_out_loss()} if own is None else dict(own(self.model))
        finally:
            self.model.train(was_training)
        if "loss" not in found:
            raise ValueError(f"task {self.name!r}: evaluate(model) must return 'loss' (got {', '.join(found)})")
        return {name: float(value) for name, value in found.items()}

    def _held_out_loss(self) -> float:
        batches = list(self._held_out_batches())
        total = sum(count for count, _ in batches)
        return sum(count * self.loss(self.model, batch).item() for count, batch in batches) / total

    def _held_out_batches(self) -> Iterator[tuple[int, Any]]:
        """Yield every batch of held-out data, with the weight of its mean."""
        if not isinstance(self.task.data, Dataset) and self.task.held_out is None:
            for number in range(_HELD_OUT_BATCHES):
                yield 1, self.task.data(_HELD_OUT_SEED, number, 0, 1)
            return
        held_out, size = self._split[1], self.task.batch_size
        for begin in range(0, _length(held_out), size):
            examples = [held_out[n] for n in range(begin, min(begin + size, _length(held_out)))]
            yield len(examples), self.task.collate(examples)

    @cached_property
    def _split(self) -> tuple[Any, Any]:
        """The dataset to train on, and the one held out."""
        data, held_out = self.task.data, self.task.held_out
        if held_out is not None or not isinstance(data, Dataset):
            return data, held_out
        places = range(_length(data))
        kept = [place for place in places if (place + 1) % _HELD_OUT_EVERY]
        return Subset(data, kept), Subset(data, list(places[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]))


def _length(data: Any) -> int:
    return len(data)


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Draw torch's random numbers from these numbers alone, and restore the generator afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mixed(*numbers))
        yield


def size_named(sizes: Mapping[str, SizeType], size: str, task: str) -> SizeType:
    """Return the preset of this name.

    Raises:
        ValueError: There is no such preset.

    """
    if size not in sizes:
        raise ValueError(f"size {size!r} of task {task!r} is not known: expected one of {', '.join(sizes)}")
    return sizes[size]


def generator_for(*numbers: int) -> torch.Generator:
    """Return a generator whose numbers depend only on the given numbers."""
    return torch.Generator().manual_seed(mixed(*numbers))


def mixed(*numbers: int) -> int:
    """Return a seed that depends on all the numbers and their order."""
    state = 0
    for number in numbers:
        state = (state * 1_000_003 + number + 1) % (2**63 - 25)
    return state
