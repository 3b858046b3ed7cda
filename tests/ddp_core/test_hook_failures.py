"""A hook cannot hang training: whatever it does wrong ends in an error that says where, in time, on every rank."""

from __future__ import annotations

import concurrent.futures
import datetime
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.futures import Future

from ddp_core import HookTimeoutError
from tests.ddp_core.facts import Facts
from tests.ddp_core.models import grads, ones, scale, wrap
from tests.tiers import thorough
from tests.waiting import has_ended, until
from tests.world import Outcome, run_world_outcomes

facts = Facts()
futures: list[Future[Any]] = []  # those that the hook `endless` returned


@pytest.fixture
def forget() -> Iterator[None]:
    yield
    futures.clear()


def endless(state: object, bucket: object) -> Future[Any]:
    futures.append(Future())
    return futures[-1]


# ------------------------------------------------------------------------------------------------ one rank


@pytest.mark.usefixtures("alone", "forget")
def test_a_future_that_never_completes_is_named_after_hook_timeout_and_no_later_step_runs() -> None:
    ddp = wrap(scale())
    ddp.register_comm_hook(None, endless, hook_timeout=0.3)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    before = ddp.module.weight.item()
    begun = time.monotonic()
    with pytest.raises(HookTimeoutError) as caught:
        ddp(ones()).sum().backward()
    assert time.monotonic() - begun >= 0.3
    assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, TimeoutError)
    for words in ("rank 0: ", "hook 'endless'", "bucket 0 (weight)", "after 0.3 s", "hook_timeout=seconds"):
        assert words in str(caught.value)
    with pytest.raises(RuntimeError, match=r"interrupted by HookTimeoutError: rank 0: .*wrap again"):
        optimizer.step()
    futures[0].set_result(torch.ones(1))  # too late
    with pytest.raises(RuntimeError, match=r"interrupted by HookTimeoutError: rank 0: .*wrap again"):
        ddp(ones())
    assert ddp.module.weight.item() == before


@pytest.mark.usefixtures("forget")
def test_without_hook_timeout_the_timeout_of_the_process_group_holds() -> None:
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=0.4))
    try:
        ddp = wrap(scale())
        ddp.register_comm_hook(None, endless)
        with pytest.raises(HookTimeoutError, match=r"after 0\.4 s, the process group's timeout"):
            ddp(ones()).sum().backward()
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_after_a_hook_raised_the_module_can_be_wrapped_again_though_the_first_wrapper_lives(options: Any) -> None:
    launched: list[str] = []

    def broken(state: object, bucket: Any) -> Any:
        launched.append(bucket.names()[0])
        raise LookupError("no such luck")

    ddp = wrap(scale(), **options)
    ddp.register_comm_hook(None, broken)
    with pytest.raises(LookupError):
        ddp(ones()).sum().backward()
    again = wrap(ddp.module)
    again.zero_grad()
    again(ones()).sum().backward()
    assert grads(again) == [[1.0]]
    assert launched == ["weight"]
    with pytest.raises(RuntimeError, match="interrupted by LookupError: no such luck"):
        ddp(ones())


# ------------------------------------------------------------------------------------------------ the same mistake


def reduced(bucket: Any) -> Any:
    bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future()


def failing(bucket: Any) -> Any:
    raise LookupError("no such luck")


