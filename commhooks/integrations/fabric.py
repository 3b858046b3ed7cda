"""Lightning Fabric: `compress`, to be called after `Fabric.setup`, and `DDPCoreStrategy`, for ddp_core's DDP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Unpack

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from commhooks.errors import AttachError
from commhooks.integrations.common import Compression, CompressionOptions, check_not_alone, require
from commhooks.language.compressor import Compressor
from commhooks.unwrapping import described, is_ddp, unwrapped
from ddp_core import DistributedDataParallel

require("lightning", at_least="2.4")

from lightning.fabric import Fabric  # noqa: E402  # after the check, whose error says what to install
from lightning.fabric.strategies import DDPStrategy  # noqa: E402
from lightning.fabric.strategies.strategy import _BackwardSyncControl  # noqa: E402


def compress(
    fabric: Fabric,
    model: Module,
    optimizer: Optimizer | Sequence[Optimizer],
    compressor: Compressor | str,
    **options: Unpack[CompressionOptions],
) -> Compression:
    """Average the gradients of a model from `fabric.setup(model, optimizer)` with `compressor`; call it on every rank.

    Put the result into the state that you pass to `fabric.save` and `fabric.load`, `{"model": model, "optimizer":
    optimizer, "hooks": hooks}`: it saves and restores the state of all ranks. Its `attachment` has the statistics;
    `end()` detaches.

    - `optimizer`: one or several; each of their steps raises `NotAveragedError` if its gradients did not pass through
      the compressor.
    - `world_size`, `settings` and `missing` allow differences between a checkpoint and this run; see `LoadRules`.
    - `options` are those of `commhooks.attach`; the gradient scaler is Fabric's own.

    Raises `AttachError` if Fabric's strategy cannot work with a compressor, or the model was not set up.
    """
    owner = "commhooks.integrations.fabric.compress"
    compression = Compression(owner, compressor, **options)
    check_not_alone(owner)
    if not is_ddp(unwrapped(model)):
        raise AttachError(
            f"{owner}: expected what fabric.setup() returned, with a strategy that trains with DDP "
            f'(got {described(model)} and {type(fabric.strategy).__name__}); pass Fabric(strategy="ddp"), and call '
            "fabric.setup() first."
        )
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    compression.begin(model, optimizers, scaler=getattr(fabric.strategy.precision, "scaler", None))
    return compression


class DDPCoreStrategy(DDPStrategy):
    """A strategy that trains with ddp_core's DistributedDataParallel, for `Fabric(strategy=DDPCoreStrategy())`.

    It takes the arguments of Fabric's `DDPStrategy` and passes on those of the DDP.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _NoSync()

    def setup_module(self, module: Module) -> DistributedDataParallel:
        """Wrap a model."""
        return DistributedDataParallel(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)

    def get_module_state_dict(self, module: Module) -> dict[str, Tensor]:
        """Return the state of the module inside the DDP, which a model that is not wrapped can load."""
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        state: dict[str, Tensor] = super().get_module_state_dict(inner)
        return state

    def load_module_state_dict(self, module: Module, state_dict: dict[str, Tensor], strict: bool = True) -> None:
        """Load a result of `get_module_state_dict`."""
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        super().load_module_state_dict(inner, state_dict, strict=strict)


class _NoSync(_BackwardSyncControl):
    """The implementation of `Fabric.no_backward_sync` for ddp_core's DDP; Fabric's own accepts only PyTorch's."""

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """Return the context in which gradients accumulate, if `enabled`."""
        assert isinstance(module, DistributedDataParallel), "what setup_module returned"
        return module.no_sync() if enabled else nullcontext()
