"""A user's module, for mypy alone: `make check` fails if what `commhooks` offers loses its type."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import Checkpoint, Handle, PowerSGDState, make_compressor, powerSGD_hook
from commhooks.codecs import Int8
from commhooks.compressors import TwoHop
from commhooks.control import Adaptive, AdaptiveRule
from commhooks.exchange.feed import Channel
from commhooks.experiments import planning
from commhooks.experiments.planning import Plan, Probe, Profile
from commhooks.language import Compressor


def names_have_types(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    attachment = commhooks.attach(model, "powersgd", policy="fused", residuals="bf16")
    assert_type(attachment, Handle[Channel])
    assert_type(make_compressor("fp16"), Compressor)
    assert_type(Adaptive(attachment, ["fp16", "int8"], rule=AdaptiveRule(look=4)), Adaptive)
    assert_type(planning.plan(Profile.read(Path("profile.json")), Probe.read(Path("probe.json"))), Plan)
    commhooks.Exchanger({}, TwoHop(codec=Int8()), policy="fifo")
    model.register_comm_hook(PowerSGDState(None), powerSGD_hook)
    loaded = commhooks.load_checkpoint("checkpoints", model=model, optimizer=optimizer, hooks=attachment)
    assert_type(loaded, Checkpoint | None)


def mistakes_are_found(model: DistributedDataParallel) -> None:
    commhooks.attach(model, "fp16", policy="fusd")  # type: ignore[arg-type]  # 'expected "Literal[\'fifo\', \'fused\']"'
    commhooks.attach(model, "fp16", residuals="fp8")  # type: ignore[arg-type]  # 'expected "Literal[\'fp32\', ...'
    commhooks.atach(model, "fp16")  # type: ignore[attr-defined]  # 'Module has no attribute "atach"'
