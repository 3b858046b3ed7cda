"""Proof: comparison of gradients between ranks through their store, and never by a collective.

A rank that suspects its gradients cannot know whether the others suspect theirs. In a collective it would wait for
ranks that never come; a key in a store can be looked up again and again. Every rank compares itself with rank 0, so the
traffic grows with the number of ranks, not with its square.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp_core.collectives import store_of
from ddp_core.guard.intent import warn
from ddp_core.hooks import timeout_of

BLOCK = 65536
"""Elements that are fingerprinted at a time, in fp64: the memory in use does not grow with the gradient."""
TOLERANCE = 1e-5
"""Of the norm. Gradients that are the same on purpose may differ by rounding, if processors differ."""
PATIENCE = 10.0
"""Seconds after which ranks that have not answered are warned of."""

Print = list[float]
"""A tensor's fingerprint: its norm, and its products with two fixed vectors."""


class Gradient(NamedTuple):
    """What a rank tells of one parameter before a step."""

    print: Print | None  # None: no gradient, or one that has no fingerprint
    held: bool  # the optimizer that is about to step has the parameter
    suspect: bool  # no reduction is known to have averaged the gradient


class UnansweredError(RuntimeError):
    """The store failed, or does not answer; the text says how."""


class AbsentError(UnansweredError):
    """The limit has passed, and not all ranks have come."""


def is_plain(tensor: Tensor) -> bool:
    """Return True unless the tensor is of a subclass, whose elements may be a shard, or codes."""
    return type(tensor) in (Tensor, Parameter)


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor | None]) -> list[Print | None]:
    """Return three numbers for each tensor, equal for equal tensors; None for None and for subclasses of Tensor."""
    weights = functools.cache(_weights)  # made once for each device, and dropped with the last tensor
    return [_fingerprint(t.detach(), weights(t.device)) if t is not None and is_plain(t) else None for t in tensors]


def _weights(device: torch.device) -> Tensor:
    places = torch.arange(BLOCK, dtype=torch.float64, device=device)
    return torch.stack([(places * 12.9898).cos(), (places * 78.233).sin()])


def _fingerprint(tensor: Tensor, weights: Tensor) -> Print:
    flat = tensor.coalesce().to_dense() if tensor.is_sparse else tensor
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
    total = torch.zeros(3, dtype=torch.float64, device=flat.device)
    for number, block in enumerate(flat.split(BLOCK)):
        values = block.double()
        total[0] += values.square().sum()
        total[1:] += weights[:, : len(values)] @ values * (0.75 + 0.25 * math.cos(number))  # blocks in another order
    squares, *products = total.tolist()
    return [math.sqrt(squares), *products]


def is_close(one: Print, other: Print) -> bool:
    """Return True if two fingerprints differ by no more than rounding; those that are not finite are all alike."""
    if not (math.isfinite(one[0]) and math.isfinite(other[0])):
        return math.isfinite(one[0]) == math.isfinite(other[0])
    return all(abs(a - b) <= TOLERANCE * max(one[0], other[0]) for a, b in zip(one, other, strict=True))


def differing(mine: Mapping[str, Gradient], first: Mapping[str, Gradient]) -> list[str]:
    """Return the parameters whose replicas drift apart if this rank and the first one take the step."""
    absent = Gradient(None, held=False, suspect=False)
    pairs = {name: (mine.get(name, absent), first.get(name, absent)) for name in {**first, **mine}}
    return [name for name, (one, other) in pairs.items() if _drift_apart(one, other)]


def _drift_apart(one: Gradient, other: Gradient) -> bool:
    if not (one.suspect or other.suspect):
        return False
    if one.print is not None and other.print is not None:
        return not is_close(one.print, other.print)
    # Only one of them steps on it. If the other's optimizer does not even have it, ranks share out their steps.
    return (one.print is not None or other.print is not None) and one.held and other.held


def shared_store(group: dist.ProcessGroup) -> Any:
    """Return the store of a group's ranks, or None."""
    try:
        return store_of(group)
    except RuntimeError:  # a group that is written in Python, or was made without one
        return None


_numbers: Counter[str] = Counter()


def numbered(group: dist.ProcessGroup, what: str) -> str:
    """Return a key for the next thing of a kind on a group: things of one kind are made in one order on all ranks."""
    name = "unnamed"
    with contextlib.suppress(RuntimeError):  # "name not set": it is written in Python
        name = str(group.group_name)
    key = f"{name}/{zlib.crc32(what.encode()):08x}"
    _numbers[key] += 1
    return f"{key}/{_numbers[key]}"


