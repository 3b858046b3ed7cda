"""Process groups written in Python: every hook works, or says what it lacks, and bypasses no group silently."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
from commhooks.communicators import Communicator, RecordingCommunicator
from commhooks.experiments import versions
from ddp_core import DistributedDataParallel
from tests.ddp_core.facts import Facts
from tests.ddp_core.models import MEAN, Branches, grads, ones
from tests.parity.training import ddp_class
from tests.python_groups import Around, Elastic, Lonely, made_by_torch
from tests.world import on_ranks

facts = Facts(check_exit=False)  # PyTorch's DDP aborts in about 6 % of exits
BYPASSED = r"private Gloo group that bypasses the process group 'around' named '\w+' \(Around\)"
NO_NAME = r"'around' \(Around\) has no name and store.*process_group="


@contextmanager
def bypass_warned(times: int) -> Iterator[None]:
    """Expect so many warnings that name a bypassed group, and no others about the exchange."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    texts = [text for one in said if "are sent uncompressed" not in (text := str(one.message))]  # the model is tiny
    assert len(texts) == times, texts
    for text in texts:
        assert re.search(BYPASSED, text), text


def step(rank: int, ddp: Any) -> None:
    """Take a step, and see that gradients are means."""
    ddp.zero_grad()
    ddp(ones(rank)).backward()
    assert grads(ddp.module) == [[MEAN], [MEAN]]


def in_pytorchs_class_and_ours(group: Any) -> list[Any]:
    return [ddp_class(which)(Branches(), process_group=group) for which in ("ours", "torch")]


def itself(group: Any) -> Any:
    return group


def powersgd_state(group: Any) -> Any:
    return commhooks.PowerSGDState(group, start_powerSGD_iter=0)


@facts
def a_hook_warns_once_that_it_bypasses_the_group(rank: int) -> None:
    hooks: list[tuple[Callable[[Any], Any], Any]] = [
        (itself, commhooks.allreduce_hook),
        (itself, commhooks.fp16_compress_hook),
        (powersgd_state, commhooks.powerSGD_hook),
    ]
    for state_of, hook in hooks:
        for which in ("ours", "torch"):
            group = made_by_torch("around")
            ddp: Any = ddp_class(which)(Branches(), process_group=group)
            ddp.register_comm_hook(state_of(group), hook)
            with bypass_warned(times=1):
                step(rank, ddp)
                step(rank, ddp)
            assert group.calls["allreduce"] == 0


@facts
def attach_warns_that_it_bypasses_the_group_unless_one_or_a_manager_is_named_on_purpose(rank: int) -> None:
    group = made_by_torch("around")
    recorders: list[RecordingCommunicator] = []

    def record(inner: Communicator) -> Communicator:
        recorders.append(RecordingCommunicator(inner))
        return recorders[-1]

    options: list[dict[str, Any]] = [
        {},
        {"process_group": group},
        {"process_group": dist.group.WORLD},
        {"wrap_communicator": record},
    ]
    for ddp in in_pytorchs_class_and_ours(group):
        for chosen in options:
            with bypass_warned(times=0 if chosen else 1):
                attachment = commhooks.attach(ddp, "powersgd", **chosen)
                step(rank, ddp)
                attachment.close()
    assert group.calls["allreduce"] == 0
    assert all(recorder.traffic.collectives for recorder in recorders)


@facts
def a_group_without_name_and_store_is_refused(rank: int) -> None:
    assert dist.group.WORLD is not None
    group = Around(dist.group.WORLD)
    for ddp in in_pytorchs_class_and_ours(group):
        with pytest.raises(commhooks.AttachError, match=NO_NAME):
            commhooks.attach(ddp, "powersgd")
        with bypass_warned(times=0):
            attachment = commhooks.attach(ddp, "powersgd", process_group=dist.group.WORLD)
            step(rank, ddp)
            assert group.calls["allreduce"] == 0
        attachment.close()
    for hook in (commhooks.allreduce_hook, commhooks.fp16_compress_hook):
        other: Any = ddp_class("ours")(Branches(), process_group=group)
        other.register_comm_hook(group, hook)
        with pytest.raises(commhooks.AttachError, match=NO_NAME):
            step(rank, other)
    with pytest.raises(commhooks.AttachError, match=NO_NAME):
        commhooks.PowerSGDState(group)


