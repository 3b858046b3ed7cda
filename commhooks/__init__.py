"""Gradient compression for data-parallel PyTorch: communication hooks for ddp_core's and PyTorch's DDP.

A name is imported when it is first used; only the names that saved hooks contain are imported at once.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"  # before the imports, some of which need it

if TYPE_CHECKING:
    from commhooks import codecs as codecs
    from commhooks import communicators as communicators
    from commhooks import compressors as compressors
    from commhooks import control as control
    from commhooks import language as language
    from commhooks.compressors import (
        DGC,
        SVD,
        AdaptiveRank,
        Affine,
        AllReduceMean,
        Cast,
        DeMo,
        NoOp,
        PowerSGD,
        RandomBlock,
        RandomK,
        Signum,
        SparseLoCo,
        Threshold,
        TopK,
        TwoHop,
        UnbiasedPowerSGD,
    )
    from commhooks.control.adaptive import Adaptive
    from commhooks.errors import (
        AttachError,
        CheckpointError,
        CollectiveError,
        CommHooksError,
        CompressorError,
        GradientError,
        HookTypeError,
        SettingsError,
    )
    from commhooks.exchange.exchanger import Averaging, Exchanger, average_in_lockstep
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
        quantization_perchannel_hook,
        quantization_pertensor_hook,
    )
    from commhooks.hooks.powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
    from commhooks.hooks.sockets import hook_statistics
    from commhooks.language.compressor import Compressor
    from commhooks.making import make_compressor
    from commhooks.native.library import Compiled, compiled
    from commhooks.saving.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
    from commhooks.saving.distributed import load_distributed
    from commhooks.saving.parts import merge_state_dicts
    from commhooks.saving.rules import LoadRules
    from commhooks.scheduling.ledger import ParameterTraffic, Statistics
    from commhooks.scheduling.line import ProcessGroupLine
    from commhooks.scheduling.lockstep import lockstep_lines
    from commhooks.seldom.averaging import ModelAverager
    from commhooks.seldom.counts import DiLoCoStatistics
    from commhooks.seldom.diloco import DiLoCo, step_in_lockstep
    from commhooks.sharded.attach import attach_sharded
    from commhooks.sharded.replicas import attach_replicas
    from commhooks.state.memory import MemoryReport
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
    "Adaptive",
    "AdaptiveRank",
    "Affine",
    "AllReduceMean",
    "AttachError",
    "Averaging",
    "Cast",
    "Checkpoint",
    "CheckpointError",
    "CollectiveError",
    "CommHooksError",
    "Compiled",
    "Compressor",
    "CompressorError",
    "DDPCommHookType",
    "DGC",
    "DeMo",
    "DiLoCo",
    "DiLoCoStatistics",
    "ErrorFeedback",
    "Exchanger",
    "GradientError",
    "Handle",
    "Hierarchical",
    "HookTypeError",
    "LoadRules",
    "Match",
    "MemoryReport",
    "ModelAverager",
    "NoOp",
    "NotAveragedError",
    "NotAveragedWarning",
    "ParameterTraffic",
    "PerParameter",
    "PowerSGD",
    "PowerSGDState",
    "ProcessGroupLine",
    "RandomBlock",
    "RandomK",
    "SVD",
    "SettingsError",
    "Signum",
    "SparseLoCo",
    "StartAfter",
    "Statistics",
    "Threshold",
    "TopK",
    "TwoHop",
    "UnbiasedPowerSGD",
    "WireDtype",
    "WithoutFeedback",
    "allreduce_hook",
    "attach",
    "attach_replicas",
    "attach_sharded",
    "average_in_lockstep",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "compiled",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "hook_statistics",
    "load_checkpoint",
    "load_distributed",
    "lockstep_lines",
    "make_compressor",
    "merge_state_dicts",
    "noop_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "register_ddp_comm_hook",
    "save_checkpoint",
    "schedule",
    "set_guard",
    "step_in_lockstep",
    "steps_locally",
]
