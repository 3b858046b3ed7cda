"""Hooks registered by name, attached late, and by themselves."""

from __future__ import annotations

import functools
import gc
import inspect
import math
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import ddp_comm_hooks as pytorchs
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as stock

import commhooks
from commhooks.hooks import default as default_hooks
from commhooks.hooks.by_name import DDPCommHookType, register_ddp_comm_hook
from tests.commhooks.exact import SHAPES, given, hooked, integers, means, same, step
from tests.commhooks.models import gloo_sums_complex_numbers, gradients_of, torchs_takes, wrap
from tests.commhooks.told import told_by
from tests.ddp_core.facts import BOTH_DDPS, Facts

facts = Facts(kinds=BOTH_DDPS)


# --- by name ----------------------------------------------------------------------------------------------------------


class Recorder(torch.nn.Module):
    """Take a hook as a DistributedDataParallel does, and keep it."""

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.state, self.hook = state, hook


SETTINGS_THAT_COUNT = [
    "matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate", "use_error_feedback", "warm_start",
    "orthogonalization_epsilon",
]  # fmt: skip


@pytest.mark.parametrize("name", pytorchs.DDPCommHookType.__members__)
def test_a_type_registers_our_hook_of_the_name_that_pytorchs_type_registers(name: str) -> None:
    ours, theirs = Recorder(), Recorder()
    register_ddp_comm_hook(DDPCommHookType[name], ours)
    pytorchs.register_ddp_comm_hook(pytorchs.DDPCommHookType[name], theirs)
    homes: Any = [default_hooks, inspect.getmodule(commhooks.powerSGD_hook)]
    assert ours.hook is next(getattr(m, theirs.hook.__name__) for m in homes if hasattr(m, theirs.hook.__name__))
    if "POWER_SGD" in name:
        for setting in SETTINGS_THAT_COUNT:
            assert getattr(ours.state, setting) == getattr(theirs.state, setting), setting
        assert ours.state.process_group is None
    else:
        assert ours.state is theirs.state is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("fp16", Recorder()), r"must be a member .*got 'fp16' of type builtins\.str.*ALLREDUCE, FP"),
        ((pytorchs.DDPCommHookType.NOOP, Recorder()), r"of type torch\.distributed\.algorithms\.ddp_comm_hooks\."),
        ((DDPCommHookType.NOOP, nn.Linear(1, 1)), "model must be a Dist.* PyTorch's .got Linear.; wrap the"),
        ((DDPCommHookType.POWER_SGD, Recorder(), "gloo"), "state must be a process group, or None .* .got 'gloo'."),
    ],
)
def test_what_is_of_a_wrong_type_is_refused_in_words(given: Any, text: str) -> None:
    with pytest.raises(commhooks.CommHooksError, match=text) as refusal:
        register_ddp_comm_hook(*given)
    assert isinstance(refusal.value, TypeError) and not hasattr(given[1], "hook")


# --- registration -----------------------------------------------------------------------------------------------------


