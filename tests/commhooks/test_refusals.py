"""What a compressor must not do, said in words before anything is lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks import ErrorFeedback, Exchanger, SettingsError, WireDtype
from commhooks.codecs import Codec
from commhooks.compressors import TwoHop
from commhooks.errors import CompressorError
from commhooks.language import (
    AllGather,
    AllReduce,
    BucketView,
    Compressor,
    Context,
    Entry,
    Exchange,
    Judge,
    Loss,
    Part,
    Place,
)
from commhooks.lockstep import lockstep_connections
from tests.commhooks.workers import Workers, zeros


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean(Compressor):
    """An average, perhaps of too few elements, and something that it keeps."""

    is_short: bool = False
    kept: Any = None

    def state(self, place: Place) -> dict[str, Entry]:
        return {"declared": Entry(kind="private")}

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        (slot,) = bucket.slots
        (mean,) = yield AllReduce(slot.part(slot.form()), average=True, last=True)
        slot.commit("declared", mean, (yield Judge(mean)))
        slot.write(mean[:-1] if self.is_short else mean)


@pytest.mark.parametrize("policy", ["fifo", "fused"])
def test_a_mean_of_another_shape_is_named_with_rank_and_bucket(policy: str) -> None:
    workers = Workers(Mean(is_short=True), 2, zeros((5,)), policy=policy)
    complaint = r"a mean of shape \(4,\) was written for gradients of shape \(5,\)"
    with pytest.raises(CompressorError, match=rf"(?s)rank \d, step 0, bucket 0 \(parameters layer0\): .*{complaint}"):
        workers.step([[torch.ones(5)]] * 2)


Thawed = dataclasses.make_dataclass("Thawed", [], bases=(Compressor,), namespace={"compress": Mean.compress})


@pytest.mark.parametrize(
    ("compressor", "complaint"),
    [
        (Mean(kept=torch.zeros(2)), r"Mean.kept holds a tensor, which no checkpoint would save"),
        (ErrorFeedback(inner=Mean(kept=torch.zeros(2))), r"Mean.kept holds a tensor"),
        ("powersdg", "Did you mean 'powersgd'"),
        (3, r"expected a Compressor or a name \(got 3\); write for example commhooks\.make_compressor\("),
        (Mean, r"expected a Compressor or a name \(got .*Mean'>\); write Mean\(\.\.\.\), with its settings"),
        (Mean(kept=[1]), "must be hashable, such as tuples"),
        (Thawed(), "Thawed must be a frozen dataclass"),
    ],
    ids=["a tensor", "a tensor inside", "a misspelt name", "a number", "a class", "a list", "not frozen"],
)
def test_what_is_no_compressor_of_settings_alone_is_refused(compressor: Any, complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        Exchanger({"w": torch.zeros(3)}, compressor, connection=lockstep_connections(1)[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Short(Codec):
    """A codec that loses a column."""

    block: int = 8

    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        return (blocks.to(torch.bfloat16),)

    def decode(self, code: Sequence[Tensor]) -> Tensor:
        return code[0][:, 1:].float()

    def relative_error(self) -> float:
        return 0.0


def test_a_codec_that_decodes_to_another_shape_is_named() -> None:
    workers = Workers(TwoHop(codec=Short()), 2, zeros((24,)))
    with pytest.raises(
        CompressorError, match=r"Short\(block=8\).decode must return blocks of shape \(\d, 8\) \(got \(\d, 7\)\)"
    ):
        workers.step([[torch.ones(24)]] * 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expanding(Mean):
    """Loses more than it is given."""

    def loss(self, name: str, parameter: Tensor) -> Loss:
        return Loss(1.5)


def test_feedback_of_what_expands_is_refused_unless_it_fades() -> None:
    tensors = {"w": torch.zeros(3)}
    for decay in (1.0, 0.82):
        with pytest.raises(SettingsError, match="of parameter 'w', inner may lose 1.5 times.*set decay below 0.816,"):
            Exchanger(tensors, ErrorFeedback(inner=Expanding(), decay=decay), connection=lockstep_connections(1)[0])
    Exchanger(tensors, ErrorFeedback(inner=Expanding(), decay=0.81), connection=lockstep_connections(1)[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slip(Compressor):
    """A slip of the pen in `compress`."""

    slip: str

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        return self._compress(bucket) if self.slip != "no generator" else None  # type: ignore[return-value]  # tested

    def _compress(self, bucket: BucketView) -> Exchange:
        (slot,) = bucket.slots
        if self.slip == "not yielded" and Judge(slot.gradient):
            return
        if self.slip == "integers":
            yield AllReduce(slot.part(slot.gradient.int()), average=True)
        if self.slip == "gathers":
            yield AllGather(slot.part(slot.gradient))
        if self.slip == "no part":
            yield AllReduce(slot.gradient)  # type: ignore[arg-type]  # tested
        if self.slip == "layout":
            yield AllReduce(Part(slot.gradient[1:], bucket.layout, in_place=True))
        (mean,) = yield AllReduce(slot.part(slot.form()), average=True, last=True)
        finite = yield Judge(mean)
        slot.keep(mean[:-1], finite)


@pytest.mark.parametrize(
    ("slip", "complaint"),
    [
        ("no generator", "Slip.compress must be a generator, which yields requests .it returned NoneType"),
        ("not yielded", "write `finite = yield Judge"),
        ("integers", "a part of dtype torch.int32 has no mean"),
        ("gathers", "only sums can be cast on the wire.*asked for an all-gather"),
        ("no part", r"AllReduce: expected one Part or more, such as slot.part\(tensor\)"),
        ("layout", r"Part: the layout must describe the tensor's 4 elements \(got 5\)"),
        ("shape", r"what was not sent, of shape \(4,\), was kept for gradients of shape \(5,\)"),
    ],
)
def test_slips_of_the_pen_are_named(slip: str, complaint: str) -> None:
    compressor: Compressor = Slip(slip=slip)
    if slip == "gathers":
        compressor = WireDtype(inner=compressor, dtype=torch.float16)
    workers = Workers(compressor, 2, zeros((5,)))
    with pytest.raises(CompressorError, match=complaint):
        workers.step([[torch.ones(5)]] * 2)


def test_a_state_that_is_not_given_a_place_is_refused_with_what_a_place_has() -> None:
    """It would otherwise fail at the first bucket only."""
    told = r"Old\.state\(.*name.*world_size.*\): state is given one Place; define state\(self, place\), and ask place"
    with pytest.raises(CompressorError, match=told):
        type("Old", (Mean,), {"state": lambda self, name, parameter, world_size: {}})
    assert type("New", (Mean,), {"state": lambda self, where, more=0: {}})().state(Place("", torch.zeros(1), 1)) == {}
