"""What the guard says, when, and how it is told otherwise."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import io
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commhooks
import ddp_core
import ddp_core.guard
import ddp_core.guard.outside
import ddp_core.guard.proof
from ddp_core.guard import NotAveragedError, NotAveragedWarning
from tests.ddp_core.facts import Facts
from tests.guard.situations import CORE, CORE_ATTACH, SGD, TORCH_ATTACH, TORCH_HOOK, WRAPPERS, Net, Run, squares
from tests.waiting import until
from tests.world import on_ranks, run_world

ATTACHED = (CORE_ATTACH, TORCH_ATTACH)
TORCH_OPTIONS = inspect.signature(TorchDDP).parameters


@contextlib.contextmanager
def words() -> Iterator[list[str]]:
    """Collect the guard's warnings; any other warning of the same class is one, too."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(one.message) for one in caught if issubclass(one.category, NotAveragedWarning)]


def bypass(run: Run, model: Any = None, steps: int = 2) -> str:
    """Train through the inner module; return "raises", "warns" or "nothing"."""
    module = (run.model if model is None else model).module
    with words() as said:
        try:
            run.train(module, run.optimizer_of(module.parameters()), steps)
        except NotAveragedError:
            return "raises"
    return "warns" if said else "nothing"


def ddp_of(kind: str) -> Any:
    return (ddp_core.DistributedDataParallel if "ddp_core" in kind else TorchDDP)(Net())


fact = Facts(check_exit=False)


@fact
def an_error_names_class_parameter_rank_and_cause_and_comes_before_the_step(rank: int) -> None:
    for wrapper in WRAPPERS:
        run = Run(wrapper, SGD, rank)
        run.train(steps=1)
        before = copy.deepcopy(run.model.module.state_dict())
        run.optimizer.zero_grad()
        run.backward_in_no_sync()
        with pytest.raises(NotAveragedError) as caught:
            run.optimizer.step()
        for part in ("SGD", "Net", "'first.weight'", f"rank {rank}", "no_sync"):
            assert part in str(caught.value), f"{wrapper}: {part} is not in: {caught.value}"
        for name, value in run.model.module.state_dict().items():
            assert torch.equal(value, before[name]), f"{wrapper}: {name} has changed"


@fact
def an_error_after_a_closure_says_that_the_step_was_taken(rank: int) -> None:
    run = Run(TORCH_ATTACH, SGD, rank)
    batch = run.batch()

    def closure() -> float:
        run.optimizer.zero_grad()
        loss = squares(run.model.module(batch))
        loss.backward()
        return loss.item()

    before = copy.deepcopy(run.model.module.state_dict())
    with pytest.raises(NotAveragedError, match="took a step"):
        run.optimizer.step(closure)
    assert not torch.equal(run.model.module.first.weight, before["first.weight"])


def equal_on_ranks(module: nn.Module) -> bool:
    flat = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    highest = torch.stack([flat, -flat])
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return torch.equal(highest[0], -highest[1])


@fact
def attach_takes_a_mode(rank: int) -> None:
    for wrapper in ATTACHED:
        for mode, expected in (("raise", "raises"), ("warn", "warns"), ("off", "nothing")):
            model: Any = ddp_of(wrapper)
            commhooks.attach(model, "fp16", guard=mode)  # type: ignore[arg-type]  # a string, not one of its literals
            assert bypass(Run(wrapper, SGD, rank), model) == expected, f"{wrapper}, {mode}"


@fact
def another_mode_is_refused(rank: int) -> None:
    model, loud = ddp_of(CORE), "loud"
    with pytest.raises(commhooks.SettingsError, match="loud") as caught:
        commhooks.attach(model, "fp16", guard=loud)  # type: ignore[arg-type]  # it is none of its literals
    assert all(word in str(caught.value) for word in ("raise", "warn", "off")), caught.value
    with pytest.raises(ValueError, match="loud"):
        ddp_core.set_guard(model, loud)  # type: ignore[arg-type]  # the same


@fact
def a_wrapper_without_attach_is_set_by_a_function(rank: int) -> None:
    for wrapper in (CORE, TORCH_HOOK):
        run = Run(wrapper, SGD, rank)
        for mode, expected in (("warn", "warns"), ("off", "nothing"), ("raise", "raises")):
            ddp_core.set_guard(run.model, mode)  # type: ignore[arg-type]  # a string, not one of its literals
            assert bypass(run) == expected, f"{wrapper}, {mode}"


@fact
def an_optimizer_may_step_locally_and_others_may_not(rank: int) -> None:
    run = Run(TORCH_HOOK, SGD, rank)
    commhooks.steps_locally(run.optimizer)
    with words() as said:
        run.train(run.model.module)
    assert not said
    assert bypass(run) == "raises"


@fact
def pytorchs_ddp_without_us_is_not_guarded(rank: int) -> None:
    run = Run(TORCH_HOOK, SGD, rank)
    assert bypass(run, TorchDDP(Net())) == "nothing"
    foreign = TorchDDP(Net())
    foreign.register_comm_hook(None, fp16_compress_hook)
    assert bypass(run, foreign) == "nothing"


