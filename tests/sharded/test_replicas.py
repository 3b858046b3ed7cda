"""Shards averaged over replicas: without loss as native HSDP does it, with loss as the compressors promise."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import re
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from commhooks import DiLoCo, Handle, attach_replicas, attach_sharded, load_distributed
from ddp_core import DistributedDataParallel
from tests.commhooks.ranks import survived
from tests.commhooks.resuming import distance
from tests.commhooks.told import Told, told_by
from tests.ddp_core.facts import Facts
from tests.sharded.models import (
    FP32,
    MIXED,
    MODULES,
    NARROW,
    UNSAID,
    Make,
    Network,
    adamw,
    alone,
    assert_ranks_agree,
    backward,
    batch,
    follows_grad_dtype,
    furthest,
    gradients,
    reduces_in_grad_dtype,
    sgd,
    sharded,
    shards,
    sites,
    train,
    with_grad_dtypes,
)
from tests.tiers import in_turn, thorough
from tests.world import on_ranks, run_world_outcomes, stay_away, tell

STEPS = 13
POLICIES = ["fifo", "fused"]
two, four = Facts(2, turns=POLICIES), Facts(4, turns=POLICIES)


def attached(model: nn.Module, mesh: DeviceMesh, compressor: str, policy: Any, **settings: Any) -> Handle[Any]:
    group = mesh["replicas"].get_group()
    return attach_replicas(model, compressor, process_group=group, policy=policy, **{"hook_timeout": 30.0, **settings})


def replica(
    mesh: DeviceMesh, compressor: str, policy: Any, make: Make = sgd, **settings: Any
) -> tuple[Any, torch.optim.Optimizer, Handle[Any]]:
    """Return a new model, its optimizer, and its attachment to the others' replicas."""
    model = sharded(mesh=mesh["shards"])
    return model, make(model), attached(model, mesh, compressor, policy, **settings)


def trained(
    rank: int,
    mesh: DeviceMesh,
    compressor: str | None,
    policy: str = "fused",
    make: Make = sgd,
    precision: MixedPrecisionPolicy = FP32,
    *,
    steps: int = STEPS,
    accumulated: int = 1,
    factor: float | None = None,
    **of_model: Any,
) -> tuple[dict[str, Tensor], float]:
    """Train a new model over replicas with a compressor, or with native HSDP; return this rank's shards and loss."""
    model = sharded(precision, mesh=mesh if compressor is None else mesh["shards"], **of_model)
    divide_sums(model, factor)
    optimizer, attachment = make(model), None
    if compressor is None:
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # FSDPModule's
    else:
        attachment = attached(model, mesh, compressor, policy)
        attachment.watch(optimizer)
    loss = train(model, optimizer, rank, 0, steps, accumulated=accumulated)
    if attachment is not None:
        assert attachment.is_attached and attachment.steps == steps
        attachment.close()
        assert not attachment.is_attached
    return shards(model), loss


def divide_sums(model: Any, factor: float | None) -> None:
    """Have each module's sum over all ranks divided by a number; Gloo has no sums of terms that were divided."""
    for module in (model, model.first, model.second["wide"]) if factor is not None else ():
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(factor)


def assert_replicas_are_equal(model: nn.Module, mesh: DeviceMesh) -> None:
    for name, shard in shards(model).items():
        others = [torch.empty_like(shard) for _ in range(2)]
        dist.all_gather(others, shard, group=mesh["replicas"].get_group())
        assert torch.equal(others[0], others[1]), name


WAYS: list[tuple[MixedPrecisionPolicy, dict[str, Any]]] = [
    (FP32, {}),
    (MIXED, {}),
    (NARROW, {}),
    (UNSAID, {}),
    (FP32, {"frozen": True}),
    (FP32, {"accumulated": 2}),
    (FP32, {"factor": 1.0}),
    (FP32, {"reshard_after_forward": False}),
]
POLICIES_AND_OPTIMIZERS = list(itertools.product(POLICIES, (sgd, adamw)))


