"""Gradient compression for data-parallel PyTorch: communication hooks for ddp_core's and PyTorch's DDP."""

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
    DGC,
    FP8,
    MXFP4,
    MXFP8,
    QSGD,
    SVD,
    AdaptiveRank,
    Affine,
    AllReduceMean,
    Cast,
    Codec,
    DeMo,
    Half,
    Int4,
    Int8,
    Natural,
    NoOp,
    PowerSGD,
    RandomBlock,
    RandomK,
    Registered,
    Sign,
    Signum,
    SparseLoCo,
    TernGrad,
    Threshold,
    TopK,
    TwoHop,
    UnbiasedPowerSGD,
    Vote,
)
from commhooks.control.adaptive import Adaptive
from commhooks.control.rule import AdaptiveRule
from commhooks.errors import (
    AttachError,
    CheckpointError,
    CollectiveError,
    CommHooksError,
    CompressorError,
    GradientError,
    HookDidNotRunError,
    HookTypeError,
    ProbeError,
    ProfileError,
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
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from commhooks.hooks.exchanger import Averaging, Exchanger, average_in_lockstep
from commhooks.hooks.powersgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from commhooks.hooks.sockets import hook_statistics
from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import Compressor, Context, Exchange
from commhooks.language.entries import Entry
from commhooks.language.loss import Loss, Sends
from commhooks.language.place import Place
from commhooks.language.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Group,
    Judge,
    Layout,
    Part,
    ReduceScatter,
    Request,
)
from commhooks.language.settings import setting
from commhooks.language.tile import Tile
from commhooks.making import make_compressor
from commhooks.planning.candidates import Candidate
from commhooks.planning.estimate import Estimate, HookEstimate, estimate
from commhooks.planning.plan import Choice, Plan, plan
from commhooks.planning.probe import Probe
from commhooks.planning.probing import probe
from commhooks.planning.profile import Profile
from commhooks.planning.profiling import profile
from commhooks.scheduling.ledger import ParameterTraffic, Statistics
from commhooks.scheduling.line import ProcessGroupLine
from commhooks.scheduling.lockstep import lockstep_lines
from commhooks.state.memory import MemoryReport
from commhooks.state.snapshot import LoadRules, Snapshot, merge_state_dicts
from commhooks.wrappers import ErrorFeedback, Hierarchical, Match, PerParameter, StartAfter, WireDtype, schedule

__version__ = "0.1.0"

__all__ = [
    "Adaptive",
    "AdaptiveRank",
    "AdaptiveRule",
    "Affine",
    "AllGather",
    "AllReduce",
    "AllReduceMean",
    "AllToAll",
    "AttachError",
    "Attachment",
    "Averaging",
    "BucketView",
    "COMPRESSORS",
    "Candidate",
    "Cast",
    "Checkpoint",
    "CheckpointError",
    "Choice",
    "Codec",
    "Collective",
    "CollectiveError",
    "CommHooksError",
    "Communicator",
    "Compressor",
    "CompressorError",
    "Context",
    "DDPCommHookType",
    "DGC",
    "DeMo",
    "Entry",
    "ErrorFeedback",
    "Estimate",
    "Exchange",
    "Exchanger",
    "FP8",
    "GradientError",
    "Group",
    "Half",
    "Hierarchical",
    "HookDidNotRunError",
    "HookEstimate",
    "HookTypeError",
    "Int4",
    "Int8",
    "Judge",
    "Layout",
    "LoadRules",
    "LockstepCommunicator",
    "LockstepGroup",
    "Loss",
    "MXFP4",
    "MXFP8",
    "Match",
    "MemoryReport",
    "Natural",
    "NoOp",
    "ParameterTraffic",
    "Part",
    "Pending",
    "PerParameter",
    "Place",
    "Plan",
    "PowerSGD",
    "PowerSGDState",
    "Probe",
    "ProbeError",
    "ProcessGroupCommunicator",
    "ProcessGroupLine",
    "Profile",
    "ProfileError",
    "QSGD",
    "RandomBlock",
    "RandomK",
    "RecordingCommunicator",
    "ReduceScatter",
    "Registered",
    "Request",
    "SVD",
    "Sends",
    "SettingsError",
    "Sign",
    "Signum",
    "Slot",
    "Snapshot",
    "SparseLoCo",
    "StartAfter",
    "Statistics",
    "TernGrad",
    "Threshold",
    "Tile",
    "TopK",
    "TwoHop",
    "UnbiasedPowerSGD",
    "Vote",
    "WireDtype",
    "allreduce_hook",
    "attach",
    "average_in_lockstep",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "estimate",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "hook_statistics",
    "load_checkpoint",
    "load_distributed",
    "lockstep_lines",
    "make_compressor",
    "merge_state_dicts",
    "noop_hook",
    "plan",
    "powerSGD_hook",
    "probe",
    "profile",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "register_ddp_comm_hook",
    "save_checkpoint",
    "schedule",
    "setting",
]
