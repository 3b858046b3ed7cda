"""Compressors in the place of FSDP2's reduce-scatter: without loss as without them, and with it as they promise."""

from __future__ import annotations

import copy
import functools
import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from commhooks import Handle, attach_replicas, attach_sharded
from tests.commhooks.ranks import survived
from tests.commhooks.resuming import distance, roundtrip
from tests.commhooks.told import Told, told_by
from tests.ddp_core.facts import Facts
from tests.sharded.models import (
    CLASSES,
    FP32,
    MIXED,
    MODULES,
    NARROW,
    UNSAID,
    Make,
    Network,
    adamw,
    backward,
    batch,
    everyone,
    follows_grad_dtype,
    furthest,
    gradients,
    sgd,
    sharded,
    shards,
    train,
    with_grad_dtypes,
)
from tests.world import on_ranks, run_world_outcomes, stay_away, tell

STEPS = 6
facts = Facts()
HALF = MixedPrecisionPolicy(reduce_dtype=torch.float16)
POLICIES = {"fp32": FP32, "mixed": MIXED, "narrow": NARROW, "unsaid": UNSAID, "fp16": HALF}


def trained(
    rank: int,
    compressor: str | None,
    make: Make = sgd,
    policy: MixedPrecisionPolicy = FP32,
    *,
    steps: int = STEPS,
    accumulated: int = 1,
    factor: float | None = None,
    is_forced: bool = True,
    **of_model: Any,
) -> tuple[dict[str, Tensor], float]:
    """Train a new model with a compressor, or with FSDP2 alone; return what this rank keeps, and the last loss."""
    model = sharded(policy, **of_model)
    optimizer, attachment = make(model), None
    if compressor is None:
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # FSDPModule's
    else:
        attachment = attach_sharded(model, compressor, hook_timeout=30.0)
        attachment.watch(optimizer)
    for module in (model, model.first, model.second["wide"]):
        if factor is not None:
            module.set_force_sum_reduction_for_comms(is_forced)  # type: ignore[operator]
            module.set_gradient_divide_factor(factor)  # type: ignore[operator]
    loss = train(model, optimizer, rank, 0, steps, accumulated=accumulated)
    if attachment is not None:
        assert list(attachment) == MODULES and attachment.is_attached
        assert [unit.steps for unit in attachment.values()] == [steps] * 3
        attachment.close()
        assert not attachment.is_attached
    return shards(model), loss


WAYS: list[tuple[Make, dict[str, Any]]] = [
    (sgd, {}),
    (adamw, {}),
    (sgd, {"frozen": True}),
    (adamw, {"reshard_after_forward": False}),
]
OF_FP32: list[tuple[Make, dict[str, Any]]] = [(adamw, {"factor": 3.0}), (sgd, {"accumulated": 2})]


@facts
def without_loss_two_ranks_train_bit_for_bit_as_fsdp2_does(rank: int) -> None:
    """As sums of two are, in any order; in fp16 FSDP2 divides sums, and this means, which differ where it ends."""
    for policy, precision in POLICIES.items():
        steps = STEPS if policy == "fp16" else 4
        for make, how in WAYS + (OF_FP32 if policy == "fp32" else []):
            plain, ours = (trained(rank, name, make, precision, steps=steps, **how)[0] for name in (None, "all-reduce"))
            assert furthest(plain, ours) <= (1e-5 if policy == "fp16" and make is sgd else 0.0) or (
                policy == "fp16" and make is adamw  # whose first steps are signs, also of what is almost 0
            ), (policy, make, how)


@facts
def a_divide_factor_counts_without_a_forced_sum_too(rank: int) -> None:
    """FSDP2 then asks for sums of terms that were divided, which Gloo does not have."""
    plain, ours = (trained(rank, name, steps=2, factor=4.0, is_forced=name is None)[0] for name in (None, "all-reduce"))
    assert furthest(plain, ours) == 0