@on_ranks(4)
@pytest.mark.parametrize("offset", [0, *thorough([1, 2, 3])])
def test_without_loss_shards_are_those_of_native_hsdp_bit_for_bit(rank: int, offset: int) -> None:
    """With reduce_dtype=bf16 "fused" averages in the parameters' fp32, and is more precise than HSDP."""
    for number, (precision, how) in enumerate(WAYS):
        policy, make = POLICIES_AND_OPTIMIZERS[(number + offset) % 4]
        native, ours = (
            trained(rank, sites(), name, policy, make, precision, steps=4, **how)[0] for name in (None, "all-reduce")
        )
        if precision in ((NARROW,) if reduces_in_grad_dtype else (NARROW, UNSAID)) and policy == "fused":
            assert 0 < furthest(native, ours) < 0.01
        else:
            assert furthest(native, ours) == 0, (precision, how)


@follows_grad_dtype
@on_ranks(4)
def test_replicas_average_gradients_of_each_grad_dtype_as_native_hsdp_does(rank: int) -> None:
    """One parameter is used on no rank, and gets zeros of its `grad_dtype`."""
    mesh, some = sites(), dict.fromkeys(["first.bias", "second", "head.weight"], torch.bfloat16)
    for precision, wanted in (
        (UNSAID, dict.fromkeys([""], torch.bfloat16)),
        (MIXED, dict.fromkeys([""])),
        (FP32, some),
    ):
        kept = []
        for policy in (None, *POLICIES):
            model = with_grad_dtypes(precision, wanted, later=True, mesh=mesh if policy is None else mesh["shards"])
            if policy is None:
                model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # FSDPModule's
            attachment = attached(model, mesh, "all-reduce", policy) if policy else None
            backward(model, rank)
            kept.append(gradients(model))
            if attachment is not None:
                attachment.close()
        for other in kept[1:]:
            assert {name: one.dtype for name, one in kept[0].items()} == {n: one.dtype for n, one in other.items()}
            assert furthest(kept[0], other) <= (0.01 if precision is FP32 else 0), (precision, wanted)


@four
def ranks_that_keep_the_whole_model_train_as_a_distributed_data_parallel_does(rank: int, policy: str) -> None:
    """`attach_replicas` copies rank 0's parameters and buffers, as DDP does.

    The sums of four gradients below 1, in other orders, differ by at most 6 roundings of 2^-24, of which SGD with a
    rate of 0.1 and a momentum of 0.9 adds up at most one for each step.
    """
    ddp = DistributedDataParallel(Network(), find_unused_parameters=True)
    train(ddp, sgd(ddp), rank, 0, STEPS)
    model = sharded(mesh=alone()["shards"])
    model.register_buffer("seen", torch.full((3,), rank, dtype=torch.int16))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    attachment = attached(model, alone(), "all-reduce", policy)
    assert list(attachment) == (["all modules"] if policy == "fused" else MODULES)
    train(model, sgd(model), rank, 0, STEPS)
    assert furthest({name: p.detach() for name, p in ddp.module.named_parameters()}, shards(model)) < STEPS * 6 * 2**-24
    assert dict(model.named_buffers())["seen"].tolist() == [0, 0, 0]
    attachment.close()


