"""Ranks whose GPUs compute other last bits; tests/test_mixed_kernels.py has those whose processors do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commhooks
from commhooks import DiLoCo, Exchanger, ModelAverager, make_compressor
from commhooks.communicators import kernels
from commhooks.communicators.kernels import KERNELS_BYTES
from commhooks.engine import engine
from tests.commhooks.models import wrap
from tests.world import run_world

RELYING = ("powersgd", "powersgd:start_after=3,wire=fp16", "adaptive-rank", "demo")
"""Hooks of which each rank computes, with kernels that differ, what must be equal on all."""
OTHERS = ("all-reduce", "bf16", "int8", "sign", "top-k", "random-k", "sparse-loco:clip_to_median=true", "dgc", "signum")


def told_by(function: Callable[[], Any]) -> list[str]:
    """Return what a call warns of kernels."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(one.message) for one in caught if "last bits" in str(one.message)]


def told_in_a_world(rank: int) -> dict[str, list[str]]:
    """Return what a rank is told in each way to average; the last rank's device is of another model."""
    setattr(engine, "kernels_of", lambda _: bytes([rank == 2] * KERNELS_BYTES))  # noqa: B010 mypy: "not exported"
    model = nn.Linear(20, 30)
    ddp = wrap("core", model)
    told = {name: told_by(lambda name=name: commhooks.attach(ddp, name).close()) for name in (*OTHERS, *RELYING)}  # type: ignore[misc]
    told["a second time"] = told_by(lambda: commhooks.attach(ddp, "powersgd").close())
    attachment = commhooks.attach(ddp, "top-k")
    told["powersgd:rank=2"] = told_by(lambda: attachment.replace("powersgd:rank=2"))
    attachment.close()
    exchanger = Exchanger({"a": torch.zeros(30, 40)}, "powersgd:rank=3")
    told["powersgd:rank=3"] = told_by(lambda: exchanger.average({"a": torch.ones(30, 40)}))
    exchanger.close()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told["to the mean"] = told_by(lambda: ModelAverager(model, optimizer, every=2).close())
    told["outer steps"] = told_by(lambda: DiLoCo(model, optimizer, every=2, compressor="int8").close())
    return told


def test_ranks_with_other_kernels_are_told_once_who_they_are_and_nobody_is_refused() -> None:
    told = run_world(told_in_a_world, 3)
    assert told[0] == told[1] == told[2]
    for what, warned in told[0].items():
        if what in (*OTHERS, "a second time", "to the mean", "outer steps"):
            assert not warned, what
        else:
            (text,) = warned
            assert "the devices of ranks 0, 1 and of rank 2 are of different models" in text
            assert f" {what} relies on it" in text or f" {make_compressor(what)} relies on it" in text


def test_kernels_of_any_accelerator_are_its_model_or_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch can tell the model of an XPU, and none of a device of Apple's."""
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: f"model of {device}")
    found = [kernels.kernels_of(torch.device(name)) for name in ("xpu:0", "xpu:1", "mps", "hpu", "cpu")]
    assert len({*found}) == 5