class Peers:
    """The ranks with which a wrapper averages; ``what`` tells its model from others, in the same words on all ranks.

    ``gone`` is called once the wrapper is gone.
    """

    def __init__(self, wrapper: Any, what: str, gone: Callable[[Any], None]) -> None:
        self.limit: float | None = None  # seconds to wait for ranks that are late; None: the process group's timeout
        self.wrapper: Callable[[], Any] = weakref.ref(wrapper, gone)
        self._was_ready = dist.is_available() and dist.is_initialized()
        self._key = numbered(wrapper.process_group, what)
        self._comparisons = 0

    def are_there(self) -> bool:
        """Return False once the process group is destroyed: its ranks train on by themselves."""
        return not self._was_ready or dist.is_initialized()  # or it is a group that torch.distributed does not know

    def who(self) -> str:
        """Return this process's rank in words, and its rank in the group if that is another."""
        own = self.wrapper().process_group.rank()
        rank = dist.get_rank() if self._was_ready and dist.is_initialized() else own
        return f"rank {rank}" if rank == own else f"rank {rank} (rank {own} of the wrapper's process group)"

    def compare(self, named: Mapping[str, Tensor], suspect: set[int], held: set[int], text: str) -> list[str] | None:
        """Return None if gradients are the same on all ranks, else the names of those that differ from rank 0's.

        The list is empty on a rank that is like rank 0 if another one is not. ``suspect`` and ``held`` are ids;
        ``text`` is said if not all ranks have come after ``PATIENCE``. Raises AbsentError if they have not when the
        limit has passed, and UnansweredError if nothing can be compared.
        """
        self._comparisons += 1
        group = self.wrapper().process_group
        store = shared_store(group)
        if store is None:
            raise UnansweredError("the process group has no store in which ranks could compare gradients")
        prints = fingerprints([parameter.grad for parameter in named.values()])
        mine = {
            name: Gradient(one, held=id(parameter) in held, suspect=id(parameter) in suspect)
            for (name, parameter), one in zip(named.items(), prints, strict=True)
        }
        if not any(one.print and one.suspect for one in mine.values()):
            raise UnansweredError("gradients are of a subclass of Tensor")
        key = f"ddp_core/guard/{self._key}/{self._comparisons}"
        hook = getattr(self.wrapper().reducer, "hook", None)  # ddp_core's
        limits = (self.limit, getattr(hook, "timeout", None), timeout_of(group, next(iter(named.values())).device))
        limit = next(limit for limit in limits if limit is not None)
        meet = functools.partial(_meet, store, key, group.rank(), group.size(), mine)
        names: list[str] | None = in_thread(meet, limit, functools.partial(self._warn_of_late, text))
        return names

    def _warn_of_late(self, text: str, seconds_left: float) -> None:
        who = self.who()
        warn(
            f"{who[:1].upper()}{who[1:]} waits for the other ranks, to compare gradients with theirs: no reduction has "
            f"averaged its own. It raises if some rank does not come within another {seconds_left:.0f} s; a rank may "
            f"be late, or its gradients were averaged. What this rank would say: {text}"
        )


def _meet(
    store: Any, key: str, rank: int, size: int, mine: Mapping[str, Gradient], stopped: threading.Event
) -> list[str] | None:
    if rank == 0:
        store.set(f"{key}/first", json.dumps(mine))
    first = {name: Gradient(*told) for name, told in json.loads(_awaited(store, f"{key}/first", stopped)).items()}
    names = differing(mine, first)
    if names:
        store.add(f"{key}/different", 1)
    if store.add(f"{key}/arrived", 1) == size:
        store.set(f"{key}/verdict", str(store.add(f"{key}/different", 0)))
    return names if int(_awaited(store, f"{key}/verdict", stopped)) else None


def _awaited(store: Any, key: str, stopped: threading.Event) -> Any:
    """Return a key's value once it is there. Looks, and never waits: a wait would block the store's other users."""
    pause = 0.001
    while not store.check([key]):
        if stopped.wait(pause):
            raise UnansweredError("given up")
        pause = min(2 * pause, 0.1)
    return store.get(key)


def in_thread(
    ask: Callable[[threading.Event], Any], limit: float, warn_of_late: Callable[[float], None] | None = None
) -> Any:
    """Return ``ask(stopped)``, called in a thread of its own: a store whose host has stopped never answers.

    Raises AbsentError after ``limit`` seconds, and then sets ``stopped``; ``warn_of_late`` is called in between.
    """
    answer, stopped = Future[Any](), threading.Event()
    # A daemon, unlike the threads of an executor: an unanswered question must not keep the process alive.
    threading.Thread(target=_answer, args=(answer, ask, stopped), name="ddp_core guard", daemon=True).start()
    begun = time.monotonic()
    patience = limit if warn_of_late is None else min(PATIENCE, limit)
    try:
        wait([answer], patience)
        if not answer.done() and warn_of_late is not None and patience < limit:
            warn_of_late(limit - patience)
            wait([answer], limit - patience)
    finally:  # after Ctrl-C too
        stopped.set()
    if not answer.done():
        raise AbsentError(f"after {time.monotonic() - begun:.0f} s not all ranks have come to the same step")
    if (error := answer.exception()) is not None:
        line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UnansweredError(f"the store does not answer: {line}") from error
    return answer.result()


def _answer(answer: Future[Any], ask: Callable[[threading.Event], Any], stopped: threading.Event) -> None:
    try:
        answer.set_result(ask(stopped))
    except BaseException as error:  # whatever it is, another thread is waiting
        answer.set_exception(error)