@pytest.mark.kernels
@on_ranks(4)
def test_every_compressor_trains_the_same_per_module_and_at_once(rank: int) -> None:
    """The state of shards does not depend on how many are averaged at once, so neither does what is trained.

    But for PowerSGD's products of matrices: some kernels round them differently at another place in memory. Each of
    three in a step has at most 130 terms, of gradients below 1, and SGD with a rate of 0.1 and a momentum of 0.9 adds
    their rounding up once for each step.
    """
    mesh, found = sites(), dict[str, dict[str, Tensor]]()
    for name, collectives in (("int8", 3), ("bf16", 1), ("powersgd", 2)):
        for policy in POLICIES:
            model, optimizer, attachment = replica(mesh, name, policy)
            losses = [train(model, optimizer, rank, 0, 1) for _ in range(STEPS)]
            assert losses[-1] < losses[0] / 2, (name, losses)
            assert_replicas_are_equal(model, mesh)
            found[policy] = shards(model)
            counts, traffic = attachment.statistics(), attachment.by_parameter().values()
            assert counts.gradient_bytes == STEPS * 4 * sum(shard.numel() for shard in shards(model).values())
            assert counts.moved_bytes >= sum(one.moved_bytes for one in traffic) > 0
            if policy == "fused":
                assert counts.steps == STEPS and counts.collectives == collectives * STEPS
            attachment.close()
        assert furthest(found["fifo"], found["fused"]) <= (STEPS * 3 * 130 * 2**-24 if name == "powersgd" else 0), name


@four
def the_guide_tells_what_is_sent(rank: int, policy: str) -> None:
    """Of its model, on two sites of two ranks."""
    mesh, guide = sites(), (Path(__file__).parents[2] / "docs/guide/sharded.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| ([\d,]+) \| (\d+) \| ([\d,]+) \| (\d+) \|$", guide, re.M)
    assert len(rows) == 6
    for name, *told in rows:
        moved, collectives = told[:2] if policy == "fused" else told[2:]
        model = nn.Sequential(nn.Linear(20, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["shards"])
        attachment = attached(model, mesh, name, policy)
        for step in range(2):
            backward(model, rank, step)
            model.zero_grad()
        counts = attachment.statistics()
        assert counts.moved_bytes == 2 * int(moved.replace(",", "")), name
        assert counts.collectives == 2 * int(collectives), name
        attachment.close()


@four
def both_hops_are_compressed_in_any_order_of_attaching(rank: int, policy: str) -> None:
    mesh = sites()
    for within_first in (True, False):
        model = sharded(mesh=mesh["shards"])
        between = None if within_first else attached(model, mesh, "powersgd", policy)
        within = attach_sharded(model, "int8", hook_timeout=30.0)
        between = between or attached(model, mesh, "powersgd", policy)
        one, other = (within, between) if within_first else (between, within)
        optimizer = sgd(model)
        losses = [train(model, optimizer, rank, 0, 1) for _ in range(STEPS)]
        assert losses[-1] < losses[0] / 2, losses
        assert_replicas_are_equal(model, mesh)
        assert [one.is_attached, other.is_attached] == [True, True] and one.steps == other.steps == STEPS
        one.close()
        assert [one.is_attached, other.is_attached] == [False, True]
        train(model, optimizer, rank, STEPS, STEPS + 1)  # it still sends zeros for parameters that are not used
        other.close()
        state: Any = model._get_fsdp_state()  # type: ignore[operator]  # FSDPModule's
        group = state._fsdp_param_groups[0]
        assert group._all_reduce_hook is None and not group.reduce_scatter_unused_params


@on_ranks(4)
@pytest.mark.parametrize("policy", thorough(POLICIES, unless="fused".__eq__))
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(rank: int, policy: str, tmp_path: Path) -> None:
    """One checkpoint of torch.distributed holds the state of every shard, of its true shape."""
    mesh = sites()
    model, optimizer, attachment = replica(mesh, "powersgd", policy, make=adamw)
    train(model, optimizer, rank, 0, 4)
    state = attachment.state_dict()
    (label,) = [one for one in state["groups"] if one.startswith(("all modules", "second.wide"))]
    kept = state["groups"][label]["local"][f"rank{rank // 2}"]["second.wide.weight"]
    assert kept["residual"].numel() == 65 * 65, "of the shard, half of 130 rows"
    save({"model": model.state_dict(), "hooks": state}, checkpoint_id=tmp_path)
    inner = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, rank, 4, 8)
    whole, state = shards(model), attachment.state_dict()
    attachment.close()

    again = sharded(mesh=mesh["shards"])
    optimizer, resumed = adamw(again), attached(again, mesh, "powersgd", policy)
    parameters = again.state_dict()
    load({"model": parameters}, checkpoint_id=tmp_path)
    again.load_state_dict(parameters)
    optimizer.load_state_dict(inner)
    load_distributed(tmp_path, resumed)
    assert resumed.steps == 4
    train(again, optimizer, rank, 4, 8)
    assert furthest(whole, shards(again)) == 0
    assert distance(state["groups"], resumed.state_dict()["groups"]) == 0
    resumed.replace("int8")
    train(again, optimizer, rank, 8, 9)
    assert_replicas_are_equal(again, mesh)
    resumed.close()

    other = sharded(mesh=alone()["shards"])
    resumed = attached(other, alone(), "powersgd", policy)
    told = told_by(lambda: load_distributed(tmp_path, resumed, world_size="spread"))
    assert told.error == "CheckpointError" and "shard 0 of 2" in told.text and "and this run has" in told.text
    resumed.close()


