"""Gradient compression for data-parallel PyTorch: communication hooks that run on ddp_core's DDP and on PyTorch's."""

from commhooks.checkpoints.distributed import load_distributed
from commhooks.checkpoints.files import Checkpoint, load_checkpoint, save_checkpoint
from commhooks.communicators import (
    Communicator,
    LockstepCommunicator,
    LockstepGroup,
    Pending,
    ProcessGroupCommunicator,
    RecordingCommunicator,
    run_lockstep,
)
from commhooks.compressors import COMPRESSORS, AllReduceMean, Cast, NoOp, PowerSGD, make_compressor
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
from commhooks.hooks.attach import Attachment, attach, hook_statistics
from commhooks.hooks.by_name import DDPCommHookType, register_ddp_comm_hook
from commhooks.hooks.default import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
)
from commhooks.hooks.powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from commhooks.language.compressor import BucketView, Compressor, Context, Result, Slot, StepVerdict
from commhooks.language.requests import AllGather, AllReduce, AllToAll, Layout, Request
from commhooks.scheduling.ledger import ParameterTraffic, Statistics
from commhooks.state.memory import MemoryReport
from commhooks.state.snapshot import LoadRules, Snapshot, merge_state_dicts
from commhooks.state.table import LocalEntry
from commhooks.wrappers import ErrorFeedback, StartAfter, WireDtype

__all__ = [
    "AllGather",
    "AllReduce",
    "AllReduceMean",
    "AllToAll",
    "AttachError",
    "Attachment",
    "BucketView",
    "COMPRESSORS",
    "Cast",
    "Checkpoint",
    "CheckpointError",
    "CollectiveError",
    "CommHooksError",
    "Communicator",
    "Compressor",
    "CompressorError",
    "Context",
    "DDPCommHookType",
    "ErrorFeedback",
    "GradientError",
    "HookTypeError",
    "Layout",
    "LoadRules",
    "LocalEntry",
    "LockstepCommunicator",
    "LockstepGroup",
    "MemoryReport",
    "NoOp",
    "ParameterTraffic",
    "Pending",
    "PowerSGD",
    "PowerSGDState",
    "ProcessGroupCommunicator",
    "RecordingCommunicator",
    "Request",
    "Result",
    "SettingsError",
    "Slot",
    "Snapshot",
    "StartAfter",
    "Statistics",
    "StepVerdict",
    "WireDtype",
    "allreduce_hook",
    "attach",
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
    "run_lockstep",
    "save_checkpoint",
]