@facts
def every_type_averages_over_its_process_group(rank: int, kind: str) -> None:
    """Compare 3 steps' means, over both ranks and over a group of this rank alone."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    errors = {kind_of_hook.name: _errors(kind, kind_of_hook, rank, alone) for kind_of_hook in DDPCommHookType}
    for name in ("ALLREDUCE", "POWER_SGD", "POWER_SGD_RANK2", "BATCHED_POWER_SGD", "BATCHED_POWER_SGD_RANK2"):
        assert errors[name] == (0.0, 0.0)  # PowerSGD's first 1,000 steps are an all-reduce
    assert errors["NOOP"][0] > 10 and errors["NOOP"][1] == 0.0
    for place in (0, 1):  # elements below 64: halves of them are a cast away by 2**-7 (fp16) or 2**-4 (bf16)
        fp16, bf16 = errors["FP16_COMPRESS"][place], errors["BF16_COMPRESS"][place]
        assert 0 < fp16 <= 2**-5 < bf16 <= 2**-2


def _errors(kind: str, kind_of_hook: DDPCommHookType, rank: int, alone: dist.ProcessGroup) -> tuple[float, float]:
    together, by_itself = given(kind), given(kind)
    register_ddp_comm_hook(kind_of_hook, together)
    register_ddp_comm_hook(kind_of_hook, by_itself, alone)
    errors = [0.0, 0.0]
    for seed in range(3):
        gradients = [[g + 2**-4 + 2**-10 for g in one] for one in integers(seed)]
        for place, (model, expected) in enumerate([(together, means(gradients)), (by_itself, gradients[rank])]):
            distances = [
                float((a - b).abs().max()) for a, b in zip(step(model, gradients[rank]), expected, strict=True)
            ]
            errors[place] = max(errors[place], *distances)
    return errors[0], errors[1]


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "one bucket": {"bucket_cap_mb": 25},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static, view": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused, view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}


@facts
def attaching_between_steps_or_after_the_forward_pass_gives_right_means_at_once(rank: int, kind: str) -> None:
    """After 1 step and after 2."""
    for label, settings in SETTINGS.items():
        for steps_before in (1, 2):
            for after_forward in (False, True):
                model = given(kind, **settings)
                for number in range(steps_before + 3):
                    now = "all-reduce" if number == steps_before else None
                    gradients = integers(number)
                    found = _step_attaching(model, gradients[rank], now, after_forward)
                    assert same(found, means(gradients)), (label, steps_before, after_forward, number)


def _step_attaching(model: nn.Module, gradients: list[Tensor], name: str | None, after_forward: bool) -> list[Tensor]:
    model.zero_grad()
    if name and not after_forward:
        commhooks.attach(model, name)
    loss = model(*gradients)
    if name and after_forward:
        commhooks.attach(model, name)
    loss.backward()
    return gradients_of(model)


@facts
def attaching_over_another_hook_or_inside_a_backward_pass_is_refused(rank: int, kind: str) -> None:
    """Let what was attached before keep working."""
    gradients = integers(0)
    hooked_already = hooked(kind, stock.allreduce_hook)
    with pytest.raises(commhooks.AttachError, match=r"the hook allreduce_hook is registered on this model already"):
        commhooks.attach(hooked_already, "fp16")
    assert same(step(hooked_already, gradients[rank]), means(gradients))

    model = given(kind)
    told: list[str] = []
    handle = next(model.parameters()).register_hook(functools.partial(_attach_inside, model, told))
    step(model, gradients[rank])
    handle.remove()
    assert told == ["attach: a backward pass is under way; call attach between two passes."]
    commhooks.attach(model, "all-reduce")
    assert same(step(model, gradients[rank]), means(gradients))


def _attach_inside(model: nn.Module, told: list[str], _gradient: Tensor) -> None:
    try:
        commhooks.attach(model, "fp16")
    except commhooks.AttachError as error:
        told.append(str(error))


class Expert(nn.Module):
    """A model with a part that differs between ranks, which the DDP must ignore."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.own = nn.Linear(4, 3 + rank)
        self._ddp_params_and_buffers_to_ignore = ["own.weight", "own.bias"]

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.own(self.shared(inputs)).sum())


@facts
def complex_partly_ignored_and_static_models_of_two_dtypes_get_right_means(rank: int, kind: str) -> None:
    for policy in ("fifo", "fused") if gloo_sums_complex_numbers() else ():
        complex_model = given(kind, dtype=torch.complex64)
        commhooks.attach(complex_model, commhooks.make_compressor("powersgd", rank=2), policy=policy)
        gradients = integers(0, torch.complex64)
        assert same(step(complex_model, gradients[rank]), means(gradients)), policy

    expert = wrap(kind, Expert(rank))
    commhooks.attach(expert, "all-reduce")
    expert(torch.ones(2, 4)).backward()
    assert expert.module.own.weight.grad is not None  # type: ignore[union-attr]  # 'Tensor'

    alone = [dist.new_group([r]) for r in range(2)]  # every rank makes every group
    model = given(kind)
    commhooks.attach(model, "all-reduce", process_group=alone[rank]).close()
    gradients = integers(0)
    assert same(step(model, gradients[rank]), means(gradients)), "detached from another group"
    model = given(kind, process_group=alone[rank])
    commhooks.attach(model, "all-reduce").close()
    assert same(step(model, gradients[rank]), gradients[rank]), "detached, over the model's own group"
    _two_dtypes_in_a_static_graph(rank, kind)


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.zeros(5, dtype=torch.float16))
        self.wide = nn.Parameter(torch.zeros(5))

    def forward(self, gradient: Tensor) -> Tensor:
        return torch.as_tensor((self.narrow * gradient.half()).sum().float() + (self.wide * gradient).sum())


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, words: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.table(words)).sum())