@four
def checkpoints_of_native_hsdp_go_on_over_replicas_bit_for_bit_and_back(rank: int, policy: str, folder: Path) -> None:
    """Gradients are clipped, too: their norm, over the shards of one replica, is that of HSDP."""
    mesh = sites()
    for first, second in ((None, "all-reduce"), ("all-reduce", None)):
        found = []
        for compressor in (first, second):
            model = sharded(mesh=mesh if compressor is None else mesh["shards"])
            model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # FSDPModule's
            optimizer = adamw(model)
            attachment = attached(model, mesh, compressor, policy) if compressor else None
            if compressor == first:
                clipped_step(model, optimizer, rank, 0)
            state: Any = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            if compressor == first:
                save(state, checkpoint_id=folder / str(first))
            else:
                load(state, checkpoint_id=folder / str(first))
                set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            norm = clipped_step(model, optimizer, rank, 1)
            found.append(shards(model) | {"norm": norm})
            if attachment is not None:
                attachment.close()
        assert furthest(*found) == 0, first


def clipped_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> Tensor:
    """Take a step on gradients whose norm is clipped; return the norm."""
    backward(model, rank, step)
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    whole: Tensor = norm.full_tensor()
    assert whole > 0.1
    return whole


def accumulating(name: str, model: Any, step: int) -> bool:
    """Set which modules want an average in a step, as users of HSDP do; return whether the optimizer steps."""
    is_last = step % 3 == 2
    if name == "all":
        model.set_requires_all_reduce(is_last)
        model.set_is_last_backward(is_last)
    elif name == "the root's own":
        model.set_requires_all_reduce(is_last, recurse=False)
    elif name == "one at every step of another":
        model.first.set_requires_all_reduce(step % 2 == 1)
        return True
    elif name == "none synchronise at first":
        model.set_requires_all_reduce(is_last)
        model.set_requires_gradient_sync(step % 3 > 0)
    return is_last


@four
def modules_accumulate_with_set_requires_all_reduce_as_with_native_hsdp_bit_for_bit(rank: int, policy: str) -> None:
    """Gradients of modules that want no average are kept aside: there are none in `.grad`, as with HSDP."""
    mesh = sites()
    for which, exchanges in (
        ("all", 2),
        ("the root's own", 6),
        ("one at every step of another", 6),
        ("none synchronise at first", 4),
    ):
        found = []
        empty: list[list[list[str]]] = []
        for name in (None, "all-reduce"):
            model: Any = sharded(mesh=mesh if name is None else mesh["shards"])
            model.set_reduce_scatter_unused_params(True)
            divide_sums(model, 2.0 if which == "all" else None)
            optimizer = adamw(model)
            attachment = attached(model, mesh, name, policy) if name is not None else None
            empty.append([])
            for step in range(6):
                steps = accumulating(which, model, step)
                backward(model, rank, step)
                empty[-1].append([one for one, parameter in model.named_parameters() if parameter.grad is None])
                if steps:
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(shards(model))
            if attachment is not None:
                assert attachment.steps == exchanges
                attachment.close()
        assert furthest(*found) == 0, which
        assert empty[0] == empty[1], which


