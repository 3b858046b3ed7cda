"""Hooks registered by name, with PyTorch's names: `register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, model)`."""

import dataclasses
import enum
from typing import Any

import torch.distributed as dist
from torch.nn import Module

from commhooks.errors import HookTypeError
from commhooks.hooks.default import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    noop_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from commhooks.hooks.foreign import AnyHook
from commhooks.hooks.powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook


@dataclasses.dataclass(frozen=True)
class _Registration:
    """A function that registers one hook; called like the members of PyTorch's `DDPCommHookType`."""

    hook: AnyHook
    rank: int | None = None
    """PowerSGD's rank; None for hooks whose state is the process group itself. Lower: smaller messages."""

    def __call__(self, model: Module, state: dist.ProcessGroup | None = None) -> None:
        if not hasattr(model, "register_comm_hook"):
            raise HookTypeError(
                "register_ddp_comm_hook: model must be a DistributedDataParallel, ddp_core's or PyTorch's "
                f"(got {type(model).__name__}); wrap the model first."
            )
        if state is not None and not isinstance(state, dist.ProcessGroup):
            raise HookTypeError(
                f"register_ddp_comm_hook: state must be a process group, or None for the default one (got {state!r}); "
                "for a hook with a state of its own, call model.register_comm_hook(state, hook)."
            )
        register: Any = model.register_comm_hook
        register(state if self.rank is None else PowerSGDState(state, self.rank), self.hook)


class DDPCommHookType(enum.Enum):
    """The hooks that `register_ddp_comm_hook` can register, as in PyTorch's enumeration.

    PowerSGD uses its defaults except for the rank, so its first 1,000 steps are a plain all-reduce.
    """

    ALLREDUCE = _Registration(allreduce_hook)
    FP16_COMPRESS = _Registration(fp16_compress_hook)
    BF16_COMPRESS = _Registration(bf16_compress_hook)
    POWER_SGD = _Registration(powerSGD_hook, rank=1)
    POWER_SGD_RANK2 = _Registration(powerSGD_hook, rank=2)
    BATCHED_POWER_SGD = _Registration(batched_powerSGD_hook, rank=1)
    BATCHED_POWER_SGD_RANK2 = _Registration(batched_powerSGD_hook, rank=2)
    QUANTIZE_PER_TENSOR = _Registration(quantization_pertensor_hook)
    QUANTIZE_PER_CHANNEL = _Registration(quantization_perchannel_hook)
    NOOP = _Registration(noop_hook)


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType, model: Module, state: dist.ProcessGroup | None = None
) -> None:
    """Register a hook by name on ddp_core's or PyTorch's DistributedDataParallel, before the first backward pass.

    `state` is the process group to average over (None: the default group); PowerSGD's own state is created from it.
    Raises `HookTypeError`, a `TypeError`, if any of the three arguments has the wrong type.
    """
    given: object = comm_hook_type
    if not isinstance(given, DDPCommHookType):
        kind = type(given)
        raise HookTypeError(
            "register_ddp_comm_hook: comm_hook_type must be a member of commhooks.DDPCommHookType "
            f"(got {given!r} of type {kind.__module__}.{kind.__qualname__}); "
            f"expected one of {', '.join(DDPCommHookType.__members__)}."
        )
    given.value(model=model, state=state)
