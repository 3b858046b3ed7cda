"""Reading the autograd graph: which tensors an output holds, and which parameters no output depends on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils import _pytree as pytree  # used by torch.func and torch.export; not public


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in ``value``, through arbitrarily nested lists, tuples, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def unreachable(outputs: Iterable[Tensor], accumulators: Mapping[Node, int]) -> list[int]:
    """Return the parameters (by index, ascending) that no tensor in ``outputs`` depends on.

    ``accumulators`` maps each parameter's AccumulateGrad node to the parameter's index.
    """
    pending = [get_gradient_edge(output).node for output in outputs if output.requires_grad]
    seen = set(pending)
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                pending.append(node)
    return sorted(index for node, index in accumulators.items() if node not in seen)


class _Sink(torch.autograd.Function):
    """The identity on a module's outputs, as one node, so that backward() always enters the module through it.

    An output that the loss does not use then passes *undefined* gradients on, and the nodes of parameters behind it
    still fire.
    """

    @staticmethod
    def forward(ctx: Any, copy: bool, entered: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.entered = weakref.WeakMethod(entered)
        return tuple(tensor.clone() if copy else tensor for tensor in tensors)  # a view would forbid `loss /= 10`

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        _call(ctx.entered)
        return (None, None, *grads)


def through_sink(outputs: Any, copy: bool, entered: Callable[[], None]) -> Any:
    """Return ``outputs`` with every tensor that has a gradient history passed through one common node.

    Every backward pass that comes through it begins with a call of ``entered``, a method, while its object lives.
    Containers are those of ``torch.utils._pytree``; tensors in any other object are left unchanged.
    """
    leaves, spec = pytree.tree_flatten(outputs)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    if not places:
        return outputs
    passed = _Sink.apply(copy, entered, *(leaves[i] for i in places))  # type: ignore[no-untyped-call]  # 'Call to untyped function "apply"'
    for place, tensor in zip(places, passed, strict=True):
        leaves[place] = tensor
    return pytree.tree_unflatten(leaves, spec)


def outside_transforms() -> contextlib.AbstractContextManager[None]:
    """Return a context in which ``torch.func``'s transforms, within which a module may be called, see no operation.

    Otherwise a parameter has no graph node, and new tensors have no memory of their own.
    """
    context: contextlib.AbstractContextManager[None] = torch._C._DisableFuncTorch()
    return context


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the current backward pass has computed every gradient."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def at_entry_through(outputs: Iterable[Tensor], entered: Callable[[], None]) -> None:
    """Call ``entered``, a method, while its object lives, in every backward pass that comes through ``outputs``.

    An output's gradient arrives in the outermost backward pass, before any nested one, such as a reentrant
    checkpoint's.
    """
    weak = weakref.WeakMethod(entered)
    for output in outputs:
        if output.requires_grad:
            output.register_hook(functools.partial(_call, weak))


def _call(weak: weakref.WeakMethod[Callable[[], None]], _gradient: Tensor | None = None) -> None:
    method = weak()
    if method is not None:
        method()