def fails_in_its_backward_pass(model: nn.Module, module: nn.Module, rank: int) -> None:
    """Let a module of the model fail in one backward pass."""
    failing = module.register_full_backward_hook(_fail)
    assert "of its own" in told_by(lambda: backward(model, rank)).text
    failing.remove()


def _fail(*_: object) -> None:
    raise RuntimeError("a failure of its own")


@two
def detaching_gives_kept_gradients_back_as_a_detached_ddp_has_them(rank: int, policy: str) -> None:
    """In `.grad`, added to what was averaged, also if a parameter was frozen since; none of a pass that failed.

    Kernels may sum the 130 terms of a gradient below 1 in another order: 130 * 2^-24 is less than 1e-5.
    """
    plain = Network()
    backward(plain, rank)
    own = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in plain.named_parameters()}
    for then in ("detach", "freeze", "fail", "reset"):
        model: Any = sharded(mesh=alone()["shards"])
        attachment = attached(model, alone(), "all-reduce", policy)
        backward(model, rank)
        means = gradients(model)
        model.set_requires_all_reduce(False)
        backward(model, rank)
        if then == "freeze":
            model.first.weight.requires_grad_(False)
        elif then == "fail":
            fails_in_its_backward_pass(model, model.head, rank)
        elif then == "reset":
            model.reset_iter_state()
        with warnings.catch_warnings(record=True, action="always") as warned:
            attachment.close()
            attachment.close()
        model.reset_iter_state()  # after a pass that failed, whole parameters are in the modules
        kept = then in ("detach", "freeze")
        told = [str(one.message) for one in warned if "kept gradients aside" in str(one.message)]
        assert len(told) == (kept and rank == 0) and ("and 2 other modules" in told[0] if told else True), told
        assert furthest(gradients(model), {name: means[name] + kept * own[name] for name in own}) < 1e-5, then


class Branches(nn.Module):
    """Layers of which a rank uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(20, 16)
        self.left, self.right, self.never = nn.Linear(16, 7), nn.Linear(16, 7), nn.Linear(16, 7)
        self.uses = "left"

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.get_submodule(self.uses)(self.stem(x).tanh())
        return y


@two
def modules_that_some_replicas_do_not_use_hang_nobody(rank: int, policy: str) -> None:
    """At once, they send zeros; per module, the ranks disagree in words, and what no rank uses is left alone."""
    model = Branches()
    for module in (model.stem, model.left, model.right, model.never, model):
        if module is not model:
            fully_shard(module, mesh=alone()["shards"])
    attachment = attached(model, alone(), "int8", policy, hook_timeout=5.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, rank, 0, 3)
    model.uses = "left" if rank == 0 else "right"
    told = told_by(lambda: train(model, optimizer, rank, 3, 6))
    if policy == "fused":
        assert told.error == "nothing", told.text
        assert_ranks_agree(model)
    else:
        assert told.error == "CollectiveError", told.text
        assert not optimizer.state[model.never.weight], "no step was taken"
    attachment.close()


class Adapted(nn.Module):
    """Layers that are all computed again in backward passes of their own, behind a frozen stem."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(20, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


@two
def gradients_are_averaged_once_if_every_module_is_reduced_in_a_nested_backward_pass(rank: int) -> None:
    """Also if the first nested pass ends before FSDP2's work is done, or between the roots' reductions."""
    mesh, found = alone(), []
    for roots in ("one", "many", "none"):
        model = Adapted()
        for module in [*model.blocks, *([model] if roots == "one" else [])]:
            if roots != "none":
                fully_shard(module, mesh=mesh["shards"])
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        attachment = attached(model, mesh, "all-reduce", "fused") if roots != "none" else None
        for step in range(3):
            model(batch(rank, step)[0]).square().sum().backward()
            for parameter in trained if attachment is None else []:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(2)  # type: ignore[union-attr]  # there is one
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: getattr(p, "to_local", p.detach)().clone() for name, p in model.named_parameters()})
        if attachment is not None:
            assert attachment.steps == 3 == attachment.statistics().collectives, roots
            attachment.close()
    assert furthest(found[0], found[1]) == 0 and furthest(found[0], found[2]) < 1e-6
    model = Adapted()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["shards"])
    within = attached(model.blocks[1], mesh, "all-reduce", "fused")  # FSDP2 ends its work after this block's pass
    model(batch(rank, 0)[0]).sum().backward()
    told = told_by(lambda: model(batch(rank, 1)[0]))
    assert "the last backward pass ended without an average over the replicas" in told.text, told
    within.close()


