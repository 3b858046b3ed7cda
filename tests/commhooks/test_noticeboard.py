"""A store that does not answer holds nobody up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from commhooks import connection, noticeboard
from commhooks.connection import Address, open_connection
from commhooks.errors import CollectiveError
from commhooks.noticeboard import Noticeboard, SilentStoreError, StoreThread, address_of

ANSWER_SECONDS = 0.3


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noticeboard, "ANSWER_SECONDS", ANSWER_SECONDS)
    monkeypatch.setattr(connection, "OPENING_SECONDS", ANSWER_SECONDS)


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


def board_of(store: Store, rank: int = 0, world_size: int = 2) -> Noticeboard:
    return Noticeboard(store, StoreThread(store), rank, world_size)


def eventually(board: Noticeboard) -> str | None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (found := board.failure()) is None:
        time.sleep(0.01)
    return found


def test_a_failure_that_one_rank_posts_is_found_by_the_others_and_the_first_one_counts(store: Switched) -> None:
    one, other = board_of(store, 0), board_of(store, 1)
    assert one.failure() is None and one.failure_now() is None
    other.post("rank 1: it broke")
    one.post("rank 0: another matter")
    assert eventually(one) == one.failure_now() == "rank 1: it broke"


def test_ranks_that_look_answer_the_roll(store: Switched) -> None:
    asking, looking = board_of(store, 0, 3), board_of(store, 1, 3)
    silent: list[int] = []
    asker = threading.Thread(target=lambda: silent.extend(asking.silent_ranks()))
    asker.start()
    while asker.is_alive():
        assert looking.failure() is None
    assert silent == [2]


def test_nobody_waits_for_a_store_that_is_silent_and_all_goes_on_when_it_answers_again(store: Switched) -> None:
    board = board_of(store)
    store.answers.clear()
    begun = time.monotonic()
    for _ in range(3):
        assert board.failure() is None
    assert time.monotonic() - begun < ANSWER_SECONDS
    with pytest.raises(SilentStoreError, match="the store, a Switched, does not answer: its host has stopped"):
        board.failure_now()
    with pytest.raises(SilentStoreError, match="does not answer"):
        board.silent_ranks()
    board.post("rank 0: nobody will hear of it for now")
    assert time.monotonic() - begun < 10 * ANSWER_SECONDS
    store.answers.set()
    assert eventually(board) == "rank 0: nobody will hear of it for now"


def test_a_store_that_is_gone_is_an_error_of_ours_that_names_it(store: Switched) -> None:
    board = board_of(store)
    store.is_gone = True
    with pytest.raises(CollectiveError, match=r"^the store, a Switched, does not answer: Connection reset by peer\.$"):
        eventually(board)
    board.post("rank 0: nobody hears of it")


def test_a_line_is_not_waited_for_longer_than_the_group_s_timeout_if_the_store_is_silent(store: Switched) -> None:
    store.answers.clear()
    address = Address(store, 0, 2, timedelta(seconds=0.3), StoreThread(store))
    begun = time.monotonic()
    with pytest.raises(SilentStoreError, match="does not answer"):
        open_connection(address)
    assert time.monotonic() - begun < 5


def test_a_store_is_called_by_its_address() -> None:
    served = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    assert address_of(PrefixStore("a", PrefixStore("b", served))) == f"the store at 127.0.0.1:{served.port}"
    assert address_of(HashStore()) == "the store, a HashStore,"