@facts
def a_group_of_other_ranks_than_torch_knows_is_refused(rank: int) -> None:
    ddp = ddp_class("ours")(Branches(), process_group=made_by_torch("boastful"), init_sync=False)
    with pytest.raises(commhooks.AttachError, match=r"has 34 ranks, but torch\.distributed knows 2 .*process_group="):
        commhooks.attach(ddp, "powersgd")


test = facts.tests()


@on_ranks(3)
def test_a_group_that_changes_its_ranks_raises_and_is_attached_to_anew(rank: int) -> None:
    """The former ranks would average among themselves; who has joined has made no private group before."""

    def given() -> DistributedDataParallel:
        return DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=Lonely(), init_sync=False)

    def mean(ddp: DistributedDataParallel) -> float:
        ddp.zero_grad()
        ddp(torch.full((1, 1), float(2**rank))).sum().backward()
        (gradient,) = (parameter.grad for parameter in ddp.parameters())
        return float(gradient)  # type: ignore[arg-type]  # there is one

    elastic, attachments, stateless = Elastic([0, 1]), list[Any](), given()
    stateless.register_comm_hook(elastic, commhooks.allreduce_hook)
    for members, expected in (([0, 1], 1.5), ([0, 1, 2], 7 / 3), ([1, 2], 3.0), ([2, 0, 1], 7 / 3)):
        was = elastic.members
        elastic.members = members
        if rank in members:
            for _, ddp, exchanger in attachments:
                with pytest.raises(commhooks.AttachError, match=rf"rank {was.index(rank)} of {len(was)}, and is rank "):
                    mean(ddp)
                with pytest.raises(commhooks.AttachError, match=r"round \d|step \d.*the process group has changed"):
                    exchanger.average({"x": torch.ones(1)})
        for attachment, _, exchanger in attachments:
            attachment.close()
            exchanger.close()
        attachments = []
        if rank in members:
            ddp = given()
            attachment = commhooks.attach(ddp, "all-reduce", process_group=elastic)
            exchanger = commhooks.Exchanger({"x": torch.ones(1)}, "all-reduce", process_group=elastic)
            attachments = [(attachment, ddp, exchanger)]
            exchanger.average({"x": (x := torch.full((1,), float(2**rank)))})
            assert mean(ddp) == pytest.approx(expected) == mean(stateless) == float(x)
        dist.barrier()
    for attachment, _, exchanger in attachments:
        attachment.close()
        exchanger.close()


@pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"),
    reason="PyTorch reconfigures groups from 2.14 on: see make test-torch",
)
@on_ranks(3, backend=None, check_exit=False)  # Gloo's old connections may end after their process
def test_a_group_that_pytorch_reconfigures_raises_and_is_attached_to_anew(rank: int, tmp_path: Path) -> None:
    torch_dist: Any = dist
    store = torch_dist.FileStore(str(tmp_path / "store"), 3)
    group_store = torch_dist.PrefixStore("group", store)
    torch_dist.init_process_group("gloo", store=group_store, rank=rank, world_size=3, enable_reconfigure=True)

    def mean(ddp: Any) -> float:
        ddp.zero_grad()
        ddp(torch.full((1, 1), float(2**rank))).sum().backward()
        return float(ddp.module.weight.grad)

    attachment, ddp = None, None
    for uuid, (size, expected) in enumerate(((2, 1.5), (3, 7 / 3), (2, 1.5))):
        if rank >= size:
            continue
        store.set(f"{uuid}/{rank}", torch_dist._get_reconfigure_handle())
        handles = [store.get(f"{uuid}/{other}").decode() for other in range(size)]
        torch_dist._reconfigure(uuid=uuid, handles=handles).wait()
        if attachment is not None:
            with pytest.raises(
                commhooks.AttachError, match=f"the process group has changed: .* is rank {rank} of {size}"
            ):
                mean(ddp)
            attachment.close()
        ddp = torch.nn.parallel.DistributedDataParallel(nn.Linear(1, 1, bias=False))
        attachment = commhooks.attach(ddp, "all-reduce")
        for _ in range(3):  # in the second, PyTorch's DDP broadcasts its buckets' order
            assert mean(ddp) == pytest.approx(expected)


def fsdp(mesh: DeviceMesh) -> nn.Module:
    fully_shard(model := nn.Linear(2, 2), mesh=mesh)
    return model