@two
def means_of_two_backward_passes_add_up(rank: int, policy: str) -> None:
    model, _, attachment = replica(alone(), "all-reduce", policy)
    found: list[dict[str, Tensor]] = []
    for _ in range(2):
        model(batch(rank, 0)[0]).sum().backward()
        gradients: dict[str, Any] = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
        found.append({name: gradient.to_local().clone() for name, gradient in gradients.items()})
    once, twice = found
    assert all(torch.equal(2 * gradient, twice[name]) for name, gradient in once.items())
    attachment.close()


@two
def a_gradient_that_no_average_was_taken_of_is_named(rank: int) -> None:
    model, optimizer, attachment = replica(alone(), "int8", "fused")
    train(model, optimizer, rank, 0, 1)
    model.head.weight.grad = torch.ones_like(model.head.weight)  # as a backward pass before attaching leaves it
    told = told_by(lambda: model(batch(rank, 1)[0]).sum().backward())
    assert "head.weight had a gradient before this backward pass that this attachment has not averaged" in told.text
    attachment.close()


@two
def what_acts_on_one_replica_alone_is_named(rank: int) -> None:
    """From after attaching: a hook on a gradient, a parameter in another's place, a new head."""
    changes: list[tuple[Callable[[Any], Any], str]] = [
        (
            lambda model: model.head.weight.register_post_accumulate_grad_hook(lambda _: None),
            "'head.weight' has a hook that runs as soon as its gradient is there",
        ),
        (lambda model: setattr(model.head, "bias", nn.Parameter(torch.zeros(7))), "'head.bias' was replaced"),
        (lambda model: setattr(model, "head", nn.Linear(65, 7)), "'head.bias' was replaced"),
        (
            lambda model: setattr(model, "shift", nn.Parameter(torch.zeros(7))),
            "'shift' now requires a gradient, which FSDP2 does not shard",
        ),
    ]
    for (change, complaint), policy in itertools.product(changes, POLICIES):
        acts = "has a hook" in complaint
        if acts and policy == "fifo":
            continue
        model, optimizer, attachment = replica(alone(), "int8", policy)
        train(model, optimizer, rank, 0, 1)
        change(model)
        told = told_by(functools.partial(train, model, optimizer, rank, 1, 2))
        expected = {"CompressorError" if acts else "AttachError", "CollectiveError"}
        assert told.error in expected and complaint in told.text, (complaint, told)
        attachment.close()
        model.zero_grad()


