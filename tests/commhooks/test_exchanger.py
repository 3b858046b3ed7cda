"""Named tensors, averaged without any DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import CollectiveError, CompressorError, Exchanger, SettingsError, lockstep_lines
from tests import bounds
from tests.commhooks.ranks import run_ranks

TENSORS = {
    "a": torch.zeros(24, 40),
    "b": torch.zeros(5, dtype=torch.float64),
    "c": torch.zeros(3, 4).t(),
    "d": torch.zeros(()),
}


def drawn(rank: int, step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(t.shape, generator=generator).to(t.dtype) for name, t in TENSORS.items()}


def means(world_size: int, step: int = 0) -> dict[str, Tensor]:
    return {
        name: torch.stack([drawn(rank, step)[name].double() for rank in range(world_size)]).mean(0) for name in TENSORS
    }


@pytest.mark.parametrize("policy", ["fifo", "fused"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_workers_of_one_process_get_the_mean(policy: str, world_size: int) -> None:
    exchangers = [Exchanger(TENSORS, "all-reduce", line=line) for line in lockstep_lines(world_size, policy)]
    for step in range(3):
        values = [drawn(rank, step) for rank in range(world_size)]
        commhooks.average_in_lockstep(exchangers, values)
        for own in values:
            for name, mean in means(world_size, step).items():
                allowed = bounds.of_mean(world_size, TENSORS[name].dtype) * 5  # no element is above 5
                assert (own[name].double() - mean).abs().amax() <= allowed
    assert exchangers[0].steps == 3
    assert exchangers[0].statistics().gradient_elements == 3 * sum(t.numel() for t in TENSORS.values())
    assert set(exchangers[0].by_parameter()) == set(TENSORS)


@pytest.mark.parametrize("name", ["powersgd", "top-k", "sign", "int4", "fp16"])
def test_ranks_of_a_process_group_get_what_workers_of_one_process_get(name: str) -> None:
    """At two ranks a sum's bits do not depend on its order."""
    exchangers = [Exchanger(TENSORS, name, line=line) for line in lockstep_lines(2, "fused")]
    for step in range(3):
        wanted = [drawn(rank, step) for rank in range(2)]
        commhooks.average_in_lockstep(exchangers, wanted)
    for rank, got in enumerate(run_ranks(average_over_gloo, 2, name)):
        assert all(torch.equal(got[tensor], wanted[rank][tensor]) for tensor in TENSORS)


def average_over_gloo(rank: int, name: str) -> dict[str, Tensor]:
    """Average three times over a process group; save and load in between."""
    exchanger = Exchanger(TENSORS, name)
    for step in range(3):
        values = drawn(rank, step)
        exchanger.average(values)
        saved = exchanger.state_dict()
        exchanger.close()
        exchanger = Exchanger(TENSORS, name)
        exchanger.load_state_dict(saved)
    exchanger.close()
    return values


def test_zeros_are_values_like_others() -> None:
    """A DDP hands in zeros for a rank that has run out of inputs; an Exchanger does not."""
    exchangers = [Exchanger({"w": torch.zeros(64)}, "top-k", line=line) for line in lockstep_lines(2)]
    commhooks.average_in_lockstep(exchangers, [{"w": torch.arange(64.0)} for _ in range(2)])
    silence = [{"w": torch.zeros(64)} for _ in range(2)]
    commhooks.average_in_lockstep(exchangers, silence)
    assert silence[0]["w"].any(), "what was not sent in the first step is sent in the second"


@pytest.mark.parametrize(
    ("tensors", "compressor", "complaint"),
    [
        ({}, "top-k", "must name at least one"),
        ({"w": torch.zeros(3, dtype=torch.int64)}, "top-k", "'w' must be dense and of floating point"),
        ({"w": torch.zeros(3)}, 7, "expected a Compressor or a name"),
        ({"w": torch.zeros(3)}, commhooks.PowerSGD(skip=("head",)), "'head' must match"),
    ],
    ids=["none", "integers", "no compressor", "a pattern"],
)
def test_what_cannot_work_is_refused_when_it_is_built(tensors: Any, compressor: Any, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        Exchanger(tensors, compressor, line=lockstep_lines(1)[0])


def test_other_tensors_are_refused_by_name_and_nothing_is_lost() -> None:
    exchanger = Exchanger(TENSORS, "all-reduce", line=lockstep_lines(1)[0])
    for wrong in ({"a": torch.zeros(24, 40)}, drawn(0) | {"b": torch.zeros(5)}, drawn(0) | {"z": torch.zeros(1)}):
        with pytest.raises(CompressorError, match="rank 0: Exchanger was made for other tensors: '[bz]'"):
            exchanger.average(wrong)
    assert exchanger.steps == 0


def test_ranks_that_name_other_tensors_disagree() -> None:
    for told in run_ranks(disagree, 2, check_exit=False):
        assert "ranks disagree" in told and "tensor w1: missing (rank 0), shape (3,)" in told


def disagree(rank: int) -> str:
    exchanger = Exchanger({f"w{rank}": torch.zeros(3)}, "all-reduce")
    try:
        exchanger.average({f"w{rank}": torch.zeros(3)})
    except (CollectiveError, commhooks.AttachError, RuntimeError) as error:
        return str(error)
    return "nothing"
