"""The parts that are exchanged in turn: fragments of the parameters, and the model's buffers.

Tensors have the parameters' and buffers' shapes. They are sent in at least fp32, from the device that keeps them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from commhooks.exchange.buckets import InTurns
from commhooks.exchange.exchanger import Averaging, TensorChannel, TensorFeed
from commhooks.tensors import all_finite, bytes_of, cloned, computing_dtype, local
from commhooks.unwrapping import plain_name

BUFFERS = "buffers"
"""The channel of the buffers."""
WEIGHT = "ranks with finite tensors"
"""The name of a rank's weight, which is 1 unless they are weighted, and 0 where buffers or moments are not finite."""


Before = tuple[dict[str, Tensor], dict[Tensor, Any], list[dict[str, Any]]]
"""The outer copies by name, the outer optimizer's state of each, and its groups' values, such as counters."""


class RoundPart(ABC):
    """A part that is sent at one turn of each round, and whose means are used `delay` steps later."""

    exchanger: TensorChannel
    like: Mapping[str, Tensor]
    """Tensors with the names, shapes, dtypes and devices of the tensors that are sent."""

    def __init__(self, turn: int) -> None:
        self.turn = turn
        """Its step within a round, from 1 on: the means are due at that step of every round."""
        self.due: int | None = None
        """The step at which the means under way are due; None if there are none."""
        self._averaging: Averaging | None = None
        self._loaded: Mapping[str, Tensor] | None = None

    @abstractmethod
    def write(self, room: Mapping[str, Tensor]) -> None:
        """Write the tensors to send into the exchanger's buffers."""

    def is_turn(self, step: int, every: int) -> bool:
        """Return whether no exchange is under way, and one that begins now would be due at this step."""
        return self.due is None and (step - self.turn) % every == 0

    def begin(self, due: int, weight: float | None = None) -> None:
        """Start averaging this part, with a weight if the exchanger is weighted; its means are due at step `due`."""
        self.write(self.exchanger.buffers)
        self._averaging, self.due = self.exchanger.begin(weight=weight), due

    def means(self) -> Mapping[str, Tensor]:
        """Wait for the means under way, and return them by name; raise the error if the exchange failed."""
        if self._loaded is not None:
            return self._loaded
        assert self._averaging is not None, "nothing is under way"
        return self._averaging.means

    def take(self) -> Mapping[str, Tensor]:
        """Wait for the means, return them, and allow the next exchange; they stay valid until its `begin`."""
        means = self.means()
        self.due = None
        self._averaging = self._loaded = None
        return means

    def state(self) -> dict[str, Any]:
        """Wait for the means, and return them with the step at which they are due, without copying them."""
        return {} if self.due is None else {"at": self.due, "mean": dict(self.means())}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        self._averaging = self._loaded = None
        self.due = state.get("at")
        if self.due is not None:
            self._loaded = {name: torch.empty_like(self.like[name]).copy_(mean) for name, mean in state["mean"].items()}


class PartsFeed(TensorFeed):
    """The parts of a DiLoCo: its fragments, which may be weighted and share memory, and the buffers, which do not."""

    caller = "DiLoCo"
    ended = "this DiLoCo was closed"
    label = "DiLoCo"

    def is_weighted(self, channel: str) -> bool:
        """Return whether each rank has a weight in a channel's mean."""
        return channel != BUFFERS and super().is_weighted(channel)

    def is_replaceable(self, channel: str) -> bool:
        """Return whether `replace` gives a channel another compressor: buffers are averaged exactly."""
        return channel != BUFFERS

    def memory_of(self, channel: str) -> InTurns | None:
        """Return the memory that a channel shares with others; None if it has its own."""
        return None if channel == BUFFERS else super().memory_of(channel)