@follows_grad_dtype
@on_ranks(2)
def test_gradients_have_the_grad_dtype_of_their_parameters_as_with_fsdp2(rank: int) -> None:
    """Set before or after sharding, of some or all; parameters of one dtype are then sent side by side."""
    bf16: Any = torch.bfloat16
    of_biases, of_all = (dict.fromkeys(named, bf16) for named in (["first.bias", "head.weight"], [""]))
    anything: dict[str, Any] = dict.fromkeys([""])
    for policy, wanted in (
        (FP32, of_biases),
        (UNSAID, of_biases),
        (UNSAID, of_all),
        (MIXED, anything),
        (NARROW, of_all),
    ):
        for later in (False, True):
            kept = []
            for compressor in (None, "all-reduce", "int8"):
                model = with_grad_dtypes(policy, wanted, later=later)
                if compressor is None:
                    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # FSDPModule's
                attachment = attach_sharded(model, compressor, hook_timeout=30.0) if compressor else None
                for step in range(3):
                    model.zero_grad()
                    backward(model, rank, step)
                kept.append(gradients(model))
                if attachment is not None:
                    attachment.close()
            assert {str(one.dtype) for one in kept[0].values()} <= {"torch.bfloat16", "torch.float32"}
            for other in kept[1:]:
                assert {name: one.dtype for name, one in kept[0].items()} == {n: one.dtype for n, one in other.items()}
            assert furthest(kept[0], kept[1]) == 0, (policy, wanted, later)
            assert 0 < furthest(kept[0], kept[2]) < 0.1, (policy, wanted, later)


@follows_grad_dtype
@on_ranks(2)
def test_a_policy_may_leave_some_parameters_in_fp32(rank: int) -> None:
    for reduce_dtype in (None, torch.float32, torch.bfloat16):
        kept = []
        for compressor, gather in ((None, None), ("all-reduce", None), ("all-reduce", "fp32"), ("int8", "int8")):
            model, computed = Network(), set[torch.dtype]()
            narrow: Any = MixedPrecisionPolicy  # which older versions let choose by parameter in no way
            keep = {*model.head.parameters()}
            policy = narrow(
                torch.bfloat16,
                reduce_dtype,
                param_dtype_override_fn=lambda one, keep=keep: torch.float32 if one in keep else None,
            )
            model.head.register_forward_pre_hook(lambda _, inputs: inputs[0].float())
            model.head.register_forward_hook(lambda _, __, y, seen=computed: seen.add(y.dtype))
            sharded(policy, model=model)
            attachment = attach_sharded(model, compressor, gather=gather, hook_timeout=30.0) if compressor else None
            train(model, sgd(model), rank, 0, 3)
            kept.append(shards(model))
            assert computed == {torch.float32}
            if attachment is not None:
                attachment.close()
        assert furthest(kept[0], kept[1]) == furthest(kept[0], kept[2]) == 0, reduce_dtype
        assert 0 < furthest(kept[0], kept[3]) < 0.02, reduce_dtype


class Three(nn.Module):
    """Three layers, the last of which is used for nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = (layer(x) for layer in self.layers)
        y: Tensor = first + second + 0 * third
        return y


@follows_grad_dtype
@on_ranks(2)
def test_each_parameter_has_its_own_residual_also_where_grad_dtypes_differ(rank: int) -> None:
    """The second weight is sent last."""
    model = Three()
    model.layers[1].weight.grad_dtype = torch.bfloat16
    fully_shard(model, mesh=everyone())
    attachment = attach_sharded(model, "int4", hook_timeout=30.0)
    for _ in range(2):  # FSDP2 decides the order in the first one
        model(batch(rank, 0)[0].repeat(1, 2)[:, :32]).square().sum().backward()
        state = attachment.state_dict()["groups"]["the model"]["local"][f"rank{rank}"]
        sizes = [float(state[f"layers.{number}.weight"]["residual"].abs().max()) for number in range(3)]
        assert min(sizes[:2]) > 0 == sizes[2], sizes
        model.zero_grad()
    model = Three()
    fully_shard(model, mesh=everyone())
    attach_sharded(model, "int4", hook_timeout=30.0)
    model.layers[1].weight.grad_dtype = torch.bfloat16
    told = told_by(lambda: model(torch.ones(8, 32)).square().sum().backward())
    assert "grad_dtype was set" in told.text, told.text
    undecided = with_grad_dtypes(UNSAID, {"head": None}, later=True)
    told = told_by(lambda: attach_sharded(undecided, "int4", strict=True))
    assert told.error == "SettingsError" and "whose grad_dtype is None" in told.text, told.text


class Peculiar(Network):
    """The network with a layer that is computed again in the backward pass, and two heads with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.second["wide"] = checkpoint_wrapper(self.second["wide"])
        self.tied = nn.Linear(130, CLASSES)
        self.tied.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.second["wide"](self.first(x).tanh()).tanh()
        y: Tensor = self.head(x) + self.tied(x.relu())
        return self.scale * y


