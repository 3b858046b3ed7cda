"""What a situation is: a small program for two ranks, and what the guard is expected to make of it.

`silent.py` has programs whose replicas drift apart without the guard; `sound.py` has programs of which it must say
nothing. Each runs under every wrapper and optimizer (`running.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

import commhooks
import ddp_core

CORE, CORE_ATTACH = "ddp_core", "ddp_core, attach"
TORCH_ATTACH, TORCH_HOOK = "PyTorch, attach", "PyTorch, hook"
WRAPPERS = (CORE, CORE_ATTACH, TORCH_ATTACH, TORCH_HOOK)
SGD, ADAMW = "SGD", "AdamW fused"
OPTIMIZERS = (SGD, ADAMW)

RAISES, WARNS, RIGHT = "raises", "warns", "right"
MISSED = "missed"  # replicas drift apart, and nobody says so
OTHER_ERROR = "another error"  # one that is not the guard's
LOCAL = "local"  # no word, and the ranks may differ on purpose

Program = Callable[["Run"], None]


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A program, and what is expected of it under each wrapper."""

    name: str
    program: Program
    expected: Mapping[str, str]


class Situations(dict[str, Situation]):
    """Situations by name; decorate a program with it to add one."""

    def __init__(self, expected: str) -> None:
        super().__init__()
        self._expected = expected  # unless a program says otherwise

    def __call__(self, expected: str = "", *, but: Mapping[str, str] | None = None) -> Callable[[Program], Program]:
        """Add a program.

        expected: what the guard must make of it, under all wrappers.
        but: what else is expected under some of them.
        """
        return functools.partial(self._add, expected or self._expected, but or {})

    def calls(self, **programs: Program) -> None:
        """Add programs of one call each, by name."""
        for name, program in programs.items():
            self._add(self._expected, {}, program, name)

    def _add(self, expected: str, but: Mapping[str, str], program: Program, name: str = "") -> Program:
        name = name or program.__name__
        assert name not in self, f"two situations are called {name}"
        under = {wrapper: but.get(wrapper, expected) for wrapper in WRAPPERS}
        self[name] = Situation(name=name, program=program, expected=under)
        return program


class Net(nn.Module):
    """An encoder of two layers, and a head, which can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.extra: nn.Module | None = None

    def encode(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.second(self.first(x).relu())
        return encoded

    def forward(self, x: Tensor, *, without_head: bool = False) -> Tensor:
        encoded = self.encode(x)
        if without_head:
            return encoded
        more = encoded if self.extra is None else encoded + self.extra(encoded)
        output: Tensor = self.head(more)
        return output


def perceptron(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


class Run:
    """What a program gets: how to wrap a model, an optimizer, and data of this rank's own."""

    def __init__(self, wrapper: str, optimizer: str, rank: int) -> None:
        self.wrapper, self.rank = wrapper, rank
        self._optimizer = optimizer
        self._generator = torch.Generator().manual_seed(100 * rank)
        self.attachment: commhooks.Handle[Any] | None = None
        self.trained: list[nn.Module] = []
        """The modules that must be equal on all ranks in the end."""
        torch.manual_seed(0)

    @functools.cached_property
    def model(self) -> Any:
        """A wrapped `Net`."""
        return self.wrap(Net())

    @functools.cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer of all parameters of `model`."""
        return self.optimizer_of(self.model.parameters())

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """Return the module in a DDP, with what belongs to this wrapper attached or registered."""
        ddp: Any = (ddp_core.DistributedDataParallel if "ddp_core" in self.wrapper else TorchDDP)(module, **options)
        if "attach" in self.wrapper:
            self.attachment = commhooks.attach(ddp, "fp16")
        if "hook" in self.wrapper:
            ddp.register_comm_hook(options.get("process_group"), commhooks.bf16_compress_hook)
        self.trained.append(module)
        return ddp

    def optimizer_of(self, parameters: Iterable[Any], **options: Any) -> Optimizer:
        """Return an optimizer of this run's kind."""
        if self._optimizer == ADAMW:
            return torch.optim.AdamW(parameters, lr=0.01, fused=True, **options)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, **options)

    def batch(self, samples: int = 6) -> Tensor:
        """Return samples that no other rank has."""
        return torch.randn(samples, 8, generator=self._generator)

    def loss(self, function: Callable[..., Any], **options: Any) -> Tensor:
        """Return the loss of a model, or a part of it, on a new batch."""
        return squares(function(self.batch(), **options))

    def backward(self, function: Callable[..., Any], **options: Any) -> None:
        """Run a forward and a backward pass on a new batch."""
        self.loss(function, **options).backward()

    def backward_in_no_sync(self) -> None:
        """Run a forward and a backward pass whose gradients are not averaged."""
        with self.model.no_sync():
            self.backward(self.model)

    def steps(self, count: int = 4, *optimizers: Optimizer, set_to_none: bool = True) -> Iterator[int]:
        """Yield the number of each step: gradients are zeroed before, and the optimizers step after it."""
        chosen = optimizers or (self.optimizer,)
        for step in range(count):
            for optimizer in chosen:
                optimizer.zero_grad(set_to_none=set_to_none)
            yield step
            for optimizer in chosen:
                optimizer.step()

    def train_module(self, module: nn.Module, optimizer: Optimizer | None = None, **options: Any) -> None:
        """Wrap a module, and train it as everybody does."""
        self.train(self.wrap(module, **options), optimizer or self.optimizer_of(module.parameters()))

    def train(self, model: Any = None, optimizer: Optimizer | None = None, steps: int = 4) -> None:
        """Train as everybody does."""
        for _ in self.steps(steps, optimizer or self.optimizer):
            self.backward(self.model if model is None else model)


def squares(outputs: Tensor) -> Tensor:
    """Return the loss of a model's outputs."""
    return outputs.square().mean()


def average(tensors: Iterable[Tensor | None]) -> None:
    """Average tensors over the ranks, in place."""
    for tensor in tensors:
        assert tensor is not None, "every parameter has a gradient"
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())


def put(parameters: Iterable[Tensor], gradients: Iterable[Tensor]) -> None:
    """Make these the parameters' gradients."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
