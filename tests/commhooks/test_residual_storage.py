"""Residuals in half the memory, or in the host's, and what an attachment says that it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import commhooks
from commhooks import make_compressor
from commhooks.lockstep import average_in_lockstep, lockstep_connections
from commhooks.native import compiled
from tests import bounds
from tests.cases import CASES, Case, is_form
from tests.commhooks.models import Given, wrap
from tests.commhooks.workers import Workers, largest, mean_of, normal, zeros
from tests.tiers import in_turn
from tests.world import on_ranks

FEEDING_BACK = [case for case in CASES if case.error_feedback and not case.owes_as]
pytestmark = pytest.mark.kernels
DTYPES = [torch.float32, torch.float16, torch.float64]


@pytest.mark.parametrize(("case", "dtype"), in_turn(FEEDING_BACK, DTYPES, fast=is_form), ids=str)
def test_residuals_in_bf16_lose_no_more_than_their_rounding(case: Case, dtype: torch.dtype) -> None:
    """Every step: sent + residual = what was to be sent, up to what the step, bf16 and the gradient's dtype round."""
    parameters = zeros((24, 40), (40,), (24, 40), dtype=dtype)
    workers = Workers(case.make(), 2, parameters, storage="bf16")
    for step in range(6):
        unsent = [workers.unsent(index) for index in range(3)]
        owed = [[workers.residual(rank, i).double() for i in range(3)] for rank in (0, 1)]
        gradients = normal(parameters, 2, seed=step, scale=0.25)
        losses = case.lost(gradients, owed)
        means = workers.step(gradients)
        for rank in (0, 1):
            for *_, kept in workers.states[rank].residuals():
                assert kept.dtype == torch.bfloat16
        for index in range(3):
            to_send = mean_of(gradients, index) + case.decay * unsent[index]
            lost = to_send - means[0][index].double() - workers.unsent(index)
            rounding = losses[index] + largest(means[0][index]) * bounds.unit_roundoff(dtype)
            assert largest(lost) <= rounding + rounded_in_bf16(workers, index), (step, index)


def rounded_in_bf16(workers: Workers, index: int) -> float:
    """Return what keeping in bf16 has rounded away at most: of a residual, and of a server's error."""
    residuals = largest(*(workers.residual(rank, index) for rank in (0, 1)))
    states = [table.of(workers.parameters[index]) for table in workers.states]
    served = largest(*(kept for state in states for kept in state.of_kind("share").values()))
    return (residuals + served) * bounds.unit_roundoff(torch.bfloat16)


@pytest.mark.parametrize(("saved_in", "loaded_in"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_residuals_that_are_loaded_into_another_storage_go_on(saved_in: Any, loaded_in: Any) -> None:
    tensors = {"w": torch.zeros(40)}
    one, other = (
        commhooks.Exchanger(tensors, "top-k:ratio=0.1", connection=lockstep_connections(1)[0], residuals=storage)
        for storage in (saved_in, loaded_in)
    )
    average_in_lockstep([one], [{"w": 2.0 ** torch.arange(40)}])
    other.load_state_dict(one.state_dict())
    means = {"w": torch.zeros(40)}
    average_in_lockstep([other], [means])
    assert means["w"].nonzero().flatten().tolist() == [32, 33, 34, 35] and means["w"][35] == 2.0**35


@on_ranks(2)
def test_a_report_adds_up_what_is_there(rank: int) -> None:
    for storage in ("fp32", "bf16", "host"):
        model = wrap("core", Given((60, 40), (60, 40), (40,)))
        attachment = commhooks.attach(
            model, make_compressor("powersgd", rank=2), residuals=storage, atomic=storage == "fp32"
        )
        for step in range(16):  # the messages of the first bucket, which is rebuilt, are let go after some
            model(*normal(zeros((60, 40), (60, 40), (40,)), 2, seed=step)[rank]).backward()
        report = attachment.memory()
        bytes_each = 2 if storage == "bf16" else 4
        owed = 2 * 60 * 40 * bytes_each
        assert (report.residuals, report.residuals_on_host) == ((0, owed) if storage == "host" else (owed, 0))
        assert report.gradients == (2 * 60 * 40 + 40) * 4
        assert report.bases == 2 * 40 * 2 * 4
        assert report.copies == (report.bases + owed if storage == "fp32" else 0)
        factors_and_messages = 2 * (60 + 40) * 2 * 4 * 2 + 2 * 40 * 4
        is_eager = compiled().level is None or storage == "bf16"
        # Matrices as small as these are copied, and so is a term of their products.
        side_by_side = 2 * 2 * 60 * 40 * 4 * is_eager
        expected = factors_and_messages + side_by_side
        assert 0.95 * expected <= report.working <= 1.05 * expected, report
        assert report.by_parameter["weights.0"] == owed // 2 + 40 * 2 * 4
        assert report.total == owed + report.bases + report.copies + report.working
        attachment.close()


def test_an_unknown_storage_is_refused() -> None:
    with pytest.raises(commhooks.SettingsError, match="residuals='fp8': residuals must be one of fp32, bf16, host"):
        Workers(make_compressor("fp16"), 2, zeros((24, 40)), storage="fp8")