class Fragment(RoundPart):
    """Some of the parameters, with their outer copies, which all ranks share.

    `named` are the fragment's parameters; of sharded ones, this rank's shards are exchanged. The outer copies are in at
    least fp32. `on_host` keeps them in the host's memory, pinned if the parameters are on another device; each is
    copied to that device and back separately.
    """

    def __init__(self, named: Mapping[str, Tensor], turn: int, *, on_host: bool) -> None:
        super().__init__(turn)
        self.named = named
        self.outer: dict[str, Tensor] = {name: _outer_copy(local(p), on_host=on_host) for name, p in named.items()}
        self.like: Mapping[str, Tensor] = self.outer

    def begin_here(self) -> None:
        """Set the outer copies to the parameters."""
        for name, outer in self.outer.items():
            outer.copy_(local(self.named[name]))

    def write(self, room: Mapping[str, Tensor]) -> None:
        """Write each parameter's difference from its outer copy, which is first rounded to the parameter's dtype."""
        for name, parameter in self.named.items():
            outer, went = self.outer[name], room[name].copy_(local(parameter))
            begun = outer if parameter.dtype == outer.dtype else outer.to(parameter.dtype).to(outer.dtype)
            torch.sub(begun, went, out=went)

    def apply(self, means: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        """Take a step of the outer optimizer with the means as this fragment's gradients; other fragments have none."""
        for name, outer in self.outer.items():
            outer.grad = means[name]
        optimizer.step()
        for outer in self.outer.values():
            outer.grad = None

    def foresee(self, optimizer: Optimizer) -> Before:
        """Take the outer step of the means under way early; return the values with which `go_back` undoes it."""
        copies = {name: outer.clone() for name, outer in self.outer.items()}
        kept = {outer: optimizer.state[outer] for outer in self.outer.values() if outer in optimizer.state}
        groups = [
            {name: cloned(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        before = copies, {outer: cloned(dict(state)) for outer, state in kept.items()}, cloned(groups)
        means = self.means()
        if all_finite(means.values()):
            self.apply(means, optimizer)
        return before

    def go_back(self, optimizer: Optimizer, before: Before) -> None:
        """Undo `foresee`; begin with the last fragment of several, since they share the groups' counters."""
        copies, states, groups = before
        for group, counts in zip(optimizer.param_groups, groups, strict=True):
            group.update(counts | {"params": group["params"]})
        for name, outer in self.outer.items():
            outer.copy_(copies[name])
            optimizer.state.pop(outer, None)
            if outer in states:
                optimizer.state[outer] = states[outer]

    def mix(self, mixing: float) -> None:
        """Set each parameter to mixing·parameter + (1 - mixing)·outer copy."""
        for name, parameter in self.named.items():
            outer, own = self.outer[name], local(parameter)
            if mixing:
                own.lerp_(outer.to(own.device, own.dtype), 1 - mixing)
            else:
                own.copy_(outer)

    def mend(self) -> None:
        """Set parameters that are not finite to their outer copies."""
        for name, parameter in self.named.items():
            if not all_finite([own := local(parameter)]):
                own.copy_(self.outer[name])


class Buffers(RoundPart):
    """The model's buffers: floating-point ones are averaged where they are finite, others copied from rank 0.

    Floating-point buffers, complex ones included, are sent in at least fp32. Others are sent byte by byte, each byte as
    fp32: the sum of rank 0's and the other ranks' zeros is then exact, as it would not be for large integers.
    `weighted`: floating-point ones are multiplied by the rank's weight, in fp64, which holds the products, and the mean
    is divided by the mean weight. `named` are the buffers of `model` that are exchanged; the model may replace them.
    """

    def __init__(self, model: Module, named: Mapping[str, Tensor], turn: int, *, weighted: bool) -> None:
        super().__init__(turn)
        self._model = model
        self._described = {name: _description(buffer) for name, buffer in named.items()}
        self._is_weighted = weighted
        self._weight = 1.0
        self._senders = 1
        """The number of ranks that sent what is under way."""
        device = next(iter(named.values())).device
        wide = torch.float64 if weighted else torch.float32
        self.like: Mapping[str, Tensor] = {
            **{name: _as_sent(buffer, wide).clone() for name, buffer in named.items()},
            WEIGHT: torch.empty((), dtype=wide, device=device),
        }

    def begin(self, due: int, weight: float | None = None) -> None:
        """Start averaging the buffers, as `RoundPart.begin` does; the exchanger knows of no weights."""
        self._weight = 1.0 if weight is None else weight
        self._senders = self.exchanger.engine.connection.world_size
        super().begin(due)

    def state(self) -> dict[str, Any]:
        """Return the means under way with the number of ranks that sent them, as another number may load them."""
        return super().state() | ({} if self.due is None else {"ranks": self._senders})

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        super().load(state)
        self._senders = state.get("ranks", self.exchanger.engine.connection.world_size)

    def now(self) -> dict[str, Tensor]:
        """Return the model's buffers as they are now, by name; fail if one is gone, or has another shape or dtype."""
        held = {plain_name(name): buffer for name, buffer in self._model.named_buffers(remove_duplicate=False)}
        named = {name: local(held[name]) for name in self._described if name in held}
        for name, before in self._described.items():
            found = _description(named[name]) if name in named else "gone"
            if found != before:
                self.exchanger.fail(
                    f"buffer {name!r} is {found} now, and was {before} when DiLoCo was made; make it again."
                )
        return named

    def write(self, room: Mapping[str, Tensor]) -> None:
        """Write floating-point buffers if all of them are finite, and on rank 0 the others."""
        rank = self.exchanger.engine.connection.rank
        named = self.now()
        for name, buffer in named.items():
            if _is_averaged(buffer) or rank == 0:
                room[name].copy_(_as_sent(buffer, room[name].dtype))
            else:
                room[name].zero_()
        averaged = [room[name] for name, buffer in named.items() if _is_averaged(buffer)]
        weigh(averaged, room[WEIGHT], self._weight, are_finite=bool(all_finite(averaged)))

    def apply(self, means: Mapping[str, Tensor]) -> None:
        """Set the buffers; leave floating-point ones as they are if no rank with a weight has finite ones."""
        ranks = self._senders
        weight = mean_weight(means[WEIGHT], ranks, weighted=self._is_weighted)
        for name, buffer in self.now().items():
            mean = means[name]
            if not _is_averaged(buffer):
                buffer.copy_((mean * ranks).round().to(torch.uint8).view(buffer.dtype).view(buffer.shape))
            elif weight:
                mean = mean if weight == 1 else mean / weight
                buffer.copy_(torch.complex(*mean.unbind(-1)) if buffer.is_complex() else mean)


def weigh(sent: Iterable[Tensor], place: Tensor, weight: float, *, are_finite: bool) -> None:
    """Multiply tensors by this rank's weight, 0 if they are not finite, and write it into its place."""
    weight = weight if are_finite else 0.0
    for one in sent if weight != 1 else ():
        one.mul_(weight) if weight else one.zero_()
    place.fill_(weight)


def mean_weight(mean: Tensor, ranks: int, *, weighted: bool) -> float:
    """Return the mean of the weights, by which means are divided; exactly, if each of them is 0 or 1."""
    return float(mean) if weighted else round(float(mean) * ranks) / ranks


def _description(buffer: Tensor) -> str:
    return f"of shape {tuple(buffer.shape)} and {buffer.dtype}"


def _is_averaged(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _as_sent(buffer: Tensor, wide: torch.dtype) -> Tensor:
    """Return a buffer as it is sent: complex numbers as pairs of real ones, in at least `wide`; bytes in fp32."""
    if not _is_averaged(buffer):
        return bytes_of(buffer).to(torch.float32)
    real = torch.view_as_real(buffer.resolve_conj()) if buffer.is_complex() else buffer
    return real.to(torch.float64 if real.dtype == torch.float64 else wide)


def _outer_copy(parameter: Tensor, *, on_host: bool) -> Tensor:
    device = torch.device("cpu") if on_host else parameter.device
    outer = torch.empty_like(
        parameter.detach(), dtype=computing_dtype(parameter.dtype), device=device, pin_memory=device != parameter.device
    )
    return outer.copy_(parameter.detach())
