"""One handle for every way in: opening, replacing and ending, in all channels or in none."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
import ddp_core
from commhooks import DiLoCo, Exchanger, SettingsError
from commhooks.compressors import PowerSGD, TopK
from commhooks.errors import CompressorError, HookTypeError
from commhooks.exchange import Channel, Feed, Handle, open_exchange
from commhooks.exchange.buckets import FlatBucket, allocated
from commhooks.exchange.options import CANNOT_APPLY, DEFAULTS, Options, settings_of
from commhooks.lockstep import lockstep_connections
from commhooks.scheduling.lockstep import LockstepConnection, run_in_turns
from tests.commhooks.told import told_by
from tests.ddp_core.facts import Facts

GROUPS = {"a": {"x": torch.zeros(64, 64)}, "b": {"y": torch.zeros(64, 64)}}
facts = Facts(world_size=2)


def step(model: nn.Module, rank: int) -> None:
    model(torch.full((2, 64), float(rank + 1))).square().mean().backward()


class Given(Feed):
    """A user's own feed, whose buckets are handed in by hand."""

    caller = "give"
    label = "given"

    def __init__(self, channels: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._channels = channels

    @property
    def process_group(self) -> dist.ProcessGroup:
        group = dist.group.WORLD
        assert group is not None
        return group

    def like(self) -> Mapping[str, Mapping[str, Tensor]]:
        return self._channels


def held(channels: Mapping[str, Mapping[str, Tensor]]) -> Handle[Channel]:
    """Return the handle of a rank that is alone, whose buckets wait for `run_in_turns`."""
    return Handle(Given(channels), TopK(ratio=0.1), settings_of("open_exchange", {}), lockstep_connections(1)[0])


def bucket_of(named: Mapping[str, Tensor]) -> FlatBucket:
    return FlatBucket(0, list(named), named, True, allocated)


class Watched(Given):
    def averaged_by(self, channel: Channel) -> Mapping[Tensor, str]:
        return {tensor: name for name, tensor in self.like()[channel.label].items()}


@facts
def watching_needs_a_guard_where_ranks_average(rank: int) -> None:
    weight = torch.zeros(64, requires_grad=True)
    with open_exchange(Watched({"a": {"w": weight}}), "int8") as handle:
        told = told_by(lambda: handle.watch(torch.optim.SGD([weight], lr=0.1)))
    assert told.error == "SettingsError" and "give: watch needs a guard" in told.text, told


class FailsToPlugIn(Given):
    def plug(self, channels: Mapping[str, Any]) -> None:
        if channels["a"].engine.connection.rank == 0:
            raise OSError("no such socket")


@facts
def a_feed_is_plugged_in_on_every_rank_or_on_none(rank: int) -> None:
    told = told_by(lambda: open_exchange(FailsToPlugIn({"a": {"w": torch.zeros(64)}}), "int8"))
    assert told.error == ("CollectiveError" if rank else "OSError") and "no such socket" in told.text, told
    assert rank == 0 or "rank 0: give could not plug in: OSError" in told.text, told
    assert told.seconds < 10


@facts
def replacing_the_compressor_of_diloco_leaves_buffers_exact(rank: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diloco = DiLoCo(model, optimizer, every=1, compressor="all-reduce")
    diloco.exchange.replace("top-k:ratio=0.1")
    assert str(diloco.exchange["fragment 0 of 1"].compressor).startswith("top-k")
    assert str(diloco.exchange["buffers"].compressor) == "all-reduce"
    assert "no channel buffers" in told_by(lambda: diloco.exchange.replace({"buffers": "int8"})).text
    counted: Any = model[1].num_batches_tracked
    counted.fill_(1_000_005)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    diloco.step()
    assert int(counted) == 1_000_006
    diloco.close()


@facts
def no_channel_switches_if_ranks_name_other_compressors_or_channels(rank: int) -> None:
    exchanger = Exchanger(GROUPS, "all-reduce", hook_timeout=20.0)
    told = told_by(lambda: exchanger.replace({"a": "fp16", "b": ("int8", "int4")[rank]}))
    assert told.error == "AttachError" and "ranks disagree" in told.text
    told = told_by(lambda: exchanger.replace({"a": "fp16"} | ({"c": "fp16"} if rank else {})))
    assert told.error == ("SettingsError" if rank else "AttachError") and "no channel c" in told.text, told
    assert {str(one.compressor) for one in exchanger.values()} == {"all-reduce"}
    for label, tensors in GROUPS.items():
        exchanger[label].average({name: torch.ones_like(tensor) for name, tensor in tensors.items()})
    exchanger.close()


@facts
def a_model_that_is_hardly_compressed_is_told_of_once(rank: int) -> None:
    model = ddp_core.DistributedDataParallel(nn.ParameterDict({"experts": torch.zeros(8, 64, 96)}))
    first = PowerSGD(rank=4, matrices="first-dimension")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        commhooks.attach(model, first).close()
        commhooks.attach(model, "powersgd:rank=4").close()
        commhooks.attach(model, PowerSGD(matrices="first-dimension", skip=("experts",))).close()
    told = [str(one.message) for one in heard if "are sent uncompressed" in str(one.message)]
    assert len(told) == (rank == 0), told
    for text in told:
        assert "100% of the gradients' bytes" in text and "'experts' of shape (8, 64, 96) (100%)" in text
        assert "24,608 elements would be sent of each matrix 8×6,144, not 2 times fewer" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told_once = told_by(lambda: commhooks.attach(model, first))
    assert told_once.error == ("UserWarning" if rank == 0 else "CollectiveError"), told_once
    commhooks.attach(model, "fp16").close()


@facts
def an_unknown_option_is_the_same_error_in_every_way_in(rank: int) -> None:
    model, unknown = nn.Linear(2, 2), dict[str, Any](polcy="fifo")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for way in (
        lambda: commhooks.attach(model, "fp16", **unknown),
        lambda: commhooks.attach_sharded(model, "fp16", **unknown),
        lambda: commhooks.attach_replicas(model, "fp16", **unknown),
        lambda: Exchanger(GROUPS, "fp16", **unknown),
        lambda: DiLoCo(model, optimizer, every=2, **unknown),
    ):
        with pytest.raises(HookTypeError, match=r"^\w+\(\) got an unexpected .* 'polcy'. Did you mean 'policy'"):
            way()


test_on_two_ranks = facts.tests()


def test_a_bucket_is_refused_while_its_last_mean_is_under_way() -> None:
    handle = held(GROUPS)
    bucket = bucket_of(GROUPS["a"])
    engine, connection = handle["a"].engine, handle.connection
    assert isinstance(connection, LockstepConnection)
    for _ in range(2):
        future = engine.run(bucket)
        run_in_turns([connection])
        assert future.done()
    engine.run(bucket)
    with pytest.raises(CompressorError, match=r"bucket 0 \(parameters x\) was handed in again before the future"):
        engine.run(bucket)


def test_what_belongs_to_the_line_and_what_has_a_wrong_value_is_refused() -> None:
    connection, model = lockstep_connections(1)[0], nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingsError, match="DiLoCo: hook_timeout belong to the connection"):
        DiLoCo(model, optimizer, every=2, connection=connection, hook_timeout=1.0)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"residuals": "fp8"}, "residuals must be one of fp32, bf16, host"),
        ({"guard": "warn"}, "guard cannot apply: no optimizer steps"),
    ]
    for options, what in wrong:
        with pytest.raises(SettingsError, match=what):
            Exchanger({"x": torch.zeros(2)}, "fp16", connection=connection, **options)


def test_the_table_of_the_guide_has_every_option_and_says_what_cannot_apply() -> None:
    from tests.world.launcher import ROOT

    lines = (ROOT / "docs/guide/options.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in lines if row.startswith("| ")]
    ways, *options = rows
    assert [row[0] for row in options if row[0] != "---"] == list(Options.__annotations__)
    for name, *cells in options[1:]:
        for way, cell in zip(ways[1:], cells, strict=True):
            assert (cell == "–") == (name in CANNOT_APPLY.get(way, {})), (way, name)
            assert name != "policy" or cell == "–" or cell == f'"{DEFAULTS[way]}"', (way, cell)