@four
def memory_is_that_of_shards_and_residuals_follow_the_loss_scale(rank: int, policy: str) -> None:
    model = sharded(mesh=sites()["shards"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    attachment = attached(model, sites(), "top-k", policy, scaler=scaler, residuals="bf16")
    optimizer = sgd(model)
    scales = []
    for step in range(3):
        inputs, targets = batch(rank, step)
        scaler.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales += [attachment[label].engine.loss_scale.of_gradients for label in attachment]
    assert set(scales[: len(attachment)]) == {2.0**8} and set(scales[-len(attachment) :]) == {2.0**9}
    report, sizes = attachment.memory(), {name: shard.numel() for name, shard in shards(model).items()}
    widest = sum(size for name, size in sizes.items() if name.startswith("second.wide."))
    assert report.gradients == 4 * (sum(sizes.values()) if policy == "fused" else widest)
    assert report.by_parameter["second.wide.weight"] == 2 * sizes["second.wide.weight"], "bf16 of a shard"
    assert report.residuals == sum(report.by_parameter.values()) <= 2 * sum(sizes.values())
    attachment.close()


@two
def training_goes_on_after_a_backward_pass_that_failed(rank: int, policy: str) -> None:
    """On every rank, as for a batch that is too large."""
    model, optimizer, attachment = replica(alone(), "int8", policy)
    attachment.watch(optimizer)
    train(model, optimizer, rank, 0, 1)
    fails_in_its_backward_pass(model, model.first, rank)
    model.reset_iter_state()
    optimizer.zero_grad()
    train(model, optimizer, rank, 1, 3)
    assert_ranks_agree(model)
    attachment.close()


def without_a_peer(rank: int, how: str, policy: str) -> Told | None:
    """Train on while rank 1 was killed, or does not come."""
    model, optimizer, _ = replica(alone(), "int8", policy, hook_timeout=0.5 if how == "late" else None)
    train(model, optimizer, rank, 0, 2)
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        stay_away()
        os._exit(0)
    told = told_by(lambda: train(model, optimizer, rank, 2, 3))
    tell(rank)
    return told


@pytest.mark.parametrize(("how", "policy"), in_turn(["late", "killed"], POLICIES))
def test_a_rank_that_dies_or_does_not_come_is_named(how: str, policy: str) -> None:
    first, _ = run_world_outcomes(without_a_peer, 2, how, policy)
    assert survived(first) and first.value.error == "CollectiveError", first.describe()
    assert f"round 2, {'all modules' if policy == 'fused' else 'second.wide'}" in first.value.text, first.value.text
    assert "rank 1" in first.value.text
    if how == "late":
        assert "hook_timeout=0.5 s. No answer from rank 1" in first.value.text


@four
def what_cannot_work_is_refused_in_words_on_every_rank(rank: int) -> None:
    mesh, whole = sites(), alone()
    model = sharded(mesh=mesh["shards"])
    group = mesh["replicas"].get_group()

    def told(model: nn.Module, compressor: str = "int8", group: Any = group, **settings: Any) -> Told:
        return told_by(lambda: attach_replicas(model, compressor, process_group=group, **settings))

    plain = told(Network())
    assert plain.error == "AttachError" and "call torch.distributed.fsdp.fully_shard" in plain.text
    across = told(model, group=None)
    assert across.error == "SettingsError" and "keep different shards of the model" in across.text, across.text
    assert f"ranks {[0, 1] if rank < 2 else [2, 3]} of the process group" in across.text
    crossed = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])[0]
    mixed = told(model, group=crossed)
    assert mixed.error == "AttachError" and f"shard: {rank % 2 ^ rank // 2} of 2 (rank 0)" in mixed.text, mixed.text
    native = told(sharded(mesh=mesh))
    assert native.error == "SettingsError" and "fully_shard(..., mesh=mesh['shards'])" in native.text, native.text
    assert "attach_replicas(..., process_group=mesh['replicas'].get_group())" in native.text, native.text
    replicated = nn.Linear(4, 4)
    replicate(replicated, mesh=init_device_mesh("cpu", (4,)))
    assert "shape (ranks, 1)" in (text := told(replicated).text) and "mesh=mesh['shard']" in text
    for settings, error, text in (
        ({"compressor": "int9"}, "SettingsError", "Did you mean 'int8'"),
        ({"policy": "later"}, "SettingsError", "policy must be one of fifo, fused"),
        ({"hook_timeout": 0.0}, "SettingsError", "hook_timeout must be above 0 s"),
        ({"compressor": "int8" if rank < 2 else "int4"}, "AttachError", "ranks disagree"),
        ({"policy": "fused" if rank < 2 else "fifo"}, "AttachError", "policy: 'fused' (rank 0), 'fifo' (rank 1)"),
        ({"compressor": "int8" if rank < 2 else "int9"}, "", "rank 1 cannot take part" if rank < 2 else "Did you mean"),
    ):
        refused = told(model, **settings)
        assert refused.error == (error or ("SettingsError" if rank >= 2 else "AttachError")), refused.text
        assert text in refused.text, refused.text
    attachment = attach_replicas(model, "int8", process_group=group)
    again = told(model)
    assert again.error == "AttachError" and "has an all-reduce hook already; close that first" in again.text
    attachment.close()
    attachment.close()
    acting = sharded(mesh=whole["shards"])
    acting.head.weight.register_post_accumulate_grad_hook(lambda _: None)
    assert "pass policy='fifo'" in told(acting, group=whole["replicas"].get_group()).text
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    fully_shard(empty, mesh=whole["shards"])
    assert "call model.to_empty first" in told(empty, group=whole["replicas"].get_group()).text
    frozen = sharded(mesh=whole["shards"])
    frozen.requires_grad_(False)
    assert "all parameters are frozen" in told(frozen).text