@fact
def a_saved_model_holds_nothing_of_the_guard(rank: int) -> None:
    for wrapper in WRAPPERS:
        run = Run(wrapper, SGD, rank)
        run.train(steps=1)
        with pytest.raises(NotAveragedError):
            run.train(run.model.module, steps=1)
        run.optimizer.zero_grad()
        saved, plain = io.BytesIO(), io.BytesIO()
        torch.save(run.model.module, saved)
        torch.save(copy.deepcopy(run.model.module), plain)
        assert b"ddp_core" not in saved.getvalue()
        assert all(not vars(parameter) for parameter in run.model.parameters()), wrapper
        assert len(saved.getvalue()) == len(plain.getvalue())
        torch.save(run.model, io.BytesIO())


@fact
def a_model_that_is_dropped_is_freed(rank: int) -> None:
    for wrapper in WRAPPERS:
        run = Run(wrapper, SGD, rank)
        run.train(steps=2)
        kept = weakref.ref(run.model.module.first.weight)
        del run
        # A thread of the hook's may still hold the last bucket.
        assert until(lambda: gc.collect() >= 0 and kept() is None), wrapper  # noqa: B023  # called at once


@fact
def a_layer_whose_reduction_was_skipped_stays_suspect(rank: int) -> None:
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 1e-5}
    for kind in (CORE, TORCH_HOOK) if "skip_all_reduce_unused_params" in TORCH_OPTIONS else (CORE,):
        run = Run(kind, SGD, rank)
        model = run.wrap(Net(), **options)
        optimizer = run.optimizer_of(model.parameters())
        with words() as said:
            run.train(model, optimizer, steps=3)
        assert not said
        run.backward(model.module)
        run.backward(functools.partial(model, without_head=True))
        with pytest.raises(NotAveragedError, match=r"'head\.(weight|bias)' and 1 more"):
            optimizer.step()


test_a_fact = fact.tests()


def bypasses_everywhere(rank: int) -> list[str]:
    found = [bypass(Run(wrapper, SGD, rank)) for wrapper in WRAPPERS]
    model: Any = ddp_of(CORE)
    commhooks.attach(model, "fp16", guard="raise")
    return [*found, bypass(Run(CORE, SGD, rank), model)]


@pytest.mark.parametrize(("mode", "expected"), [("warn", "warns"), ("off", "nothing"), ("raise", "raises")])
def test_a_variable_sets_the_mode_of_a_run_that_nobody_can_edit(mode: str, expected: str) -> None:
    """What the program itself sets is left alone."""
    for found in run_world(bypasses_everywhere, 2, environment={"DDP_GUARD": mode}, check_exit=False):
        assert found == [expected] * len(WRAPPERS) + ["raises"]


def one_of_three_differs(rank: int) -> str:
    """Ranks 0 and 1 have the same data; rank 2 has its own."""
    run = Run(CORE, SGD, rank)
    torch.manual_seed(7 if rank < 2 else 8)
    squares(run.model.module(torch.randn(4, 8))).backward()
    with pytest.raises(NotAveragedError) as caught:
        run.optimizer.step()
    return str(caught.value)


def test_ranks_that_agree_with_each_other_raise_with_the_one_that_does_not() -> None:
    texts = run_world(one_of_three_differs, 3)
    assert all(f"rank {rank}" in text for rank, text in enumerate(texts)), texts


def one_rank_bypasses(rank: int) -> tuple[str, list[str]]:
    """Rank 1 alone calls the inner module: its peer waits in a collective, and must not wait for ever."""
    model: Any = ddp_of(CORE)
    commhooks.attach(model, "fp16", hook_timeout=2.0)
    run = Run(CORE, SGD, rank)
    optimizer = run.optimizer_of(model.parameters())
    run.train(model, optimizer, steps=3)  # the order of buckets is agreed on by then: the hook alone communicates
    with mock.patch.object(ddp_core.guard.proof, "PATIENCE", 0.2), words() as said:
        try:
            run.train(model.module if rank == 1 else model, optimizer, steps=1)
        except (NotAveragedError, commhooks.CollectiveError) as error:
            return f"{type(error).__name__}: {error}", said
    return "nothing", said


def test_a_rank_that_bypasses_alone_warns_and_raises_at_the_limit_of_a_collective() -> None:
    (waits, nothing), (raised, said) = run_world(one_rank_bypasses, 2, check_exit=False)
    assert waits.startswith("CollectiveError: ") and not nothing
    assert raised.startswith("NotAveragedError: ") and "rank 1" in raised
    assert len(said) == 1 and "rank 1" in said[0]


@on_ranks(2, check_exit=False)
def test_a_rank_that_is_late_is_warned_of_once_and_waited_for(rank: int) -> None:
    run = Run(TORCH_ATTACH, SGD, rank)
    with mock.patch.object(ddp_core.guard.proof, "PATIENCE", 0.2), words() as said:
        for step in run.steps(3):
            run.backward_in_no_sync()
            for parameter in run.model.parameters():
                dist.all_reduce(parameter.grad)
            if step == 0 and rank == 1:
                time.sleep(0.5)
    assert len(said) == (1 if rank == 0 else 0), said
    assert equal_on_ranks(run.model.module)