@facts
def checkpointed_activations_tied_weights_and_clipped_norms_change_nothing(rank: int) -> None:
    """Attached before the first forward pass, or between two steps; the norm of all shards is clipped in every step."""
    kept = []
    for attached_at in (None, 0, 3):
        model, attachment, norms = Peculiar(), None, list[Tensor]()
        for module in (model.first, model.second["wide"], model):
            fully_shard(module, mesh=everyone())
        optimizer = adamw(model)
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # FSDPModule's
        for step in range(8):
            if step == attached_at:
                attachment = attach_sharded(model, "all-reduce", hook_timeout=30.0)
                attachment.watch(optimizer)
            backward(model, rank, step)
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            norms.append(norm.full_tensor())
            optimizer.step()
            optimizer.zero_grad()
        assert min(norms) > 0.5, "each was clipped"
        assert attachment is None or attachment.steps == 8 - (attached_at or 0)
        kept.append(shards(model) | {"norms": torch.stack(norms)})
        if attachment is not None:
            attachment.close()
    assert furthest(kept[0], kept[1]) == furthest(kept[0], kept[2]) == 0


@facts
def bytes_are_those_of_the_rows_that_others_keep(rank: int) -> None:
    """Of the widest module: 65 of 130 rows of 65 weights, and 65 biases; int8 has blocks of 256, and scales."""
    for name, of_block in (("all-reduce", 256 * 4), ("bf16", 256 * 2), ("int8:block=256", 256 + 4)):
        model = sharded()
        attachment = attach_sharded(model, name)
        train(model, sgd(model), rank, 0, 3)
        counts = attachment["second.wide"].statistics()
        assert counts.steps == attachment.statistics().steps == 3
        elements, tail = divmod(65 * 65, 256)
        least = elements * of_block + (tail + 65) * (of_block // 256)
        sent = counts.moved_bytes / 3
        assert least <= sent <= least + (tail + 65) * 4 + 64, (name, sent, least)
        assert set(attachment.by_parameter()) == set(dict(model.named_parameters()))
        assert attachment.statistics().payload_bytes == sum(
            one.statistics().payload_bytes for one in attachment.values()
        )
        attachment.close()


def resumed_at_step_4(rank: int, residuals: Any) -> tuple[Network, Handle[Any]]:
    """Train eight steps; do so with another model and attachment from the fourth on, and return those."""
    model = sharded()
    optimizer = adamw(model)
    attachment = attach_sharded(model, "int4", residuals=residuals)
    train(model, optimizer, rank, 0, 4)
    saved = roundtrip(attachment.state_dict())
    parameters, inner = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    kept = saved["groups"]["second.wide"]["local"][f"rank{rank}"]["second.wide.weight"]
    assert kept["residual"].numel() == 130 * 65, "of the whole parameter"
    train(model, optimizer, rank, 4, 8)
    whole, state = shards(model), attachment.state_dict()
    attachment.close()

    again = sharded()
    optimizer = adamw(again)
    resumed = attach_sharded(again, "int4", residuals=residuals)
    again.load_state_dict(parameters)
    optimizer.load_state_dict(inner)
    resumed.load_state_dict(saved)
    train(again, optimizer, rank, 4, 8)
    assert furthest(whole, shards(again)) == 0, residuals
    assert distance(state["groups"], resumed.state_dict()["groups"]) == 0, residuals
    return again, resumed


@facts
def a_resumed_run_is_the_uninterrupted_one_bit_for_bit(rank: int) -> None:
    for residuals in ("fp32", "bf16", "host"):
        model, resumed = resumed_at_step_4(rank, residuals)
        resumed.replace("bf16")
        optimizer = adamw(model)
        train(model, optimizer, rank, 8, 9)
        assert "Cast" in repr(resumed["first"].compressor)
        refused = told_by(functools.partial(resumed.replace, "powersgd"))
        assert refused.error == "SettingsError" and "averages whole gradients" in refused.text
        train(model, optimizer, rank, 9, 10)
        resumed.close()


@facts
def what_cannot_work_is_refused_in_words_on_every_rank(rank: int) -> None:
    plain = told_by(lambda: attach_sharded(Network(), "int8"))
    assert plain.error == "AttachError" and "call torch.distributed.fsdp.fully_shard" in plain.text
    whole = nn.parallel.DistributedDataParallel(Network())
    assert "use commhooks.attach" in told_by(lambda: attach_sharded(whole, "int8")).text
    model = sharded()
    for name, error, text in (
        ("powersgd", "SettingsError", "averages whole gradients, of which no rank can return its shard alone"),
        ("int8" if rank else "int4", "AttachError", "ranks disagree"),
    ):
        told = told_by(lambda name=name: attach_sharded(model, name))  # type: ignore[misc]  # mypy: cannot infer a lambda
        assert told.error == error and text in told.text, told.text
    attachment = attach_sharded(model, "int8")
    assert "has another custom reduce-scatter already" in told_by(lambda: attach_sharded(model, "int8")).text
    model.first.bias.requires_grad_(False)
    frozen = told_by(lambda: train(model, sgd(model), rank, 0, 2))
    assert "first: the gradients have 1,320 elements in place of 1,386" in frozen.text
    assert attachment["first"].steps == 0
    of_one_size = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    fully_shard(of_one_size.requires_grad_(False), mesh=everyone())
    of_one_size[0].requires_grad_(True)
    attach_sharded(of_one_size, "int8")
    of_one_size(torch.ones(1, 4)).sum().backward()
    of_one_size[0].requires_grad_(False)
    of_one_size[1].requires_grad_(True)
    assert (
        "the model: '1.weight' now requires a gradient: parameters were frozen or unfrozen since"
        in told_by(lambda: of_one_size(torch.ones(1, 4)).sum().backward()).text
    )
    replicated = nn.Linear(4, 4)
    fully_shard(replicated, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
    assert "over replicas itself, uncompressed (HSDP" in told_by(lambda: attach_sharded(replicated, "int8")).text


@on_ranks(2)
@pytest.mark.parametrize("attach", [attach_sharded, attach_replicas])
def test_trained_parameters_that_nobody_averages_are_named_on_attaching(rank: int, attach: Any) -> None:
    """Each rank would train them alone, as it does without an attachment."""
    mesh = init_device_mesh(
        "cpu", (1, 2) if attach is attach_sharded else (2, 1), mesh_dim_names=("replicas", "shards")
    )
    group = {} if attach is attach_sharded else {"process_group": mesh["replicas"].get_group()}

    def rootless() -> Network:
        model = Network()
        for module in (model.first, model.second["wide"], model.second["unused"]):
            fully_shard(module, mesh=mesh["shards"])
        return model

    told = told_by(lambda: attach(rootless(), "int8", **group))
    assert told.error == "AttachError" and "'scale' requires a gradient, but is in no module that" in told.text
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        frozen = rootless()
        frozen.scale.requires_grad_(False)
        frozen.head.requires_grad_(False)
        hooked = rootless()
        ignoring = rootless()
        wrapped = rootless()
        for model in (frozen, hooked, ignoring, wrapped):
            model.scale.requires_grad_(False)
        for one in hooked.head.parameters():  # as if it averaged them
            one.register_post_accumulate_grad_hook(lambda _: None)
        fully_shard(ignoring, mesh=mesh["shards"], ignored_params={ignoring.head.bias})
        wrapped.head = nn.parallel.DistributedDataParallel(wrapped.head)  # type: ignore[assignment]  # not a Linear
        for model in (frozen, hooked, ignoring, wrapped):
            attach(model, "int8", **group).close()
    wanted = [
        "average the gradient of 'head.weight' and 1 other parameter: each",
        "of 'head.bias': each rank trains it",
    ]
    texts = [text for one in said if "unless something else averages" in (text := str(one.message))]
    assert len(texts) == (0 if rank else len(wanted))
    assert all(text in found for text, found in zip(wanted, texts, strict=False))


@facts
def state_loads_with_and_without_compilation_and_activation_checkpointing(rank: int) -> None:
    model, wrapped, mesh = sharded(), Network(), everyone()
    wrapped.second["wide"] = checkpoint_wrapper(wrapped.second["wide"])
    for module in (wrapped.first, wrapped.second["wide"], wrapped):
        fully_shard(module, mesh=mesh)
    compiled: Any = torch.compile(wrapped, backend="eager")
    plain, attachment = attach_sharded(model, "int8"), attach_sharded(compiled, "int8")
    train(model, sgd(model), rank, 0, 2)
    train(compiled, sgd(compiled), rank, 0, 1)
    attachment.load_state_dict(plain.state_dict())
    assert list(attachment) == MODULES and attachment.steps == 2
    assert distance(plain.state_dict()["groups"], attachment.state_dict()["groups"]) == 0
    attachment.close()
    plain.close()


@facts
def a_module_that_is_called_twice_sends_zeros_first(rank: int) -> None:
    """So each pass counts as two steps of it, and the gradient is that of FSDP2."""
    found = []
    for compressor in (None, "all-reduce"):
        torch.manual_seed(0)
        twice = nn.Linear(20, 20)
        model = nn.Sequential(twice, nn.Tanh(), twice, nn.Linear(20, 7))
        for module in (twice, model):
            fully_shard(module, mesh=everyone())
        attachment = None if compressor is None else attach_sharded(model, compressor)
        backward(model, rank)
        found.append(gradients(model))
        if attachment is not None:
            assert {name: unit.steps for name, unit in attachment.items()} == {"the model": 1, "0": 2}
            assert attachment.steps == 2
    assert furthest(*found) == 0


@facts
def ranks_that_have_other_modules_disagree_in_words(rank: int) -> None:
    """Also if the last module's parameters are frozen on one rank, which does not wait there for the other."""
    no_model: Any = 3
    assert "model must be a torch.nn.Module (got int)" in told_by(lambda: attach_sharded(no_model, "int8")).text
    model = sharded()
    for compressor, gather in ("int8" if rank else "int9", None), ("int8", "int8" if rank else "int9"):
        told = told_by(lambda of=(compressor, gather): attach_sharded(model, of[0], gather=of[1]))  # type: ignore[misc]  # mypy: cannot infer a lambda
        assert "'int9' is not known" in told.text, told.text
        assert told.error == ("AttachError" if rank else "SettingsError")
    if rank == 0:
        model.second["wide"].requires_grad_(False)
    told = told_by(lambda: attach_sharded(model, "int8", hook_timeout=30.0))
    assert told.error == "AttachError" and "modules: the model, first" in told.text, told.text
    assert told.seconds < 30.0
    replicated = nn.Linear(4, 4)
    replicate(replicated, mesh=everyone())
    assert "over replicas itself, uncompressed" in told_by(lambda: attach_sharded(replicated, "int8")).text


@facts
def an_optimizer_that_steps_on_gradients_of_which_a_module_sent_none_is_stopped(rank: int) -> None:
    """Each optimizer trains some of the modules."""
    model = sharded()
    one, other = torch.optim.SGD([*model.first.parameters()], lr=0.1), sgd(model.second)
    attachment = attach_sharded(model, "int8")
    attachment.watch(one, other)
    assert "none of the parameters of SGD" in told_by(lambda: attachment.watch(sgd(nn.Linear(2, 2)))).text
    train(model, one, rank, 0, 1)
    train(model, other, rank, 0, 1)
    model.second["wide"].set_custom_reduce_scatter(attachment._feed._before["second.wide"])  # type: ignore[operator, attr-defined]
    told = told_by(lambda: train(model, other, rank, 1, 2))
    assert told.error == "NotAveragedError" and "a step on gradients of second.wide that" in told.text, told.text
    train(model, one, rank, 1, 2)
    attachment.close()


@facts
def an_inf_on_one_rank_commits_nothing_on_any(rank: int) -> None:
    model = sharded()
    optimizer = sgd(model)
    attachment = attach_sharded(model, "int4")
    train(model, optimizer, rank, 0, 2)
    before = copy.deepcopy(attachment.state_dict()["groups"])
    model(torch.full((2, 20), float("inf") if rank else 1.0)).sum().backward()
    after = attachment.state_dict()["groups"]
    for label in MODULES:
        assert distance(before[label]["local"], after[label]["local"]) == 0
    optimizer.zero_grad()
    train(model, optimizer, rank, 2, 3)
    assert all(shard.isfinite().all() for shard in shards(model).values())
    attachment.close()


def without_a_peer(rank: int) -> Told | None:
    """Train on while rank 1 does not come."""
    model = sharded(reshard_after_forward=False)  # else FSDP2 gathers in the backward pass, and waits there
    optimizer = sgd(model)
    attach_sharded(model, "int8", hook_timeout=0.5)
    train(model, optimizer, rank, 0, 2)
    if rank == 1:
        model(torch.zeros(1, 20))  # gathers, which FSDP2 does by itself
        stay_away()
        os._exit(0)
    told = told_by(lambda: train(model, optimizer, rank, 2, 3))
    tell(rank)
    return told


def test_a_rank_that_does_not_come_is_named() -> None:
    first, _ = run_world_outcomes(without_a_peer, 2)
    assert survived(first), first.describe()
    assert "hook_timeout=0.5 s. No answer from rank 1" in first.value.text
    assert "round 2, second.wide" in first.value.text


@on_ranks(1)
def test_one_rank_trains_as_without(rank: int) -> None:
    plain, model = trained(rank, None, steps=3)[0], sharded()
    optimizer, attachment = sgd(model), attach_sharded(model, "int8")
    attachment.watch(optimizer)
    train(model, optimizer, rank, 0, 3)
    assert attachment.statistics().steps == 0
    attachment.close()
    assert furthest(plain, shards(model)) == 0


test_on_two_ranks = facts.tests()
