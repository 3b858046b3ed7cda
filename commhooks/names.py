"""The package's names, imported on first use (PEP 562)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
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
    "exchange.handle": "Handle",
    "hooks.attach": "attach",
    "hooks.by_name": "DDPCommHookType register_ddp_comm_hook",
    "hooks.default": (
        "allreduce_hook bf16_compress_hook bf16_compress_wrapper fp16_compress_hook fp16_compress_wrapper noop_hook "
        "quantization_perchannel_hook quantization_pertensor_hook"
    ),
    "exchange.exchanger": "Averaging Exchanger average_in_lockstep",
    "hooks.powersgd": "PowerSGDState batched_powerSGD_hook powerSGD_hook",
    "hooks.sockets": "hook_statistics",
    "exchange.watching": "NotAveragedError NotAveragedWarning set_guard steps_locally",
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
    "sharded.attach": "attach_sharded",
    "sharded.replicas": "attach_replicas",
    "state.memory": "MemoryReport",
    "wrappers": "ErrorFeedback Hierarchical Match PerParameter StartAfter WireDtype WithoutFeedback schedule",
}
"""The names that `commhooks` offers, by module; its imports under `TYPE_CHECKING` are the same."""
_ROOMS = ("codecs", "communicators", "compressors", "control", "language")
"""Packages of names for authors of compressors and communicators."""
_MODULE_OF = {name: f"commhooks.{place}" for place, names in _PLACES.items() for name in names.split()}


def resolved(name: str) -> Any:
    """Return `commhooks.<name>`: an object or a module."""
    if name in _MODULE_OF:
        found = getattr(importlib.import_module(_MODULE_OF[name]), name)
        setattr(sys.modules["commhooks"], name, found)
        return found
    module = f"commhooks.{name}"
    if name.startswith("_") or importlib.util.find_spec(module) is None:
        raise AttributeError(f"module 'commhooks' has no attribute {name!r}")
    return importlib.import_module(module)


def listed() -> list[str]:
    """Return the names for `dir(commhooks)`, with its packages."""
    return sorted({*vars(sys.modules["commhooks"]), *_MODULE_OF, *_ROOMS})


# `torch.load` takes a saved hook only from a module that was imported, and who loads one may name nothing else of us.
# The command `commhooks` loads none before it imports somebody's task, and its help should not wait for torch.
if "commhooks_command" not in sys.modules:
    importlib.import_module("commhooks.hooks.powersgd")
