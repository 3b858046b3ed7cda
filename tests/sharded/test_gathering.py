"""Codes in the place of FSDP2's all-gather: all ranks compute with the same weights, for fewer bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from commhooks import attach_sharded
from commhooks.codecs import Codec, Half
from commhooks.sharded.gathering import Cut, Span
from tests.commhooks.ranks import of_every_rank, survived
from tests.commhooks.told import Told, told_by
from tests.ddp_core.facts import Facts
from tests.sharded.models import (
    FP32,
    MIXED,
    MODULES,
    NARROW,
    Network,
    batch,
    everyone,
    furthest,
    sgd,
    sharded,
    shards,
    train,
)
from tests.tiers import in_turn, thorough
from tests.world import on_ranks, run_world_outcomes

facts = Facts()


def trained(
    rank: int, gather: Any, policy: MixedPrecisionPolicy = FP32, *, steps: int = 8, **of_model: Any
) -> tuple[dict[str, Tensor], float]:
    """Train a new model whose gradients are averaged without loss; return what this rank keeps, and the last loss."""
    model = sharded(policy, **of_model)
    attachment = attach_sharded(model, "all-reduce", gather=gather, hook_timeout=30.0)
    optimizer = sgd(model)
    loss = train(model, optimizer, rank, 0, steps)
    assert list(attachment.gathers) == (MODULES if gather is not None else [])
    attachment.close()
    return shards(model), loss


@facts
def what_travels_without_loss_trains_bit_for_bit_as_fsdp2_does(rank: int) -> None:
    of_bf16: list[Any] = ["bf16", torch.float32, Half(block=16, dtype=torch.bfloat16)]
    ways = ((FP32, ["fp32"]), (MIXED, of_bf16), (NARROW, of_bf16))
    for resharded, (policy, gathers) in itertools.product((True, False), ways):
        plain = trained(rank, None, policy, steps=4, reshard_after_forward=resharded)
        for gather in gathers:
            ours = trained(rank, gather, policy, steps=4, reshard_after_forward=resharded)
            assert furthest(plain[0], ours[0]) == 0 and plain[1] == ours[1], (policy, gather)


class Seen:
    """What a layer computes with: a copy of its weights in each forward pass."""

    def __init__(self, layer: nn.Module) -> None:
        self.weights: list[Tensor] = []
        layer.register_forward_pre_hook(lambda layer, *_: self.weights.append(layer.weight.detach().clone()))


@on_ranks("ranks")
@pytest.mark.parametrize(
    ("codes", "ranks"), in_turn([["int8", "fp8", "fp16"], ["int4:block=32", "mxfp4"]], [2, 3]), ids=str
)
def test_all_ranks_compute_with_what_the_codes_represent(rank: int, ranks: int, codes: list[str]) -> None:
    """Their own shard included; each block is one rank's, and the ends of shards travel as they are."""
    for gather, policy in itertools.product(codes, (FP32, MIXED)):
        model = sharded(policy)
        attachment = attach_sharded(model, "all-reduce", gather=gather)
        optimizer, seen = sgd(model), Seen(model.second["wide"])
        for step in range(3):
            (kept,) = (own for name, own in shards(model).items() if name == "second.wide.weight")
            train(model, optimizer, rank, step, step + 1)
            padded = nn.functional.pad(kept, (0, 0, 0, -(-130 // ranks) - len(kept)))
            rows = of_every_rank(padded.to(policy.param_dtype or torch.float32))
            expected = torch.cat([represented(attachment.gathers["second.wide"].code, row) for row in rows])
            assert torch.equal(seen.weights[step], expected[:130]), step
            assert all(torch.equal(seen.weights[step], other) for other in of_every_rank(seen.weights[step]))
        attachment.close()


def represented(code: Codec | torch.dtype, shard: Tensor) -> Tensor:
    """Return what the code of a rank's shard represents."""
    if isinstance(code, torch.dtype):
        return shard.to(code).to(shard.dtype) if code.itemsize < shard.element_size() else shard
    flat, blocks = shard.flatten(), shard.numel() // code.block
    whole = flat[: blocks * code.block].float().view(-1, code.block)
    decoded = code.decode(code.encode(whole, whole.new_empty(0))).flatten().to(shard.dtype)
    return torch.cat([decoded, flat[blocks * code.block :]]).view_as(shard)


@on_ranks("ranks")
@pytest.mark.parametrize("ranks", thorough([2, 3], unless=(3).__eq__))
def test_bytes_are_those_of_codes_and_ends_to_every_other_rank(rank: int, ranks: int) -> None:
    """Of 32 bytes more for whose turn it is, and of rows that are multiples of their widest elements."""
    chunks = {name: -(-own.shape[0] // ranks) * own[:1].numel() for name, own in Network().named_parameters()}
    for gather, block, of_block, of_rest in (("int8:block=64", 64, 68, 4), ("bf16", 1, 2, 0), ("fp32", 1, 4, 0)):
        model = sharded()
        attachment = attach_sharded(model, "all-reduce", gather=gather)
        train(model, sgd(model), rank, 0, 2)
        of_gathers, of_all = attachment.gathers.statistics(), attachment.statistics()
        sent = 0
        for name, one in attachment.gathers.items():
            counts = one.statistics()
            own = [chunks[parameter] for parameter in one.by_parameter()]
            width = sum(chunk // block * of_block + chunk % block * of_rest for chunk in own)
            assert counts.steps == (2 if name == "the model" else 4), "once more in the backward pass, but for the root"
            assert counts.gradient_bytes == 4 * sum(own) * counts.steps
            least = (width + 32) * counts.steps
            assert least <= counts.payload_bytes <= least + 4 * counts.steps, (gather, name)
            assert counts.moved_bytes == (ranks - 1) * counts.payload_bytes
            sent += counts.moved_bytes
        assert of_gathers.moved_bytes == sent
        assert of_all.moved_bytes == sent + sum(unit.statistics().moved_bytes for unit in attachment.values())
        assert set(attachment.gathers.by_parameter()) == chunks.keys()
        assert "gathers: " in str(attachment) and "weights" in str(attachment.gathers)
        attachment.close()


@facts
def weights_are_gathered_where_no_gradient_is(rank: int) -> None:
    """As in evaluation: of frozen modules, under activation checkpointing, with tied weights and from the host."""
    model = Network()
    model.first.requires_grad_(False)
    model.second["wide"] = checkpoint_wrapper(model.second["wide"])
    model.second["tied"] = nn.Linear(130, 7)
    model.second["tied"].weight = model.head.weight
    for module in (model.first, model.second["wide"], model):
        fully_shard(module, mesh=everyone())
    attachment = attach_sharded(model, "int8", gather="int8")
    assert list(attachment) == ["the model", "second.wide"] and list(attachment.gathers) == MODULES
    with torch.no_grad():
        y = model(batch(0, 0)[0])
    with torch.inference_mode():
        again = model(batch(0, 0)[0])
    assert torch.equal(y, again) and all(torch.equal(y, other) for other in of_every_rank(y))
    train(model, sgd(model), rank, 0, 2)
    assert attachment.memory().working > 0
    attachment.close()
    gathered = attachment.gathers["first"].statistics().steps
    assert not attachment.is_attached and gathered >= 4
    with torch.no_grad():
        model(batch(0, 0)[0])
    assert attachment.gathers["first"].statistics().steps == gathered


@facts
def a_weight_that_is_not_finite_is_so_on_every_rank(rank: int) -> None:
    codes = ("int8", "int4", "fp8", "mxfp4", "e3m0", "fp16")
    for gather, bad in itertools.product(codes, (float("inf"), float("nan"))):
        model = sharded()
        attachment = attach_sharded(model, "all-reduce", gather=gather)
        if rank == 1:
            weight: Any = model.head.weight
            with torch.no_grad():
                weight.to_local().view(-1)[3] = bad
        seen = Seen(model.head)
        model(batch(0, 0)[0])
        assert not seen.weights[0][4:].isfinite().all() and seen.weights[0][:4].isfinite().all(), gather
        attachment.close()


@facts
def what_cannot_be_gathered_is_refused_in_words(rank: int) -> None:
    model = sharded()
    for gather, text in (
        ("int9", "Did you mean 'int8'"),
        ("qsgd", "draws random numbers, so forward and backward pass would compute with different weights"),
        ("int8:stochastic=true", "draws random numbers"),
        ("int8:damping=0.5", "'damping' is a setting for gradients"),
        (torch.int8, "floating-point dtype of at least 16 bits"),
        (8, "expected a code of blocks"),
    ):
        told = told_by(lambda gather=gather: attach_sharded(model, "int8", gather=gather))  # type: ignore[misc]  # mypy: cannot infer a lambda
        assert told.error == "SettingsError" and text in told.text, (gather, told.text)
    for of_rank in (("int8", "int4"), ("int8", None)):
        told = told_by(lambda of_rank=of_rank: attach_sharded(model, "int8", gather=of_rank[rank], hook_timeout=30.0))  # type: ignore[misc]  # as above
        assert told.error == "AttachError" and "gather: " in told.text and told.seconds < 30.0, told.text
    attachment = attach_sharded(model, "int8", gather="int8")
    attachment.close()
    model.first.set_custom_all_gather(attachment.gathers["first"])  # type: ignore[operator]  # FSDPModule's
    assert (
        "first has another custom all-gather already"
        in told_by(lambda: attach_sharded(model, "int8", gather="int8")).text
    )
    attach_sharded(model, "int8").close()
    model.first.set_custom_all_gather(attachment.gathers["first"]._before)  # type: ignore[operator]  # as above
    attachment = attach_sharded(sharded(), "int8", gather="int8")
    told = told_by(lambda: attachment.gathers["first"](torch.empty(6), torch.empty(3), everyone().get_group()))
    assert told.error == "AttachError" and "FSDP2 gathers 3 elements of torch.float32 in place of 693" in told.text
    later = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    fully_shard(later, mesh=everyone())
    attach_sharded(later, "all-reduce", gather="int8")
    later[1].bfloat16()
    told = told_by(lambda: later(torch.zeros(1, 4)))
    assert told.error == "AttachError" and "elements of torch.uint8 in place of 20 of torch.float32" in told.text


test_on_two_ranks = facts.tests()


def astray(rank: int) -> Told | None:
    """Train on while rank 1 gathers once more than this rank, which is in its backward pass then."""
    model = sharded()
    attach_sharded(model, "int8", gather="int8", hook_timeout=2.0)
    train(model, sgd(model), rank, 0, 2)
    if rank == 1:
        with torch.no_grad():
            model(batch(0, 0)[0])
        return told_by(lambda: model(batch(0, 0)[0]))
    return told_by(lambda: train(model, sgd(model), rank, 2, 3))


def test_a_rank_that_gathers_something_else_is_named() -> None:
    first, _ = run_world_outcomes(astray, 2)
    assert survived(first) and first.value.error == "CollectiveError", first.describe()
    assert "ranks hand in different things" in first.value.text and "gather of first" in first.value.text


def test_neighbouring_blocks_are_one_run_and_none_straddles_parameters() -> None:
    cut = Cut(4, ["a", "b", "c", "d"], [8, 4, 6, 3])
    assert cut.coded == [Span(0, 16, 0)] and cut.plain == [Span(16, 5, 0)]
    assert (cut.blocks, cut.rest) == (4, 5)
    assert cut.of_blocks.sizes == (8, 4, 4, 0) and cut.of_rest.sizes == (0, 0, 2, 3)
    apart = Cut(4, ["a", "b"], [5, 9])
    assert apart.coded == [Span(0, 4, 0), Span(5, 8, 4)] and apart.plain == [Span(4, 1, 0), Span(13, 1, 1)]
    found = [(own, places.flat.tolist()) for own, places in apart.pieces(1, 2, torch.device("cpu"))]
    assert found == [(slice(0, 4), [6]), (slice(5, 9), [7]), (slice(9, 13), [8])]
