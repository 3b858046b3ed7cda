"""Gradient compression for data-parallel PyTorch: communication hooks that run on ddp_core's DDP and on PyTorch's."""

from commhooks.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from commhooks.communicators import (
    Communicator,
    LockstepCommunicator,
    LockstepGroup,
    Pending,
    ProcessGroupCommunicator,
    RecordingCommunicator,
    run_lockstep,
)
from commhooks.compressor import BucketView, Compressor, Context, Result, Slot, StepVerdict
from commhooks.compressors import COMPRESSORS, AllReduceMean, Cast, NoOp, PowerSGD, make_compressor
from commhooks.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from commhooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
)
from commhooks.distributed_checkpoint import load_distributed
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
from commhooks.hook import Attachment, attach, hook_statistics
from commhooks.memory import MemoryReport
from commhooks.powersgd_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from commhooks.requests import AllGather, AllReduce, AllToAll, Layout, Request
from commhooks.snapshot import LoadRules, Snapshot, merge_state_dicts
from commhooks.state import LocalEntry
from commhooks.statistics import ParameterTraffic, Statistics
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
