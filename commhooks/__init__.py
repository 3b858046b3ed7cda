"""Gradient compression for data-parallel PyTorch: communication hooks for ddp_core's and PyTorch's DDP.

A name is imported when it is first used; only the names that saved hooks contain are imported at once.
"""

from typing import TYPE_CHECKING

from commhooks.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from commhooks import codecs as codecs
    from commhooks import communicators as communicators
    from commhooks import compressors as compressors
    from commhooks import control as control
    from commhooks import diloco as diloco
    from commhooks import exchange as exchange
    from commhooks import language as language
    from commhooks import lockstep as lockstep
    from commhooks import native as native
    from commhooks.diloco.averaging import ModelAverager
    from commhooks.diloco.diloco import DiLoCo
    from commhooks.errors import AttachError, CheckpointError, CollectiveError, CommHooksError, SettingsError
    from commhooks.exchange.exchanger import Exchanger
    from commhooks.exchange.handle import Handle
    from commhooks.exchange.watching import NotAveragedError, NotAveragedWarning, set_guard, steps_locally
    from commhooks.hooks.attach import attach
    from commhooks.hooks.by_name import DDPCommHookType, register_ddp_comm_hook
    from commhooks.hooks.default import (
        allreduce_hook,
        bf16_compress_hook,
        bf16_compress_wrapper,
        fp16_compress_hook,
        fp16_compress_wrapper,
        noop_hook,
    )
    from commhooks.hooks.hook_functions import hook_statistics
    from commhooks.hooks.powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
    from commhooks.language.compressor import Compressor
    from commhooks.making import make_compressor
    from commhooks.saving.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
    from commhooks.saving.distributed import load_distributed
    from commhooks.saving.parts import merge_state_dicts
    from commhooks.saving.rules import LoadRules
    from commhooks.scheduling.ledger import Statistics
    from commhooks.sharded.attach import attach_sharded
    from commhooks.sharded.replicas import attach_replicas
    from commhooks.wrappers import (
        ErrorFeedback,
        Hierarchical,
        Match,
        PerParameter,
        StartAfter,
        WireDtype,
        WithoutFeedback,
        schedule,
    )
else:
    from commhooks.names import listed as __dir__  # noqa: F401  # "imported but unused": Python calls both
    from commhooks.names import resolved as __getattr__  # noqa: F401


__all__ = [
    "AttachError",
    "Checkpoint",
    "CheckpointError",
    "CollectiveError",
    "CommHooksError",
    "Compressor",
    "DDPCommHookType",
    "DiLoCo",
    "ErrorFeedback",
    "Exchanger",
    "Handle",
    "Hierarchical",
    "LoadRules",
    "Match",
    "ModelAverager",
    "NotAveragedError",
    "NotAveragedWarning",
    "PerParameter",
    "PowerSGDState",
    "SettingsError",
    "StartAfter",
    "Statistics",
    "WireDtype",
    "WithoutFeedback",
    "allreduce_hook",
    "attach",
    "attach_replicas",
    "attach_sharded",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "hook_statistics",
    "load_checkpoint",
    "load_distributed",
    "make_compressor",
    "merge_state_dicts",
    "noop_hook",
    "powerSGD_hook",
    "register_ddp_comm_hook",
    "save_checkpoint",
    "schedule",
    "set_guard",
    "steps_locally",
]