@facts.once
def a_run_that_would_wait_for_a_steps_last_bucket_for_ever_is_refused(rank: int) -> None:
    """On a DDP that has several buckets at first and marks none as the last."""
    dense = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    for module, settings in ((WithTable(), {}), (TwoDtypes(), {}), (dense, {"bucket_cap_mb_list": [1]})):
        if not all(map(torchs_takes, settings)):
            continue
        model = wrap("torch", module, static_graph=True, **settings)
        ways: list[Callable[[], Any]] = [
            functools.partial(commhooks.attach, model, "powersgd", policy="fused"),
            functools.partial(commhooks.attach, model, "powersgd", atomic=True),
            functools.partial(commhooks.PowerSGDState(None, policy="fused").bind, model),
        ]
        for way in ways:
            with pytest.raises(commhooks.AttachError, match="policy must be 'fifo' and atomic False for PyTorch's"):
                way()


def _two_dtypes_in_a_static_graph(rank: int, kind: str) -> None:
    model = wrap(kind, TwoDtypes(), static_graph=True)
    if kind == "torch":
        with pytest.raises(commhooks.AttachError, match="policy must be 'fifo'.* for PyTorch's.*several dtypes"):
            commhooks.attach(model, "all-reduce", policy="fused")
    attachment = commhooks.attach(model, "all-reduce", policy="fifo" if kind == "torch" else "fused")
    for _ in range(3):
        model.zero_grad()
        model(torch.full((5,), 2.0 * rank)).backward()
        narrow, wide = gradients_of(model)
        assert bool((narrow == 1).all()) and bool((wide == 1).all())
    assert attachment.steps == 3


@facts
def detaching_after_an_error_ends_the_thread_and_leaves_the_users_error_alone(rank: int, kind: str) -> None:
    """Detach in a `finally`, from a backward pass that rank 0's own function broke."""
    gc.collect()  # earlier models
    before = _threads()
    model = given(kind)
    attachment = commhooks.attach(model, "all-reduce", policy="fused", hook_timeout=5.0)
    if rank == 0:
        next(model.parameters()).register_hook(_break)
    told = told_by(functools.partial(_step_and_detach, model, attachment, rank))
    assert _threads() == before
    assert told.error != "nothing" and (rank or "the user's own" in told.text), told


def _step_and_detach(model: nn.Module, attachment: commhooks.Handle[Any], rank: int) -> None:
    try:
        step(model, integers(0)[rank])
    finally:
        attachment.close()


def _threads() -> int:
    return [thread.name for thread in threading.enumerate()].count("commhooks")


def _break(_gradient: Tensor) -> None:
    raise ArithmeticError("the user's own")


@facts.once
def attaching_alone_names_the_rank_that_does_not_come(rank: int) -> None:
    """And a group that this rank does not belong to."""
    model = given("torch")
    foreign, impatient = dist.new_group([1]), dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
    if rank == 0:
        with pytest.raises(commhooks.CommHooksError, match="expected a process group that this rank belongs to"):
            commhooks.attach(model, "fp16", process_group=foreign)
        with pytest.raises(commhooks.CollectiveError, match="(?s)^rank 0: .*Missing: rank 1."):
            commhooks.attach(model, "fp16", process_group=impatient)


@facts
def hooks_without_a_state_tell_what_they_sent(rank: int, kind: str) -> None:
    """In two steps of two hooks on three models."""
    models = [
        hooked(kind, hook, bucket_cap_mb=100) for hook in (commhooks.allreduce_hook, commhooks.fp16_compress_hook)
    ]
    models.append(hooked(kind, commhooks.allreduce_hook, bucket_cap_mb=100))
    before = commhooks.hook_statistics()
    for model in models * 2:
        step(model, integers(0)[rank])
    elements = sum(math.prod(shape) for shape in SHAPES)
    for name, steps, sent in (("AllReduceMean()", 4, 4), ("Cast(dtype=torch.float16)", 2, 2)):
        was, now = before.get(name, commhooks.Statistics()), commhooks.hook_statistics()[name]
        assert (now.steps - was.steps, now.payload_bytes - was.payload_bytes) == (steps, steps * sent * elements)


test = facts.tests()