def failed(bucket: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(LookupError("no such luck"))
    return future


MISTAKES: dict[str, Callable[[Any], Any]] = {
    "returns None": lambda bucket: None,
    "raises": failing,
    "a future that failed": failed,
    "a future that fails": lambda bucket: reduced(bucket).then(lambda _: failing(None)),
    "wrong shape": lambda bucket: reduced(bucket).then(lambda _: torch.ones(5)),
}
"""One of each kind; what else a hook may return that is no mean, test_mistakes.py has."""


PLACE = "mistaken_hook', bucket 1 (0.weight)"


def mistaken(mistake: Callable[[Any], Any], **options: Any) -> Any:
    """Return a model of two buckets after one good step, in whose next step bucket 1 ends in the mistake."""
    calls = itertools.count()

    def mistaken_hook(state: object, bucket: Any) -> Any:
        call = next(calls)  # one bucket in the first step, two in the second
        return mistake(bucket) if (call, bucket.index()) == (2, 1) else reduced(bucket).then(lambda f: f.value()[0])

    ddp = wrap(nn.Sequential(scale(), scale()), bucket_cap_mb=1e-6)
    ddp.register_comm_hook(None, mistaken_hook, **options)
    ddp(ones(dist.get_rank())).sum().backward()
    return ddp


@facts
def every_mistake_is_named_at_once(rank: int) -> None:
    for mistake, function in MISTAKES.items():
        ddp = mistaken(function)
        with pytest.raises((RuntimeError, LookupError)) as caught:
            ddp(ones(rank)).sum().backward()
        assert PLACE in f"{caught.value} {getattr(caught.value, '__notes__', '')}", mistake
        with pytest.raises(RuntimeError, match="(?s)interrupted by .*wrap again"):
            ddp(ones(rank))


test_on_two_ranks = facts.tests()


# ------------------------------------------------------------------------------------------------ one rank's mistake


def only_on_rank_1(rank: int, name: str, stays: bool) -> None:
    """Make a mistake, or never join in, on rank 1; ``stays``: it survives its error, and stays until rank 0 ended."""
    mistake = MISTAKES.get(name, lambda bucket: Future[Any]())
    ddp = mistaken(
        mistake if rank == 1 else lambda bucket: reduced(bucket).then(lambda f: f.value()[0]),
        hook_timeout=0.5 if stays else 1,
    )
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("rank 0's process", str(os.getpid()))
    try:
        for _ in range(2):
            ddp(ones(rank)).sum().backward()
    except RuntimeError:
        if rank == 0 or not stays:
            raise
        # To leave earlier would end what rank 0 must find under way at its exit.
        assert until(lambda: has_ended(int(store.get("rank 0's process"))))


AT_EACH_PLACE = ["returns None", "raises", "a future that fails", "never joins in"]


@pytest.mark.parametrize("name", thorough([*MISTAKES, "never joins in"], unless=AT_EACH_PLACE.__contains__))
def test_a_mistake_of_one_rank_ends_both_with_exit_code_1_and_words(name: str) -> None:
    outcomes = run_world_outcomes(only_on_rank_1, 2, name, False, check_exit=True)
    for outcome in outcomes:
        assert (outcome.stack, outcome.exit_code) == (None, 1), outcome.describe()
        assert outcome.traceback is not None and "mistaken_hook', bucket " in outcome.traceback, outcome.describe()
    assert PLACE in str(outcomes[1].traceback)


WITH_A_PEER_THAT_STAYS = ["returns None", "never joins in"]


@pytest.fixture(scope="module")
def with_a_peer_that_stays() -> Iterator[dict[str, concurrent.futures.Future[list[Outcome]]]]:
    """Run the worlds at the same time: their ranks sleep for most of it."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield {
            name: pool.submit(run_world_outcomes, only_on_rank_1, 2, name, True, check_exit=True)
            for name in WITH_A_PEER_THAT_STAYS
        }


@pytest.mark.parametrize("name", WITH_A_PEER_THAT_STAYS)
def test_a_rank_whose_peer_is_there_but_never_joins_in_raises_after_hook_timeout_and_ends(
    name: str, with_a_peer_that_stays: dict[str, concurrent.futures.Future[list[Outcome]]]
) -> None:
    waiting, absent = with_a_peer_that_stays[name].result()
    assert waiting.traceback is not None and PLACE in waiting.traceback
    assert "HookTimeoutError: rank 0: " in waiting.traceback and "after 0.5 s" in waiting.traceback
    assert (waiting.stack, waiting.exit_code) == (None, 1), waiting.describe()
    assert "still under way at exit" in waiting.output
    assert absent.stack is None
