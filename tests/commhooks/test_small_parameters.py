"""Small parameters, and more ranks than they have blocks: compressed, they send no more than uncompressed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch

import commhooks
from commhooks import make_compressor
from commhooks.compressors import COMPRESSORS
from commhooks.compressors.two_hop import SERVER_ERROR
from commhooks.experiments.timing.payloads import rounds_of
from commhooks.language import BucketView, Compressor, Context, Exchange
from commhooks.language.compressor import map_requests
from commhooks.language.requests import Asked, Judge
from commhooks.lockstep import average_in_lockstep
from commhooks.wrappers.wrapper import Wrapper
from tests import bounds
from tests.cases import CASES, FORMS, NEEDED
from tests.commhooks.workers import Workers, exchangers, gradients_of, largest, normal, zeros
from tests.tiers import in_turn

COMPRESSING: dict[str, Callable[[], Compressor]] = {
    **{case.name: case.make for case in CASES if case.smaller_than_dense},
    **{f"{name}, as it is": functools.partial(make_compressor, name, **NEEDED.get(name, {})) for name in COMPRESSORS},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartsCounted(Wrapper):
    """A compressor whose requests' parts are counted."""

    parts: list[int] = dataclasses.field(default_factory=list, compare=False)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        yield from map_requests(self._count, self.inner.compress(bucket, context))

    def _count(self, asked: Asked) -> Generator[Asked, Any, Any]:
        if not isinstance(asked, Judge):
            self.parts.extend(len(request.parts) for request in (asked if isinstance(asked, tuple) else (asked,)))
        return (yield asked)


@pytest.mark.parametrize(("name", "world_size"), in_turn(list(COMPRESSING), [2, 8, 64], fast=FORMS.__contains__))
def test_no_bucket_sends_more_than_its_gradients_and_8_bytes_a_part(name: str, world_size: int) -> None:
    """Of parameters with fewer blocks than ranks, and with more; alone, and many in a bucket."""
    for shapes in ((1,),), ((33,),), ((128,),), ((1024,),), ((64, 64),), ((10,),) * 30, ((40,),) * 30:
        tensors = {f"layer{number}": tensor for number, tensor in enumerate(normal(zeros(*shapes), 1, seed=0)[0])}
        dense = sum(4 * tensor.numel() for tensor in tensors.values())
        counted = PartsCounted(inner=COMPRESSING[name]())
        sent = sum(size for asked in rounds_of(counted, tensors, world_size) for _, size in asked)
        assert sent <= dense + 8 * sum(counted.parts), shapes


@pytest.mark.parametrize("how", ["spread", "spread-mean"])
def test_what_too_many_ranks_would_send_as_codes_is_sent_whole_with_what_fewer_still_owed(how: str) -> None:
    """One block of int8: 108 bytes for 2 ranks, 324 for 8, and 128 in fp32. Zeros follow 3 steps of 2 ranks.

    Of numbers below 8, in float64, each step rounds 7, the residuals' and shares' way to other ranks 4, and the sum 9.
    """
    tensors = {f"layer{number}": tensor for number, tensor in enumerate(zeros((33,), (64, 64), dtype=torch.float64))}
    few, many, again = (exchangers(tensors, make_compressor("int8", block=32), size) for size in (2, 8, 2))
    short = torch.zeros(33, dtype=torch.float64)
    for step in range(3):
        gradients = gradients_of(tensors, step)
        short += sum(own["layer0"] for own in gradients) / 2
        average_in_lockstep(few, gradients)
        short -= gradients[0]["layer0"]
    first = commhooks.merge_state_dicts([one.state_dict() for one in few])
    for one in many:
        one.load_state_dict(first, world_size=how)
    second = commhooks.merge_state_dicts([one.state_dict() for one in many])
    means = [{name: torch.zeros_like(tensor) for name, tensor in tensors.items()} for _ in many]
    average_in_lockstep(many, means)
    for one in many:
        assert next(iter(one.state_dict()["local"].values()))["layer0"].keys() == {"residual"}
    times = 2 / 8 if how == "spread" else 1
    allowed = (3 * 7 + 4 + 9) * 8 * bounds.unit_roundoff(torch.float64)
    assert largest(short) > 0.01 and largest(means[0]["layer0"] - short * times) <= allowed
    for rank, one in enumerate(again):
        one.load_state_dict(second, world_size=how)
        assert SERVER_ERROR in one.state_dict()["local"][f"rank{rank}"]["layer0"]


def test_small_vectors_of_demo_take_one_collective_more_and_are_averaged_exactly() -> None:
    """47 elements are less than 32 coefficients of 6 bytes, 48 are as much. Halves of sums of two are rounded once."""
    workers = Workers(make_compressor("demo"), 2, zeros((47,), (48,)))
    for step in range(2):
        gradients, before = normal(workers.parameters, 2, seed=step), workers.traffic.payload_bytes
        means = workers.step(gradients)
        assert workers.traffic.payload_bytes - before == 47 * 4 + 32 * 6
        assert largest(means[0][0] - (gradients[0][0] + gradients[1][0]) / 2) <= bounds.unit_roundoff(torch.float32) * 8
        assert not workers.residual(0, 0).any() and workers.residual(0, 1).any()
    assert workers.traffic.collectives == 2 * 2
