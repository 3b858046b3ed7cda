"""Metrics of a hook, for loggers: bytes, seconds, and the size of the residuals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from commhooks.devices import wait_for_copies
from commhooks.engine.engine import Engine
from commhooks.errors import SettingsError
from commhooks.scheduling.ledger import ParameterTraffic, Statistics


class ScalarWriter(Protocol):
    """The part of `torch.utils.tensorboard.SummaryWriter` that is needed here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...  # noqa: D102


class MetricsLogger(Protocol):
    """The part of a Lightning logger that is needed here."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> Any: ...  # noqa: D102


Writer = ScalarWriter | MetricsLogger | Callable[[dict[str, float], int], Any]
"""Something that `log_to` can write to."""


def metrics_of(
    engines: Sequence[Engine], totals: Statistics, last: Statistics, by_parameter: Mapping[str, ParameterTraffic]
) -> dict[str, float]:
    """Return the metrics by tag, and those of some parameters; `Handle.metrics` describes them."""
    found: dict[str, float] = {
        "bytes_sent_total": totals.moved_bytes,
        "bytes_sent_per_step": last.moved_bytes,
        "compression_ratio": last.ratio,
        "collectives_per_step": last.collectives,
        "seconds_compressing": last.seconds_compressing,
        "seconds_waiting": last.seconds_waiting,
        "seconds_exposed": last.seconds_exposed,
    }
    pairs = {name: pair for engine in engines for name, pair in _residuals_and_gradients(engine).items()}
    if pairs:
        # Residuals are multiplied by the loss scale; gradients no longer are, once the optimizer has taken its step.
        loss_scale = engines[0].loss_scale
        scale = loss_scale.value() if loss_scale.has_scaler else 1.0
        residuals = _norms(residual for residual, _ in pairs.values()) / scale
        gradients = _norms(gradient for _, gradient in pairs.values())
        ratios = {"": float(residuals.norm() / gradients.norm())} if gradients.any() else {}
        if by_parameter:
            each = zip(pairs, residuals / gradients, gradients, strict=True)
            ratios |= {f"/{name}": float(ratio) for name, ratio, gradient in each if gradient}
        found |= {f"residual_norm_over_gradient_norm{name}": ratio for name, ratio in ratios.items()}
    found |= {f"bytes_sent_total/{name}": traffic.moved_bytes for name, traffic in by_parameter.items()}
    return {f"commhooks/{name}": float(value) for name, value in found.items()}


def write_to(writer: Writer, metrics: dict[str, float], step: int) -> None:
    """Pass metrics to a writer; raise `SettingsError` for anything that is not one."""
    if hasattr(writer, "add_scalar"):
        for tag, value in metrics.items():
            writer.add_scalar(tag, value, step)
    elif hasattr(writer, "log_metrics"):
        writer.log_metrics(metrics, step)
    elif callable(writer):
        writer(metrics, step)
    else:
        raise SettingsError(
            "log_to: expected a writer with add_scalar(tag, value, step) or log_metrics(metrics, step), such as "
            f"torch.utils.tensorboard.SummaryWriter, or a function of (metrics, step) (got {type(writer).__name__})."
        )


def _residuals_and_gradients(engine: Engine) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Return each parameter's residual and gradient, by name, if it has both."""
    pairs = {
        name: (residual, parameter.grad.detach())
        for name, parameter, residual in engine.state.residuals()
        if parameter.grad is not None and not parameter.grad.is_sparse
    }
    wait_for_copies([residual for residual, _ in pairs.values()])
    return pairs


def _norms(tensors: Iterable[Tensor]) -> Tensor:
    """Return the norm of each tensor, in fp64 on the host, which waits for a GPU once."""
    norms = [tensor.norm(dtype=torch.float64) for tensor in tensors]
    return torch.stack([norm.to(norms[0].device) for norm in norms]).cpu()
