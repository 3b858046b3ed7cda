"""A task to train: a model, its data and its loss, returned by a function that anyone can write."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, default_collate

from commhooks.experiments.devices import CPU, moved
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks.batches import batch_in_words, leaves_of, place_of
from commhooks.experiments.tasks.optimizers import make_optimizer

Draw = Callable[[int, int, int, int], Any]
"""(seed, step, rank, ranks) -> this rank's batch of one step: a function of its arguments alone."""

HELD_OUT_EVERY = 10  # every tenth example, if the task names no held-out data
_HELD_OUT_BATCHES = 8  # if the data is a function
_HELD_OUT_SEED = 2**31 - 1  # larger than the seed of any run


class _NotALossError(TypeError):
    """A loss function returned something that cannot be minimized."""


class _TaskError(ValueError):
    """An error whose message already names the task."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data and its loss: everything except the communication of gradients.

    A task is made by a function, which is called in every rank under the run's seed: random numbers drawn from torch,
    numpy or Python's `random` while it builds the model and splits the data are the same on every rank.
    """

    model: nn.Module
    """A fresh model, on the CPU: it is moved to the device of the run, and so are batches."""
    data: Dataset[Any] | Sequence[Any] | Draw
    """A dataset with a length, which is shuffled once per epoch and divided among the ranks; or a function
    `(seed, step, rank, ranks) -> batch`."""
    loss: Callable[[nn.Module, Any], Tensor]
    """`loss(model, batch)` calls the model and returns the mean loss over the batch, a scalar."""
    held_out: Dataset[Any] | Sequence[Any] | None = None
    """Data that is never trained on. None: every tenth example of the dataset is held out; or, if the data is a
    function, batches of a seed that no run has."""
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    """Returns the model's metrics on held-out data: "loss", and others such as "accuracy" (0 to 1). None: the mean
    loss."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    """Returns the optimizer for the model. None: SGD with a learning rate of 0.1 and momentum 0.9."""
    schedule: Callable[[int, int], float] | None = None
    """`schedule(step, steps)` returns the factor of the optimizer's learning rate in a step, counted from 0. None:
    1."""
    batch_size: int = 32
    """Examples per rank and step, if the data is a dataset."""
    collate: Callable[[list[Any]], Any] = default_collate
    """Makes a batch from a list of a dataset's examples."""
    steps: int = 100
    """The default number of optimizer steps of a run."""
    description: str = ""
    """A sentence about model, data and optimizer, for the report."""


