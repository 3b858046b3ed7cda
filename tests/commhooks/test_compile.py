"""Compiled models train as others do; what runs in C++, or in threads, is not traced."""

from __future__ import annotations

from typing import Any

import pytest

from tests.commhooks import compiled_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks

PARTS = ["ddp", "module", "step"]
SEVERAL_BUCKETS = {"bucket_cap_mb": 0.0004}  # only ddp_core's: dynamo cuts graphs by PyTorch's, of at least 1 MiB


def test_a_compiled_model_trains_to_the_same_bits_and_traces_neither_reducer_nor_hook() -> None:
    (frames,) = run_ranks(on_every_rank.frames_of, 1, "core", SEVERAL_BUCKETS, "eager", PARTS)
    assert frames["ddp"] <= 6 and frames["module"] == 1 and frames["step"] <= 10, frames


@pytest.mark.parametrize("optimize", [True, False])
def test_pytorchs_compiled_ddp_trains_to_the_same_bits(optimize: bool) -> None:
    run_ranks(on_every_rank.frames_of, 1, "torch", {}, "eager", ["ddp"], optimize)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}], ids=["plain", "unused"])
def test_a_model_compiled_by_inductor_trains_as_in_pytorchs_ddp(settings: dict[str, Any]) -> None:
    run_ranks(
        on_every_rank.frames_of, 2, "core", settings, "inductor", ["ddp", "module"], timeout=280, check_exit=False
    )


def test_a_ddp_that_calls_no_hook_as_hooks_are_called_is_refused() -> None:
    (texts,) = run_ranks(on_every_rank.refusals, 1, check_exit=False)
    assert "_apply_optimizer_in_backward" in texts.pop("in backward")
    assert texts.keys() == {"python_reducer", "powerSGD_hook", "fp16_compress_hook"}
    for text in texts.values():
        assert 'optimize_ddp was "python_reducer" when this model was wrapped' in text, texts
