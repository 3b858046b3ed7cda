"""One state of PowerSGD and several models, one after the other."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from commhooks import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from tests.commhooks.models import Given, gradients_of, wrap
from tests.commhooks.told import told_by
from tests.commhooks.workers import mean_of, normal, zeros
from tests.ddp_core.facts import BOTH_DDPS, Facts

facts = Facts(kinds=BOTH_DDPS)
SHAPES = [(30, 50), (50,), (40, 30), (24, 24)]


def hooked(kind: str, state: PowerSGDState, hook: Callable[..., Any] = powerSGD_hook) -> nn.Module:
    model = wrap(kind, Given(*SHAPES), bucket_cap_mb=0.004)
    model.register_comm_hook(state, hook)  # type: ignore[operator]  # 'Tensor not callable'
    return model


def step(models: Sequence[nn.Module], rank: int, number: int) -> list[Tensor]:
    """Run one backward pass through all models; return the last one's gradients."""
    gradients = normal(zeros(*SHAPES), 2, seed=number)[rank]
    for model in models:
        model.zero_grad()
    torch.stack([model(*gradients) for model in models]).sum().backward()
    return gradients_of(models[-1])


@facts
def a_state_begins_anew_with_the_next_model(rank: int, kind: str) -> None:
    """Train model after model, each with another hook, on one state, as on a state of its own; in warm-up too."""
    waiting, shared = PowerSGDState(None, 2), PowerSGDState(None, 2, start_powerSGD_iter=1)
    true = [mean_of(normal(zeros(*SHAPES), 2, seed=0), index) for index in range(len(SHAPES))]
    for turn, hook in enumerate((powerSGD_hook, batched_powerSGD_hook, powerSGD_hook, powerSGD_hook)):
        plain = step([hooked(kind, waiting, hook)], rank, 0)
        assert all((ours - mean).abs().max() <= 1e-6 for ours, mean in zip(plain, true, strict=True))
        own = PowerSGDState(None, 2, start_powerSGD_iter=1)
        for state in (own, shared):
            state.set_grad_scale(2.0**turn)
        models = [hooked(kind, state, hook) for state in (own, shared)]
        for number in range(4):
            theirs, ours = (step([model], rank, number) for model in models)
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), (turn, number)
        assert shared.iter == own.iter == 4 and waiting.iter == 1
        assert shared.compression_stats() == own.compression_stats() != (0.0, 0, 0)
        if kind == "core":  # PyTorch's DDP tells no names
            assert shared.snapshot().channels["gradients"].grad_scale == 2.0**turn
        del own, models, state
        assert [thread.name for thread in threading.enumerate()].count("commhooks") == 2


def now_this_now_that(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Change the hook after two steps."""
    return (batched_powerSGD_hook if state.iter >= 2 else powerSGD_hook)(state, bucket)


@facts
def mistakes_with_one_state_are_still_named(rank: int, kind: str) -> None:
    """One model with two hooks, and two models."""
    mistakes: dict[str, tuple[tuple[int, ...], ...]] = {  # by what is said: the models of each backward pass
        "the earlier one is used again; make one state for each model": ((0,), (1,), (0,)),
        "both have gradients in one backward pass; make one state for each model": ((0, 1),),
    }
    if kind == "core":  # PyTorch's DDP tells no names
        mistakes |= {
            "cannot change to (None, 'whole-bucket'); use one hook with one state": ((2,), (2,), (2,)),
            "bind was called with one, and gradients of the other came; make one state for each": ((0,), (1,)),
        }
    for words, passes in mistakes.items():
        state = PowerSGDState(None)
        hooks = [powerSGD_hook, powerSGD_hook, *[now_this_now_that] * (kind == "core")]
        models = [hooked(kind, state, hook) for hook in hooks]
        if words.startswith("bind"):
            state.bind(models[0])
        for number, used in enumerate(passes):
            told = told_by(lambda: step([models[one] for one in used], rank, number))  # noqa: B023  # called at once
            assert (words in told.text) == (number == len(passes) - 1), told


def trained(state: PowerSGDState, rank: int) -> PowerSGDState:
    """Take one step, and compare its mean."""
    means = step([hooked("core", state)], rank, 0)
    true = [mean_of(normal(zeros(*SHAPES), 2, seed=0), index) for index in range(len(SHAPES))]
    assert all((ours - mean).abs().max() <= 1e-6 for ours, mean in zip(means, true, strict=True))
    return state


@facts.once
def a_state_that_one_rank_alone_makes_unpickles_or_copies_and_keeps_concerns_no_other(rank: int) -> None:
    for odd in (0, 1):
        keep_states_alone(rank, odd)


def keep_states_alone(rank: int, odd: int) -> None:
    first = trained(PowerSGDState(None, hook_timeout=20.0), rank)
    kept: list[PowerSGDState] = []
    if rank == odd:
        kept = [PowerSGDState(None, hook_timeout=20.0), pickle.loads(pickle.dumps(first)), copy.deepcopy(first)]
        kept[0].bind(Given(*SHAPES))
    later = trained(PowerSGDState(None, hook_timeout=20.0), rank)
    assert [state.iter for state in (first, later, *kept)] == [1, 1, *([0, 1, 1] if kept else [])]


@facts
def states_are_told_apart_by_their_models_whatever_order_they_are_made_and_used_in(rank: int, kind: str) -> None:
    """Let the models' first buckets come in another order on each rank, as with a device for each of them."""
    modules: list[nn.Module] = [Given(SHAPES[0]), Given(SHAPES[2])]
    if rank == 0:  # names as if this rank alone had compiled it
        modules[1] = nn.Sequential(OrderedDict(_orig_mod=modules[1]))
    if kind == "core":  # PyTorch's DDP tells no names
        modules.append(nn.Sequential(Given(SHAPES[0])))
    order = range(len(modules)) if rank else range(len(modules) - 1, -1, -1)
    made = {number: PowerSGDState(None, hook_timeout=20.0) for number in order}
    models = [wrap(kind, module) for module in modules]
    for number, model in enumerate(models):
        model.register_comm_hook(made[number], powerSGD_hook)  # type: ignore[operator]  # 'Tensor not callable'
    shapes = [next(module.parameters()).shape for module in modules]
    in_turn = [models[number](torch.full(shapes[number], float(number + rank))) for number in order]
    torch.stack(in_turn).sum().backward()
    for number, module in enumerate(modules):
        (mean,) = gradients_of(module)
        assert torch.equal(mean, torch.full_like(mean, number + 0.5))


test = facts.tests()
