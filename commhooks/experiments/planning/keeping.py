"""Copies of what training steps change, so that it can be put back: a profile must not train the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from commhooks.tensors import answers_itself, shard_of


class Kept:
    """Copies of a model's parameters, buffers and gradients, and of the optimizers that step.

    They take as much memory as the originals. Frozen tensors that answer operations themselves are not copied.
    """

    def __init__(self, model: Module) -> None:
        self._tensors: dict[Tensor, Tensor] = {}
        self._gradients: dict[Tensor, Tensor | None] = {}
        self._states: dict[Optimizer, dict[Tensor, dict[str, Any]]] = {}
        self._buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
        for tensor in (*model.parameters(), *model.buffers()):
            self._keep(tensor)

    def keep_optimizer(self, optimizer: Optimizer) -> None:
        """Keep an optimizer's state, and the parameters that it has; a second call does nothing."""
        if optimizer in self._states:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._keep(parameter, has_gradient=False)
        self._states[optimizer] = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; learning rates and other settings of optimizers stay as they are."""
        for buffers, own in self._buffers:  # a forward pass may have assigned new ones
            buffers.clear()
            buffers.update(own)
        for tensor, kept in self._tensors.items():
            tensor.copy_(kept)
        for parameter, gradient in self._gradients.items():
            if gradient is None or parameter.grad is None:
                parameter.grad = None if gradient is None else gradient.clone()
            else:
                parameter.grad.copy_(gradient)
        for optimizer, states in self._states.items():
            for parameter in [one for one in optimizer.state if one not in states]:
                del optimizer.state[parameter]
            for parameter, state in states.items():
                _put_back(optimizer.state[parameter], state)

    def _keep(self, tensor: Tensor, *, has_gradient: bool = True) -> None:
        """Copy a tensor; the gradient of one that only an optimizer knows is this step's, not an earlier one's."""
        if tensor in self._tensors or (answers_itself(shard_of(tensor)) and not tensor.requires_grad):
            return
        self._tensors[tensor] = tensor.detach().clone()
        if tensor.requires_grad:
            gradient = tensor.grad if has_gradient else None
            self._gradients[tensor] = None if gradient is None else gradient.detach().clone()


def _put_back(state: dict[str, Any], kept: Mapping[str, Any]) -> None:
    for key in [key for key in state if key not in kept]:
        del state[key]
    for key, value in kept.items():
        current = state.get(key)
        if isinstance(value, Tensor) and isinstance(current, Tensor) and current.shape == value.shape:
            current.copy_(value)
        else:
            state[key] = copy.deepcopy(value)
