"""The error of a hook's mean in one step, compared with the true mean, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks.experiments.runs import LayerRecord, ProbeRecord
from commhooks.experiments.training.registration import Registered


class Probe:
    """Copies of this rank's own gradients in the step that begins now; `finish` compares their mean with the hook's."""

    def __init__(self, model: nn.Module) -> None:
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._own: dict[str, Tensor] = {}
        self._handles = [parameter.register_hook(self._keeper(name)) for name, parameter in self._named.items()]

    def _keeper(self, name: str) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            self._own[name] = gradient.detach().to_dense().clone()

        return keep

    def finish(self, step: int, registered: Registered) -> ProbeRecord:
        """Return the comparison; every rank calls this after the backward pass, before gradients are set to zero."""
        for handle in self._handles:
            handle.remove()
        traffic, residuals = registered.payload_by_parameter(), registered.residual_ratios()
        layers, errors, norms = [], [], []
        for name, parameter in self._named.items():
            mean = self._own.get(name, torch.zeros_like(parameter)).to(torch.float32)
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            got = torch.zeros_like(mean) if parameter.grad is None else parameter.grad.to_dense().to(torch.float32)
            errors.append((got - mean).norm(dtype=torch.float64).item())
            norms.append(mean.norm(dtype=torch.float64).item())
            layers.append(
                LayerRecord(
                    name=name,
                    elements=parameter.numel(),
                    payload_bytes=traffic.get(name),
                    error=_ratio(errors[-1], norms[-1]),
                    residual=residuals.get(name),
                )
            )
        error = _ratio(math.hypot(*errors), math.hypot(*norms))
        return ProbeRecord(step=step, error=error, residual=residuals.get(""), layers=tuple(layers))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (0.0 if part == 0 else math.inf)
