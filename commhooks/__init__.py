"""Gradient compression for data-parallel PyTorch: communication hooks that run on ddp_core's DDP and on PyTorch's."""

from commhooks.checkpoints.distributed import load_distributed
from commhooks.checkpoints.files import Checkpoint, load_checkpoint, save_checkpoint
from commhooks.communicators import (
    Collective,
    Communicator,
    LockstepCommunicator,
    LockstepGroup,
    Pending,
    ProcessGroupCommunicator,
    RecordingCommunicator,
)
from commhooks.compressors import (
    COMPRESSORS,
    SVD,
    AdaptiveRank,
    AllReduceMean,
    Cast,
    Codec,
    DeMo,
    Int4,
    NoOp,
    PowerSGD,
    RandomBlock,
    RandomK,
    Registered,
    Sign,
    SparseLoCo,
    TopK,
    TwoHop,
    UnbiasedPowerSGD,
)
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
from commhooks.hooks.attach import Attachment, attach
from commhooks.hooks.by_name import DDPCommHookType, register_ddp_comm_hook
from commhooks.hooks.default import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
)
from commhooks.hooks.exchanger import Exchanger, average_in_lockstep
from commhooks.hooks.powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from commhooks.hooks.stateless import hook_statistics
from commhooks.language.bucket import BucketView, Slot, Tile
from commhooks.language.compressor import Compressor, Context, Exchange
from commhooks.language.entries import Entry
from commhooks.language.requests import AllGather, AllReduce, AllToAll, Judge, Layout, Part, ReduceScatter, Request
from commhooks.making import make_compressor
from commhooks.scheduling.ledger import ParameterTraffic, Statistics
from commhooks.scheduling.lockstep import lockstep_lines
from commhooks.state.memory import MemoryReport
from commhooks.state.snapshot import LoadRules, Snapshot, merge_state_dicts
from commhooks.wrappers import ErrorFeedback, Match, PerParameter, StartAfter, WireDtype, schedule

__all__ = [
    "AdaptiveRank",
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
    "Codec",
    "Collective",
    "CollectiveError",
    "CommHooksError",
    "Communicator",
    "Compressor",
    "CompressorError",
    "Context",
    "DDPCommHookType",
    "DeMo",
    "Entry",
    "ErrorFeedback",
    "Exchange",
    "Exchanger",
    "GradientError",
    "HookTypeError",
    "Int4",
    "Judge",
    "Layout",
    "LoadRules",
    "LockstepCommunicator",
    "LockstepGroup",
    "Match",
    "MemoryReport",
    "NoOp",
    "ParameterTraffic",
    "Part",
    "Pending",
    "PerParameter",
    "PowerSGD",
    "PowerSGDState",
    "ProcessGroupCommunicator",
    "RandomBlock",
    "RandomK",
    "RecordingCommunicator",
    "ReduceScatter",
    "Registered",
    "Request",
    "SVD",
    "SettingsError",
    "Sign",
    "Slot",
    "Snapshot",
    "SparseLoCo",
    "StartAfter",
    "Statistics",
    "Tile",
    "TopK",
    "TwoHop",
    "UnbiasedPowerSGD",
    "WireDtype",
    "allreduce_hook",
    "attach",
    "average_in_lockstep",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
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
    "register_ddp_comm_hook",
    "save_checkpoint",
    "schedule",
]
