"""Mixtures of experts: experts on a mesh of their own, cut along another dimension, with divisors of their own.

The models' gradients are small whole numbers, so that sums over ranks are the same in any order, and plain FSDP2 must
be matched bit for bit on four ranks too.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from commhooks import Handle, attach_sharded, load_distributed, merge_state_dicts
from tests.commhooks.ranks import of_every_rank
from tests.commhooks.resuming import distance
from tests.commhooks.told import told_by
from tests.ddp_core.facts import Facts
from tests.sharded.models import FP32, MIXED, everyone, furthest, gradients, shards, sites

WIDTH, HIDDEN, EXPERTS = 8, 12, 4
facts = Facts(4)


class Experts(nn.Module):
    """The experts, side by side in two parameters; each rank has some of them, if they are DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(whole_numbers(EXPERTS, WIDTH, HIDDEN))
        self.outer = nn.Parameter(whole_numbers(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        """Pass each row through the expert of the highest score, of those that are here."""
        inner, outer = (one.to_local() if isinstance(one, DTensor) else one for one in (self.inner, self.outer))
        chosen = scores[:, : len(inner)].argmax(1)
        return torch.stack(
            [(row @ inner[one]).relu() @ outer[one] for row, one in zip(x, chosen.tolist(), strict=True)]
        )


class Block(nn.Module):
    """A router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        y: Tensor = self.experts(x, scores) + scores.sum(1, keepdim=True)
        return y


class Mixture(nn.Module):
    """A block between two layers; all parameters are small whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.head = nn.Linear(6, WIDTH), Block(), nn.Linear(WIDTH, 3)
        for one in (self.first, self.block.router, self.head):
            for parameter in one.parameters():
                parameter.data = whole_numbers(*parameter.shape)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.block(self.first(x)))
        return y


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-1, 2, shape).float()


@functools.cache
def of_experts() -> DeviceMesh:
    """Return the mesh of experts: two halves of them, each sharded over two ranks that are no neighbours."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))


def sharded(
    meshes: str = "own",
    dimension: int = 1,
    policy: MixedPrecisionPolicy = FP32,
    *,
    dense: DeviceMesh | None = None,
    experts: DeviceMesh | None = None,
    **settings: Any,
) -> Mixture:
    """Return the model with its experts on the mesh of all ranks ("one"), on their own, or in the block's group."""
    model, dense, experts = Mixture(), dense or everyone(), experts or of_experts()
    if meshes != "one":
        for name, whole in [*model.block.experts.named_parameters()]:
            here = distribute_tensor(whole.detach(), experts["ep"], [Shard(0)])
            model.block.experts.register_parameter(name, nn.Parameter(here))
    fully_shard(model.first, mesh=dense, mp_policy=policy, **settings)
    if meshes == "block":
        of_mesh, mine = FSDPMeshInfo(experts["efsdp"], shard_mesh_dim=0), {*model.block.experts.parameters()}
        fully_shard(
            model.block,
            mesh=dense,
            mp_policy=policy,
            **settings,
            shard_placement_fn=lambda one: ShardPlacementResult(Shard(dimension), of_mesh) if one in mine else None,
        )
    else:
        mesh = dense if meshes == "one" else experts["efsdp"]
        placed = functools.partial(Shard, dimension)
        fully_shard(model.block.experts, mesh=mesh, mp_policy=policy, shard_placement_fn=lambda _: placed(), **settings)
    fully_shard(model, mesh=dense, mp_policy=policy, **settings)
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # FSDPModule's
    return model


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    inputs, weights = (torch.randint(-2, 3, (12, size), generator=generator).float() for size in (6, 3))
    return inputs, weights


def backward(model: nn.Module, rank: int, number: int) -> None:
    inputs, weights = batch(rank, number)
    (model(inputs).float() * weights).sum().backward()


def locals_of(model: nn.Module) -> dict[str, Tensor]:
    """Return what this rank keeps of the parameters, not copied."""
    named: dict[str, Any] = dict(model.named_parameters())
    return {name: parameter.to_local().detach() for name, parameter in named.items()}


