"""The package's names, imported on first use (PEP 562)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

_PLACES = {
    "compressors": (
        "DGC SVD AdaptiveRank Affine AllReduceMean Cast DeMo NoOp PowerSGD RandomBlock RandomK Signum SparseLoCo "
        "Threshold TopK TwoHop UnbiasedPowerSGD"
    ),
    "control.adaptive": "Adaptive",
    "errors": (
        "AttachError CheckpointError CollectiveError CommHooksError CompressorError GradientError HookTypeError "
        "SettingsError"
    ),
    "hooks.attach": "Attachment attach",
    "hooks.by_name": "DDPCommHookType register_ddp_comm_hook",
    "hooks.default": (
        "allreduce_hook bf16_compress_hook bf16_compress_wrapper fp16_compress_hook fp16_compress_wrapper noop_hook "
        "quantization_perchannel_hook quantization_pertensor_hook"
    ),
    "hooks.exchanger": "Averaging Exchanger average_in_lockstep",
    "hooks.exchangers": "Exchangers",
    "hooks.powersgd": "PowerSGDState batched_powerSGD_hook powerSGD_hook",
    "hooks.sockets": "hook_statistics",
    "hooks.watching": "NotAveragedError NotAveragedWarning set_guard steps_locally",
    "language.compressor": "Compressor",
    "making": "make_compressor",
    "native.library": "Compiled compiled",
    "saving.checkpoints": "Checkpoint load_checkpoint save_checkpoint",
    "saving.distributed": "load_distributed",
    "saving.parts": "merge_state_dicts",
    "saving.rules": "LoadRules",
    "scheduling.ledger": "ParameterTraffic Statistics",
    "scheduling.line": "ProcessGroupLine",
    "scheduling.lockstep": "lockstep_lines",
    "seldom.averaging": "ModelAverager",
    "seldom.counts": "DiLoCoStatistics",
    "seldom.diloco": "DiLoCo step_in_lockstep",
    "sharded.attach": "ShardedAttachment attach_sharded",
    "sharded.replicas": "ReplicasAttachment attach_replicas",
    "state.memory": "MemoryReport",
    "wrappers": "ErrorFeedback Hierarchical Match PerParameter StartAfter WireDtype schedule",
}
"""The names that `commhooks` offers, by module; its imports under `TYPE_CHECKING` are the same."""
_MOVED = {
    "codecs": "Codec FP8 Half Int4 Int8 MXFP4 MXFP8 Natural QSGD Sign TernGrad Vote",
    "communicators": (
        "Collective Communicator LockstepCommunicator LockstepGroup Pending ProcessGroupCommunicator "
        "RecordingCommunicator"
    ),
    "compressors": "COMPRESSORS Registered",
    "control": "AdaptiveRule",
    "language": (
        "AllGather AllReduce AllToAll BucketView Context Entry Exchange Group Judge Layout Loss Part Place "
        "ReduceScatter Request Sends Slot Tile setting"
    ),
}
"""The names that `commhooks` itself offered before, by their new module; for one release they resolve with a
warning."""
_MODULE_OF = {name: f"commhooks.{place}" for place, names in _PLACES.items() for name in names.split()}
_ROOM_OF = {name: f"commhooks.{room}" for room, names in _MOVED.items() for name in names.split()}


def resolved(name: str) -> Any:
    """Return `commhooks.<name>`: an object, a module or, with a `FutureWarning`, an object that has moved."""
    if name in _MODULE_OF:
        found = getattr(importlib.import_module(_MODULE_OF[name]), name)
        setattr(sys.modules["commhooks"], name, found)
        return found
    if name in _ROOM_OF:
        room = _ROOM_OF[name]
        warnings.warn(
            f"commhooks.{name} is now {room}.{name}: write `from {room} import {name}`. The former name goes in the "
            "next release.",
            FutureWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(room), name)
    module = f"commhooks.{name}"
    if name.startswith("_") or importlib.util.find_spec(module) is None:
        raise AttributeError(f"module 'commhooks' has no attribute {name!r}")
    return importlib.import_module(module)


def listed() -> list[str]:
    """Return the names for `dir(commhooks)`, with its packages, without names that have moved."""
    return sorted({*vars(sys.modules["commhooks"]), *_MODULE_OF, *_MOVED})


# `torch.load` takes a saved hook only from a module that was imported, and who loads one may name nothing else of us.
# The command `commhooks` loads none before it imports somebody's task, and its help should not wait for torch.
if Path(*sys.argv[:1]).stem != "commhooks":
    importlib.import_module("commhooks.hooks.powersgd")
