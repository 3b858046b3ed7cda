"""Ranks whose processors compute other last bits."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import commhooks
from commhooks import DiLoCo, Exchanger, ModelAverager, make_compressor
from commhooks.communicators import kernels
from tests.commhooks.models import wrap
from tests.processors import OFF_INTEL, Kernels, kernels_here
from tests.world import run_world

RELYING = ("powersgd", "powersgd:start_after=3,wire=fp16", "adaptive-rank", "demo", "sparse-loco:clip_to_median=true")
"""Hooks of which each rank computes, with kernels that differ, what must be equal on all."""
OTHERS = ("all-reduce", "bf16", "int8", "sign", "top-k", "random-k", "sparse-loco", "dgc", "signum")


def told_by(function: Callable[[], Any]) -> list[str]:
    """Return what a call warns of kernels."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(one.message) for one in caught if "last bits" in str(one.message)]


def told_in_a_world(rank: int) -> tuple[Kernels, dict[str, list[str]]]:
    """Return a rank's kernels, of which the last rank's are others, and what it is told in each way to average."""
    if rank == 2:
        os.environ.update(OFF_INTEL["SSE4"])  # MKL reads it when it is first called
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
    told["DiLoCo's outer optimizer"] = told_by(lambda: DiLoCo(model, optimizer, every=2, compressor="int8").close())
    return kernels_here(), told


def test_ranks_with_other_kernels_are_told_once_who_they_are_and_nobody_is_refused() -> None:
    kernels, told = zip(*run_world(told_in_a_world, 3), strict=True)
    if kernels[0] == kernels[2]:
        pytest.skip("no variable gives a process other kernels here")
    assert told[0] == told[1] == told[2]
    for what, warned in told[0].items():
        if what in (*OTHERS, "a second time", "to the mean"):
            assert not warned, what
        else:
            (text,) = warned
            assert "the arithmetic of ranks 0, 1 and of rank 2 differs in the last bits" in text
            assert f" {what} relies on it" in text or f" {make_compressor(what)} relies on it" in text


def test_kernels_of_any_accelerator_are_its_model_or_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch can tell the model of an XPU, and none of a device of Apple's."""
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device: f"model of {device}")
    found = [kernels.kernels_of(torch.device(name)) for name in ("xpu:0", "xpu:1", "mps", "hpu")]
    assert len({*found, kernels.kernels_of(None)}) == 5


@pytest.mark.parametrize("asked", ["bf16", "tf32", "ieee"])
def test_what_is_compared_is_what_products_are_now(asked: str) -> None:
    """A precision that was asked of products in between counts, where a processor heeds it."""
    kernels.kernels_of(None)
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", SimpleNamespace(fp32_precision=""))  # from PyTorch 2.9 on
    before = matmul.fp32_precision
    matmul.fp32_precision = asked
    try:
        assert kernels.kernels_of(None) == kernels._of_cpu.__wrapped__("")
    finally:
        matmul.fp32_precision = before


def test_comparing_kernels_takes_no_time_and_disturbs_nothing() -> None:
    compute = kernels._of_cpu.__wrapped__
    own, drawn, seconds = kernels.kernels_of(None), torch.get_rng_state(), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            for _ in range(5):
                begun = time.thread_time()
                assert compute("") == own
                seconds.append(time.thread_time() - begun)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
    assert min(seconds) < 0.005
    assert torch.equal(torch.get_rng_state(), drawn)