def stepped(model: Mixture, rank: int, step: int, accumulated: int = 1) -> dict[str, Tensor]:
    """Run a step, and return its gradients; parameters stay small whole numbers."""
    for part in range(accumulated):
        model.set_requires_gradient_sync(part == accumulated - 1)  # type: ignore[operator]
        backward(model, rank, accumulated * step + part)
    found = gradients(model)
    with torch.no_grad():
        for name, local in locals_of(model).items():
            local.sub_(found[name].sign()).clamp_(-1, 1)
    model.zero_grad()
    return found


FORMS = [
    (meshes, dimension, *how)
    for meshes, dimension in itertools.product(("one", "own", "block"), (0, 1))
    for how in ((None, 1, MIXED), (6.0, 2, FP32))
]


def run(rank: int, form: tuple[Any, ...], compressor: str | None, gather: str | None = None) -> list[dict[str, Tensor]]:
    """Return the gradients of two steps, reduced by a compressor or by FSDP2."""
    meshes, dimension, divisor, accumulated, policy = form
    model = sharded(meshes, dimension, policy)
    if divisor is not None:  # of the experts, and another of the rest
        experts: Any = model.block if meshes == "block" else model.block.experts
        for module, factor in ((experts, divisor), (model, 2 * divisor), (model.first, 2 * divisor)):
            module.set_gradient_divide_factor(factor)  # type: ignore[operator]  # FSDPModule's
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # for Gloo
    attachment = attach_sharded(model, compressor, gather=gather, hook_timeout=30.0) if compressor else None
    found = [stepped(model, rank, step, accumulated) for step in range(2)]
    if attachment:
        assert [one.steps for one in attachment.values()] == [2] * len(attachment)
        attachment.close()
    return found


@facts
def twelve_forms_without_loss_are_plain_fsdp2_bit_for_bit(rank: int) -> None:
    """Experts on each mesh, cut along each dimension, with and without divisors, accumulation and mixed precision."""
    assert len(FORMS) == 12
    for form in FORMS:
        plain = run(rank, form, None)
        used = [float(one.abs().sum()) for step in plain for name, one in step.items() if "experts" in name]
        assert sum(map(min, of_every_rank(used))) > 100
        for gather in (None, "fp32") if form[:3] == ("block", 1, 6.0) else (None,):
            for expected, found in zip(plain, run(rank, form, "all-reduce", gather), strict=True):
                assert furthest(expected, found) == 0, (form, gather)


@facts
def each_group_of_parameters_is_a_channel_over_its_own_ranks(rank: int) -> None:
    """In each, int8 sends the rows that other ranks keep: of experts one of two, of the rest three of four."""
    for meshes, name in (("own", "block.experts"), ("block", "block (group 1 of 2)")):
        model = sharded(meshes)
        attachment = attach_sharded(model, "int8", hook_timeout=30.0)
        stepped(model, rank, 0)
        sizes = {label: one.engine.connection.world_size for label, one in attachment.items()}
        assert sizes.pop(name) == 2 and {*sizes.values()} == {4}, sizes
        assert {*attachment.by_parameter()} == {name for name, _ in model.named_parameters()}
        assert attachment.rank_and_world_size == (rank, 4)
        attachment.replace({name: "int4"})
        stepped(model, rank, 1)
        assert attachment[name].compressor != attachment["first"].compressor and attachment.steps == 2
        attachment.close()
        assert not attachment.is_attached
        stepped(model, rank, 2)


def whole_gradients(rank: int, number: int) -> dict[str, Tensor]:
    """Return this rank's own gradients in a model that nothing shards."""
    model = Mixture()
    backward(model, rank, number)
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@facts
def residuals_are_saved_in_the_order_of_their_parameters(rank: int) -> None:
    """Of what top-k has not sent, every element is this rank's gradient; the others are 0."""
    model = sharded("one", 1)
    attachment = attach_sharded(model, "top-k:ratio=0.1", hook_timeout=30.0)
    backward(model, rank, 0)
    wanted = whole_gradients(rank, 0)
    for group in attachment.state_dict()["groups"].values():
        for name, entries in group["local"][f"rank{rank}"].items():
            residual = entries["residual"]
            kept = residual != 0
            assert residual.shape == wanted[name].shape
            assert torch.equal(residual[kept], wanted[name][kept]), name
            assert kept.any() or (wanted[name] != 0).sum() < 40, name
    attachment.close()


