"""The hooks on Gloo, over several buckets, on both DDPs. What each rank runs is in hooks_in_worlds.py."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commhooks
from tests import bounds
from tests.cases import DDP_AND_POLICY, EVERY_FORM_OR_ALL
from tests.commhooks import hooks_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])


@pytest.mark.kernels
@both_ddps
def test_the_default_hooks_give_pytorchs_mean(kind: str) -> None:
    for worst in run_ranks(on_every_rank.default_hooks_against_pytorchs, 2, kind, check_exit=False):
        for name, error in worst.items():
            wire = torch.float16 if "fp16" in name else torch.bfloat16 if "bf16" in name else None
            assert error <= (bounds.of_mean(2, wire) if wire else 0.0), name


@both_ddps
def test_the_fp16_wrapper_of_powersgd_casts_the_wire_and_nothing_else(kind: str) -> None:
    for payload_bytes, dtypes in run_ranks(on_every_rank.powersgd_hook_with_fp16_on_the_wire, 2, kind):
        assert payload_bytes == 3 * 2 * ((40 + 60) * 2 + 9)
        assert dtypes == {torch.float32}


@pytest.mark.kernels
@DDP_AND_POLICY
@EVERY_FORM_OR_ALL
def test_every_case_is_over_gloo_bit_for_bit_what_it_is_in_lockstep(kind: str, policy: str, names: list[str]) -> None:
    for differ in run_ranks(on_every_rank.every_case_like_lockstep, 2, kind, policy, names):
        assert differ == []


@both_ddps
def test_attachments_come_and_go(kind: str) -> None:
    run_ranks(on_every_rank.attach_detach_attach, 2, kind)


def test_process_groups_come_and_go() -> None:
    run_ranks(on_every_rank.groups_come_and_go, 2, check_exit=False)


def test_attach_refuses_what_is_no_distributed_model() -> None:
    with pytest.raises(commhooks.AttachError, match="expected a DistributedDataParallel.*got Linear"):
        commhooks.attach(torch.nn.Linear(2, 2), "fp16")


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="'powersdg' is not known; known are adaptive-rank, .* Did you mean 'powersgd'"
    ):
        commhooks.make_compressor("powersdg")
    with pytest.raises(ValueError, match="'fp16' has no setting 'rank'"):
        commhooks.make_compressor("fp16", rank=3)


@pytest.mark.parametrize(
    "name", ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "noop_hook", "powerSGD_hook"]
)
def test_hooks_have_the_shape_that_pytorch_wants(name: str) -> None:
    hook: Any = getattr(commhooks, name)
    signature = inspect.signature(hook)
    assert signature.parameters["bucket"].annotation is dist.GradBucket  # type: ignore[attr-defined]
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]
    assert hook.__name__ not in ("bf16_compress_hook", "bf16_compress_wrapper_hook")  # PyTorch refuses these off NCCL


def test_the_state_of_powersgd_takes_pytorchs_arguments_in_pytorchs_order() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    every = inspect.signature(commhooks.PowerSGDState).parameters.values()
    ours = [p for p in every if p.kind is not p.KEYWORD_ONLY]
    theirs = inspect.signature(PowerSGDState).parameters.values()
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


def test_wrappers_can_be_imported_first() -> None:
    subprocess.run([sys.executable, "-c", "import commhooks.wrappers"], check=True, timeout=60)
