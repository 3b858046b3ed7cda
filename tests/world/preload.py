"""Imported once by the fork server: what every rank would otherwise import for itself.

A module that does not exist or does not import is left out here; the rank that needs it then says so itself.
The environment variable WORLD_PRELOAD names further modules, separated by spaces.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys

MODULES = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.algorithms.join",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",  # the first optimiser step imports it: more than a second in every rank
    "pytest",
    "ddp_core",
    "commhooks",
    "commhooks.experiments.launch",  # of tests.tiers
)

for _name in (*MODULES, *os.environ.get("WORLD_PRELOAD", "").split()):
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
for _name in getattr(sys.modules.get("commhooks"), "__all__", ()):  # the package imports them when they are first used
    with contextlib.suppress(Exception):
        getattr(sys.modules["commhooks"], _name)

# What was imported is no garbage in any rank: its collector need not walk it, which halves the cost of a rank's end.
gc.collect()
gc.freeze()
