"""The package's names, imported on first use (PEP 562)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

_PLACES = {
    "errors": "AttachError CheckpointError CollectiveError CommHooksError SettingsError",
    "exchange.handle": "Handle",
    "hooks.attach": "attach",
    "hooks.by_name": "DDPCommHookType register_ddp_comm_hook",
    "hooks.default": (
        "allreduce_hook bf16_compress_hook bf16_compress_wrapper fp16_compress_hook fp16_compress_wrapper noop_hook"
    ),
    "exchange.exchanger": "Exchanger",
    "hooks.powersgd": "PowerSGDState batched_powerSGD_hook powerSGD_hook",
    "hooks.hook_functions": "hook_statistics",
    "exchange.watching": "NotAveragedError NotAveragedWarning set_guard steps_locally",
    "language.compressor": "Compressor",
    "making": "make_compressor",
    "saving.checkpoints": "Checkpoint load_checkpoint save_checkpoint",
    "saving.distributed": "load_distributed",
    "saving.parts": "merge_state_dicts",
    "saving.rules": "LoadRules",
    "scheduling.ledger": "Statistics",
    "diloco.averaging": "ModelAverager",
    "diloco.diloco": "DiLoCo",
    "sharded.attach": "attach_sharded",
    "sharded.replicas": "attach_replicas",
    "wrappers": "ErrorFeedback Hierarchical Match PerParameter StartAfter WireDtype WithoutFeedback schedule",
}
"""The names that `commhooks` offers, by module; its imports under `TYPE_CHECKING` are the same."""
_ROOMS = ("codecs", "communicators", "compressors", "control", "diloco", "exchange", "language", "lockstep", "native")
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
