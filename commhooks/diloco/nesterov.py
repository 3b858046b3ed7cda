"""Stochastic gradient descent with momentum, whose steps are the same on every processor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Nesterov(Optimizer):
    """SGD with Nesterov momentum, whose products and sums are rounded one by one.

    A momentum of 0 keeps no state.

    Source: Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep learning", ICML
    2013, as `torch.optim.SGD` formulates it: m = momentum·m + g, then p = p - lr·(g + momentum·m). PyTorch's own may
    fuse a product with a sum, which some processors cannot, so ranks that step by themselves would drift apart. Its
    state and options are named as PyTorch's.
    """

    def __init__(self, params: Any, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # "incompatible with supertype": no closures
        """Take a step with the gradients of those parameters that have one."""
        assert closure is None, "the gradients are means, which nothing here computes"
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad, group["lr"], group["momentum"])

    def _step(self, p: Tensor, g: Tensor, lr: float, momentum: float) -> None:
        if momentum == 0:
            p.sub_(g * lr)
            return
        m = self.state[p].get("momentum_buffer")
        if m is None:
            m = self.state[p]["momentum_buffer"] = g.clone()
        else:
            m.mul_(momentum).add_(g)
        p.sub_((m * momentum).add_(g).mul_(lr))
