"""A store that does not answer holds nobody up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from commhooks.communicators import Collective, Communicator, ProcessGroupCommunicator, failure_store, private_group
from commhooks.communicators.failure_store import FailureStore, SilentStoreError, StoreThread
from commhooks.communicators.private_group import Address, PrivateGroup
from commhooks.communicators.sections import Section
from commhooks.compressors import AllReduceMean
from commhooks.errors import CollectiveError
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Context
from commhooks.scheduling import worker as scheduling_worker
from commhooks.scheduling.channels import ConnectionChannel
from commhooks.scheduling.task import BucketTask
from commhooks.scheduling.worker import Worker
from tests.waiting import until
from tests.world import run_world

pytestmark = pytest.mark.a_row  # they take seconds

TRUE_ANSWER_SECONDS = failure_store.ANSWER_SECONDS
ANSWER_SECONDS = 0.3


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_store, "ANSWER_SECONDS", ANSWER_SECONDS)
    monkeypatch.setattr(private_group, "OPENING_SECONDS", ANSWER_SECONDS)


class Switched(HashStore):
    """A store that answers, or not, or has lost its host."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()
        self.is_gone = False

    def check(self, keys: Sequence[str]) -> bool:
        return self._answered() and super().check(list(keys))

    def set(self, key: str, value: str) -> None:
        self._answered()
        super().set(key, value)

    def _answered(self) -> bool:
        self.answers.wait()
        if self.is_gone:
            raise dist.DistNetworkError("Connection reset by peer\nand many lines more")
        return True


@pytest.fixture
def store() -> Iterator[Switched]:
    switched = Switched()
    yield switched
    switched.answers.set()  # lets the thread end


def failures_of(store: Store, rank: int = 0, world_size: int = 2) -> FailureStore:
    return FailureStore(lambda: store, StoreThread(store), rank, world_size)


def eventually(failures: FailureStore) -> str | None:
    until(lambda: failures.failure() is not None)
    return failures.failure()


def test_a_failure_that_one_rank_posts_is_found_by_the_others_and_the_first_one_counts(store: Switched) -> None:
    one, other = failures_of(store, 0), failures_of(store, 1)
    assert one.failure() is None and one.failure_now() is None
    other.post("rank 1: it broke")
    one.post("rank 0: another matter")
    assert eventually(one) == one.failure_now() == "rank 1: it broke"


def test_ranks_that_look_answer_the_roll(store: Switched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_store, "ANSWER_SECONDS", TRUE_ANSWER_SECONDS)
    asking, looking = failures_of(store, 0, 3), failures_of(store, 1, 3)
    silent: list[int] = []
    asker = threading.Thread(target=lambda: silent.extend(asking.silent_ranks()))
    asker.start()
    while asker.is_alive():
        assert looking.failure() is None
    assert silent == [2]


def test_nobody_waits_for_a_store_that_is_silent_and_all_goes_on_when_it_answers_again(
    store: Switched, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = failures_of(store)
    store.answers.clear()
    with monkeypatch.context() as patch:
        patch.setattr(failure_store, "ANSWER_SECONDS", 1000.0)  # if this waited, it would be for longer than a test may
        for _ in range(3):
            assert failures.failure() is None
    with pytest.raises(SilentStoreError, match="the store, a Switched, does not answer: its host has stopped"):
        failures.failure_now()
    with pytest.raises(SilentStoreError, match="does not answer"):
        failures.silent_ranks()
    failures.post("rank 0: nobody will hear of it for now")
    store.answers.set()
    assert eventually(failures) == "rank 0: nobody will hear of it for now"


def test_a_store_that_is_gone_is_an_error_of_ours_that_names_it(store: Switched) -> None:
    failures = failures_of(store)
    store.is_gone = True
    with pytest.raises(CollectiveError, match=r"^the store, a Switched, does not answer: Connection reset by peer\.$"):
        eventually(failures)
    failures.post("rank 0: nobody hears of it")


def test_a_line_is_not_waited_for_longer_than_the_group_s_timeout_if_the_store_is_silent(store: Switched) -> None:
    store.answers.clear()
    address = Address(Section(store, 0), 0, 2, timedelta(seconds=0.3), StoreThread(store))
    with pytest.raises(SilentStoreError, match="does not answer"):
        PrivateGroup(address)


def test_ranks_that_come_late_are_not_taken_for_a_store_that_is_silent() -> None:
    """Gloo waits for one rank after the other, each time as long as the timeout: longer than a store may be silent."""
    store = HashStore()
    told: dict[int, str] = {}

    def come(rank: int) -> None:
        time.sleep(rank * 0.5)
        timeout = timedelta(seconds=10 if rank else 1)  # rank 0 is the first to give up
        try:
            PrivateGroup(address := Address(Section(store, rank), rank, 3, timeout, StoreThread(store)))
        except CollectiveError as error:
            told[rank] = str(error)
            address.failure_store().post(f"rank {rank}: {error}")

    ranks = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    own = "could not connect to every rank within 1 s. Missing: rank 2."
    assert told == {0: own, 1: f"another rank failed: rank 0: {own}"}


class NeverDone:
    """A communicator that starts collectives which never end."""

    has_started: threading.Event

    def __init__(self, inner: Communicator) -> None:
        self.rank, self.world_size = inner.rank, inner.world_size

    def start(self, collective: Collective) -> NeverDone:
        self.result = collective.tensor
        self.has_started.set()
        return self

    def wait(self, timeout_seconds: float | None = None) -> None:
        time.sleep(timeout_seconds or 0)
        raise TimeoutError


def test_stopping_waits_until_it_is_known_whether_work_is_left_also_if_the_store_is_silent(
    store: Switched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_store, "ANSWER_SECONDS", TRUE_ANSWER_SECONDS)
    for limit in ("PATIENCE_SECONDS", "JOIN_SECONDS"):  # less patience, and a join that expects as much less
        monkeypatch.setattr(scheduling_worker, limit, getattr(scheduling_worker, limit) - 2.5)
    monkeypatch.setattr(ProcessGroupCommunicator, "is_busy", lambda self: True)
    monkeypatch.setattr(NeverDone, "has_started", threading.Event(), raising=False)
    address = Address(Section(store, 0), 0, 1, timedelta(seconds=30), StoreThread(store))
    worker = Worker(address, NeverDone, None)
    channel = ConnectionChannel()
    worker.open(channel, "")
    channel.opened.result()
    bucket = BucketView(0, torch.zeros(4))
    exchange = AllReduceMean().compress(bucket, Context(0, 1, 0))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    worker.submit(channel, BucketTask(exchange, bucket, [future], 0, True, lambda: "p", 1))
    assert NeverDone.has_started.wait(60.0)
    store.answers.clear()
    worker.stop()
    assert worker.abandoned is not None  # so the end of the process knows of it
    with pytest.raises(CollectiveError, match="the process is ending"):
        future.wait()


class SlowToGo:
    """An object that takes its time when the interpreter lets go of it."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(1.0)


def end_during_a_call(rank: int) -> None:
    """Leave a call of the store under way that comes back when the interpreter is shut down already."""
    global _left
    served = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    StoreThread(served).submit(lambda: served.wait(["never"], timedelta(seconds=0.5)))
    _left = served, SlowToGo()


_left: object = None


def test_a_call_that_comes_back_while_the_process_ends_does_not_kill_it() -> None:
    run_world(end_during_a_call, 1, backend=None, check_exit=True)