@two
def replicas_take_rank_0s_unsaved_buffers_and_nothing_that_is_to_be_ignored(rank: int) -> None:
    """DiLoCo, which averages all that is trained, also exchanges a trained parameter that fully_shard ignores."""
    group = alone()["replicas"].get_group()
    for how in ("replicas", "diloco"):
        model = Network()
        model.register_buffer("table", torch.full((2, 3), float(rank)), persistent=False)
        model.register_buffer("cache", torch.full((rank + 1,), float(rank)), persistent=False)
        model.own = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
        model.trained = nn.Parameter(torch.full((2,), float(rank)))
        model.first.bias = nn.Parameter(torch.full((65,), float(rank)), requires_grad=False)
        sharded(model=model, mesh=alone()["shards"], ignored_params={model.own, model.trained})
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of the trained parameter
            made: Any = (
                attach_replicas(model, "all-reduce", process_group=group)
                if how == "replicas"
                else DiLoCo(model, sgd(model), every=1, process_group=group)
            )
        found = {name: float(one.view(-1)[0]) for name, one in model.named_buffers()}
        assert found == {"table": 0.0, "cache": rank}
        assert (float(model.own[0]), float(model.trained[0])) == (rank, rank if how == "replicas" else 0.0)
        assert not shards(model.first)["bias"].any(), "frozen, and rank 0's"
        made.close()


@two
def buffers_and_frozen_parameters_that_differ_between_replicas_are_named(rank: int) -> None:
    """Otherwise a part of rank 0's bytes would take the place of others, without an error."""
    for how, name in itertools.product(("replicas", "diloco"), ("seen", "own")):
        model = Network()
        model.register_buffer("seen", torch.full((3 + rank * (name == "seen"),), float(rank)))
        frozen = torch.ones(1).expand(3) if rank == 1 and name == "own" else torch.ones(3)
        model.own = nn.Parameter(frozen, requires_grad=False)
        if how == "replicas":
            for module in (model.first, model.head):
                fully_shard(module, mesh=alone()["shards"])
            for left_out in (model.scale, *model.second.parameters()):
                left_out.requires_grad_(False)
            told = told_by(functools.partial(attached, model, alone(), "int8", "fused"))
        else:
            told = told_by(functools.partial(DiLoCo, model, sgd(model), every=1))
        wanted = "AttachError" if how == "replicas" else "SettingsError"
        assert told.error == wanted and "ranks disagree" in told.text and f" {name}" in told.text, told
        assert dict(model.named_buffers())["seen"].unique().tolist() == [rank]


test_on_two_ranks, test_on_four_ranks = two.tests(), four.tests()


@on_ranks(1)
def test_one_rank_trains_as_a_distributed_data_parallel_with_a_hook_does(rank: int) -> None:
    """With itself, that is: without loss as without."""
    plain = trained(rank, alone()["shards"], None, steps=3)[0]
    for policy in POLICIES:
        assert furthest(plain, trained(rank, alone(), "all-reduce", policy, steps=3)[0]) == 0