def exchange(group: Any) -> None:
    for _ in range(2):
        commhooks.Exchanger({"x": torch.ones(1)}, "int8", process_group=group).close()


def train_locally(group: Any) -> None:
    model = nn.Linear(2, 2)
    commhooks.DiLoCo(model, torch.optim.SGD(model.parameters()), every=2, process_group=group).close()


def attach(group: Any, kind: str = "ours", **settings: Any) -> None:
    commhooks.attach(ddp_class(kind)(nn.Linear(2, 2), process_group=group), "int8", **settings).close()


def attach_over(group: Any) -> None:
    attach(dist.group.WORLD, "torch", process_group=group)


def wrap(group: Any) -> None:
    for _ in range(2):
        DistributedDataParallel(nn.Linear(2, 2), process_group=group)


def run_hooks(group: Any) -> None:
    model: Any = ddp_class("torch")(nn.Linear(2, 2), process_group=group)
    model.register_comm_hook(group, commhooks.allreduce_hook)
    model(torch.ones(1, 2)).sum().backward()
    commhooks.PowerSGDState(group)


WAYS = (exchange, train_locally, attach, attach_over, wrap, run_hooks)


def go_all_ways(group: Any) -> None:
    for way in WAYS:
        way(group)


@on_ranks(2, check_exit=False)
def test_a_group_of_one_rank_in_a_larger_world_is_told_once_if_it_is_no_part_of_a_hierarchy(rank: int) -> None:
    """Such a group passes for data parallelism."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))

    def replicate(group: Any) -> None:
        commhooks.attach_replicas(fsdp(mesh["shards"]), "int8", process_group=group).close()

    def shard_alone(_: Any) -> None:
        commhooks.attach_sharded(fsdp(DeviceMesh("cpu", [rank])), "int8").close()

    def stay_inside(_: Any) -> None:
        model = fsdp(mesh["shards"])
        commhooks.attach_sharded(model, "int8").close()
        commhooks.attach_replicas(model, "int8", process_group=mesh["replicas"].get_group()).close()
        commhooks.attach_replicas(fsdp(mesh["replicas"]), "int8", process_group=mesh["shards"].get_group()).close()
        DistributedDataParallel(nn.Linear(2, 2), device_mesh=mesh["shards"])
        go_all_ways(mesh["shards"].get_group())

    has_fsdp2 = metadata.version("torch") in versions.FSDP2
    ways: list[Callable[[Any], None]] = [*WAYS, go_all_ways, *([replicate, shard_alone] if has_fsdp2 else [])]
    for way, times in [*((way, 1) for way in ways), *([(stay_inside, 0)] if has_fsdp2 else [])]:
        group = [dist.new_group([each]) for each in range(2)][rank]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            way(group)
        found = [text for one in said if "has one rank, this one, of the 2 ranks" in (text := str(one.message))]
        assert len(found) == times, (way, found)


@on_ranks(3)
def test_a_rank_that_takes_anothers_place_is_noticed_if_pytorch_knows_and_a_destroyed_group_is_no_change(
    rank: int,
) -> None:
    group, tables = dist.new_group([0, 1]), dist.distributed_c10d._world
    if rank < 2:
        assert isinstance(group, dist.ProcessGroup)
        exchanger = commhooks.Exchanger({"x": torch.ones(1)}, "all-reduce", process_group=group)
        exchanger.average({"x": torch.ones(1)})
        tables.pg_group_ranks[group] = {0: 0, 2: 1}  # as rank 0 sees it
        with pytest.raises(commhooks.AttachError, match=r"is rank \d of 2 now \(.* ranks 1 went, and 2 came\)"):
            exchanger.average({"x": torch.ones(1)})
        tables.pg_group_ranks[group] = {1: 0, 0: 1}
        with pytest.raises(commhooks.AttachError, match="the others have other numbers"):
            exchanger.average({"x": torch.ones(1)})
        exchanger.close()
        tables.pg_group_ranks[group] = {0: 0, 1: 1}
        kept = commhooks.Exchanger({"x": torch.ones(1)}, "all-reduce", process_group=group)
        kept.average({"x": torch.ones(1)})
        dist.destroy_process_group(group)
        kept.average({"x": torch.ones(1)})
        kept.close()
