"""Observing every gradient: hooks on the nodes of the autograd graph that accumulate into ``p.grad``."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from ddp_core.errors import converted

Owner = TypeVar("Owner")


class Listener(Generic[Owner]):
    """Reports every gradient of some parameters to ``owner``, one at a time, as long as the owner lives."""

    def __init__(self, owner: Owner):
        self._owner = weakref.ref(owner)  # a node, and its hooks, live as long as any graph that contains it
        self._lock = threading.RLock()  # a module on several devices has a backward thread for each
        # Nothing else keeps a node alive between iterations; a new one in its place would have no hook.
        self._nodes: set[Node] = set()
        self._handles: list[RemovableHandle] = []

    def listen(self, report: Callable[[Owner, int], None], parameters: Sequence[Parameter]) -> None:
        """Report the gradients of ``parameters`` to ``report(owner, index)``."""
        nodes = {node_of(parameter): index for index, parameter in enumerate(parameters)}
        # A node's own hook also fires when its gradient is undefined; a tensor's post-accumulate hook does not
        # (tests/ddp_core: an output left out of the loss).
        for node, index in nodes.items():
            hook = functools.partial(_on_node, self._owner, self._lock, report, index)
            self._handles.append(node.register_hook(hook))
        self._nodes |= nodes.keys()

    def require_nodes(self, named: Iterable[tuple[str, Parameter]]) -> None:
        """Raise RuntimeError if a parameter is no longer observed because a conversion gave it another graph node."""
        for name, parameter in named:
            if parameter.requires_grad and node_of(parameter) not in self._nodes:
                raise converted(name)

    def detach(self) -> None:
        """Stop reporting."""
        for handle in self._handles:
            handle.remove()


@torch.enable_grad()
def node_of(parameter: Parameter) -> Node:
    """Return the node of the autograd graph that accumulates a parameter's gradient."""
    return get_gradient_edge(parameter).node


def _never_traced(function: Callable[..., None]) -> Callable[..., None]:
    """Return ``function``, marked so that ``torch.compile`` traces neither it nor the functions that it calls.

    ``torch._compile._disable_dynamo``, used elsewhere in this package, takes half a microsecond in every call. With a
    thousand short gradients that is 2 to 3 % of a step.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # before torch 2.7
        return _disable_dynamo(function)
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # as functions are marked that are not inlined
    return function


@_never_traced  # a compiled training step, with its backward pass, would trace the reducer
def _on_node(
    owner: weakref.ref[Owner],
    lock: threading.RLock,
    report: Callable[[Owner, int], None],
    index: int,
    _inputs: Any,
    _outputs: Any,
) -> None:
    live = owner()
    if live is None:
        return
    with lock:
        if torch.is_grad_enabled():  # create_graph=True: gradients have a history, which is not reduced
            with torch.no_grad():
                report(live, index)
        else:
            report(live, index)