@dataclass(frozen=True)
class LoadedTask:
    """The task of one run: the result of its function under one seed."""

    spec: Spec
    seed: int
    task: Task
    source: str  # hash of the file with its function: a result is only continued with the same one
    device: torch.device = CPU  # on which the model is, and each batch

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.task.model

    @property
    def name(self) -> str:
        """The task in the form of the command line."""
        return self.spec.label

    @property
    def steps(self) -> int:
        """The default number of optimizer steps of a run."""
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
        found = self.task.optimizer(self.model)
        if not isinstance(found, torch.optim.Optimizer):
            raise _TaskError(
                f"task {self.name!r}: optimizer(model) must return a torch.optim.Optimizer (got {type(found).__name__})"
            )
        return found

    def schedule(self, step: int, steps: int) -> float:
        """Return the factor of the learning rate in one step of `steps`."""
        return 1.0 if self.task.schedule is None else self.task.schedule(step, steps)

    def set_learning_rate(self, optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
        """Give each group of the optimizer its learning rate for one step of `steps`."""
        factor = self.schedule(step, steps)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def batch(self, step: int, rank: int, ranks: int) -> Any:
        """Return this rank's batch of one step, on the device: a function of its arguments and the seed alone.

        Raises:
            ValueError: There are fewer examples than one step of all ranks takes.

        """
        return moved(self._batch(step, rank, ranks), self.device)

    def _batch(self, step: int, rank: int, ranks: int) -> Any:
        # Random crops and the like draw from the global generators: what they draw must depend on nothing else.
        with seeded(mixed(self.seed, step, rank, ranks)):
            if not is_dataset(self.task.data):
                return self.task.data(self.seed, step, rank, ranks)  # type: ignore[operator]  # it is a function
            training, size = self._split[0], self.task.batch_size
            count, together = len(training), size * ranks
            if together > count:
                raise _TaskError(
                    f"task {self.name!r}: a step of {ranks} × {size} examples is more than the {count} there are; use "
                    "fewer ranks or a smaller batch_size"
                )
            epoch, position = divmod(step, count // together)
            begin = position * together + rank * size
            return self._collate([training[n] for n in _order(count, self.seed, epoch)[begin : begin + size]])

    def fingerprint(self, ranks: int) -> str:
        """Return a hash of the first batch of rank 0: ranks with different hashes do not train on the same data."""
        digest = hashlib.sha256()
        for part in leaves_of(self._batch(0, 0, ranks)):
            digest.update(
                part.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                if isinstance(part, Tensor)
                else repr(part).encode()
            )
        return digest.hexdigest()[:16]

    def check(self, ranks: int) -> None:
        """Compute the loss and gradients of the last rank's first batch, as a run will, and evaluate a user's model.

        This changes the model's buffers, so load the task again to train it.

        Raises:
            ValueError: There is too little data for this number of ranks, something fails, or the loss does not depend
                on a parameter.

        """
        with seeded(self.seed):
            with self._failing("its first batch"):
                batch = self.batch(0, ranks - 1, ranks)
            with self._failing(f"loss(model, batch) on the first batch, {batch_in_words(batch)},"):
                self._scalar(self.task.loss(self.model, batch)).backward()
        unused = [name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        self.model.zero_grad()
        if unused:
            raise ValueError(
                f"task {self.name!r}: the loss does not depend on {len(unused)} of the model's parameters "
                f"({', '.join(unused[:3])}{', ...' if len(unused) > 3 else ''}); use them, remove them, or call "
                "requires_grad_(False) on them"
            )
        if self.source:  # the built-in ones are known to work, and some take seconds
            with self._failing("its evaluation"):
                self.evaluate()
            with self._failing("its optimizer or schedule"):
                self.set_learning_rate(self.optimizer(), 0, self.steps)

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Turn any error of the user's code into a ValueError that names the task and the place."""
        try:
            yield
        except _TaskError:
            raise
        except Exception as error:
            kind = "" if isinstance(error, _NotALossError) else f"{type(error).__name__}: "
            hint = (
                f" (the model and its batches are on {self.device}: move other tensors to the device of the model)"
                if self.device != CPU and "same device" in str(error)
                else ""
            )
            raise _TaskError(f"task {self.name!r}: {what} failed: {kind}{error}{hint}{place_of(error)}") from error

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over the batch, a scalar.

        Raises:
            TypeError: The task's function returned something else.

        """
        try:
            return self._scalar(self.task.loss(model, batch))
        except _NotALossError as error:
            raise TypeError(f"task {self.name!r}: loss(model, batch) failed: {error}") from None

    @staticmethod
    def _scalar(loss: object) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise _NotALossError(f"it must return a scalar tensor, the mean over the batch (got {got})")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise _NotALossError("what it returned has no gradient: compute it from the model's output, not detached")
        return loss

    def evaluate(self, model: nn.Module | None = None) -> dict[str, float]:
        """Return the model's metrics on held-out data, "loss" among them; the model's mode is left unchanged.

        Args:
            model: A copy of the task's model, to evaluate in its place.

        Raises:
            ValueError: The task's own function returned something else.

        """
        model = self.model if model is None else model
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), seeded(self.seed):
                own = self.task.evaluate
                found = {"loss": self._held_out_loss(model)} if own is None else own(model)
        finally:
            model.train(was_training)
        if not isinstance(found, Mapping) or "loss" not in found:
            got = ", ".join(found) if isinstance(found, Mapping) else type(found).__name__
            raise _TaskError(
                f"task {self.name!r}: evaluate(model) must return a dict of numbers with 'loss' (got {got})"
            )
        return {name: float(value) for name, value in found.items()}

    def _held_out_loss(self, model: nn.Module) -> float:
        total, weight = 0.0, 0
        for count, batch in self._held_out_batches():
            total += count * self.loss(model, batch).item()
            weight += count
        return total / weight

    def _held_out_batches(self) -> Iterator[tuple[int, Any]]:
        """Yield every batch of held-out data, with the weight of its mean."""
        if not is_dataset(self.task.data) and self.task.held_out is None:
            for number in range(_HELD_OUT_BATCHES):
                batch = self.task.data(_HELD_OUT_SEED, number, 0, 1)  # type: ignore[operator]  # it is a function
                yield 1, moved(batch, self.device)
            return
        held_out, size = self._split[1], self.task.batch_size
        for begin in range(0, len(held_out), size):
            examples = [held_out[n] for n in range(begin, min(begin + size, len(held_out)))]
            yield len(examples), moved(self._collate(examples), self.device)

    def _collate(self, examples: list[Any]) -> Any:
        try:
            return self.task.collate(examples)
        except (TypeError, RuntimeError, ValueError, KeyError) as error:
            raise _TaskError(
                f"task {self.name!r}: examples cannot be made into a batch ({error}); return a Task with `collate`, a "
                "function from a list of examples to a batch"
            ) from error

    @cached_property
    def _split(self) -> tuple[Any, Any]:
        """The dataset to train on, and the one held out."""
        data, held_out = self.task.data, self.task.held_out
        if held_out is not None or not is_dataset(data):
            return data, held_out
        whole: Any = data  # PyTorch's Subset accepts whatever can be indexed
        places = range(len(whole))
        kept = [place for place in places if (place + 1) % HELD_OUT_EVERY]
        return Subset(whole, kept), Subset(whole, list(places[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]))


def is_dataset(data: object) -> bool:
    """Return whether the data can be indexed: a torch Dataset, a list, or a dataset of another library."""
    return hasattr(data, "__getitem__")


@lru_cache(maxsize=8)  # the runs of a comparison group take turns in the same epoch
def _order(count: int, seed: int, epoch: int) -> list[int]:
    """Return the order of a dataset's examples in an epoch."""
    return torch.randperm(count, generator=generator_for(seed, epoch)).tolist()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of torch, numpy and Python, and restore them afterwards."""
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002  # the one that others' code draws from
    try:
        with torch.random.fork_rng(devices=[]):
            seed_generators(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002  # the same


def seed_generators(seed: int) -> None:
    """Seed the generators of torch, numpy and Python, from which others' code draws."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # the same
    random.seed(seed)


def generator_for(*numbers: int) -> torch.Generator:
    """Return a generator whose numbers depend only on the given numbers."""
    return torch.Generator().manual_seed(mixed(*numbers))


def mixed(*numbers: int) -> int:
    """Return a seed that depends on all the numbers and their order."""
    state = 0
    for number in numbers:
        state = (state * 1_000_003 + number + 1) % (2**63 - 25)
    return state