def owed(states: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the mean of the ranks' residuals of every parameter, with its channel's name in saved state."""
    for label, group in merge_state_dicts(states)["groups"].items():
        of_ranks = [*group["local"].values()]
        for name in of_ranks[0]:
            yield f"{label} {name}", torch.stack([own[name]["residual"].double() for own in of_ranks]).mean(0)


def loaded(folder: Path, model: Mixture, **rules: Any) -> Handle[Any]:
    attachment = attach_sharded(model, "int4:block=8", hook_timeout=30.0)
    load_distributed(folder / "saved", attachment, **rules)
    return attachment


@facts
def state_goes_on_in_the_same_world_and_in_another(rank: int, folder: Path) -> None:
    """With four ranks bit for bit; in two worlds of two ranks, the mean of what is owed is kept, element by element."""
    two = sites()["shards"]
    smaller = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("sites", "efsdp", "ep"))
    for meshes in ("one", "block"):
        place = folder / meshes
        model = sharded(meshes, 1)
        attachment = attach_sharded(model, "int4:block=8", hook_timeout=30.0)
        for step in range(2):
            stepped(model, rank, step)
        saved = attachment.state_dict()
        save({"hooks": saved}, checkpoint_id=place / "saved")
        weights = shards(model)
        went_on = [stepped(model, rank, step) for step in (2, 3)]
        everything = attachment.gathered()
        attachment.close()

        again = sharded(meshes, 1)
        resumed = loaded(place, again)
        with torch.no_grad():
            for name, local in locals_of(again).items():
                local.copy_(weights[name])
        assert all(furthest(one, stepped(again, rank, step)) == 0 for step, one in zip((2, 3), went_on, strict=True))
        assert distance(everything["groups"], resumed.gathered()["groups"]) == 0
        resumed.load_state_dict(everything)
        resumed.close()

        if meshes == "one":  # and cut along the other dimension, where rows are in another order
            along = loaded(place, sharded("one", 0))
            assert distance(saved["groups"], along.state_dict()["groups"]) == 0
            along.close()
        before = dict(owed(of_every_rank(saved)))
        other = loaded(place, sharded(meshes, 1, dense=two, experts=smaller), world_size="spread-mean")
        assert other.rank_and_world_size == (two.get_local_rank(), 2)
        site = [one for number, one in enumerate(of_every_rank(other.state_dict())) if number // 2 == rank // 2]
        after = dict(owed(site))
        assert before.keys() == after.keys() and len(before) == (6 if meshes == "one" else 8), before.keys()
        for name, mean in before.items():
            assert torch.allclose(mean, after[name], rtol=1e-6, atol=1e-6), name
            assert mean.any() or "bias" in name, name  # smaller than a block, and sent as it is
        told = told_by(lambda place=place: loaded(place, sharded("one", 0, dense=two)))  # type: ignore[misc]  # mypy: cannot infer a lambda
        assert told.error == "CheckpointError", told.text
        other.close()


@facts
def what_is_left_to_fsdp2_is_listed_with_its_bytes(rank: int) -> None:
    size = 2 * EXPERTS * WIDTH * HIDDEN * 4
    options: list[dict[str, Any]] = [{"except_modules": "*.experts"}, {"modules": ("the model", "fi*")}]
    for option in options:
        plain, model = sharded(), sharded()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attachment = attach_sharded(model, "all-reduce", hook_timeout=30.0, **option)
        assert [*attachment] == ["the model", "first"] and [*attachment.not_compressed] == ["block.experts"]
        for step in range(2):
            assert furthest(stepped(plain, rank, step), stepped(model, rank, step)) == 0
        counts = attachment.statistics(), attachment.last_step()
        assert [one.not_compressed_bytes for one in counts] == [size, size // 2]  # half of the experts are here
        assert attachment.memory().not_compressed == size // 2
        assert "block.experts: not compressed" in str(attachment) and "not compressed" in str(attachment.memory())
        attachment.close()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"modules": ["block"]}, "matches no module that fully_shard was called with; there are the model, first"),
        ({"except_modules": "*"}, "leave no module that is trained"),
        ({"modules": "first" if rank else "first*"}, ""),
        ({"modules": "first" if rank else "*"}, "ranks disagree"),
    ]
    for option, text in refused:
        told = told_by(lambda option=option: attach_sharded(sharded(), "int8", **option).close())  # type: ignore[misc]  # as above
        assert text in told.text and (not text or told.error), told.text


test_on_four_ranks = facts.tests()
