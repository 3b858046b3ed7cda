"""Comparison of gradients between ranks through their store, and never by a collective.

A rank that suspects its gradients cannot know whether the others suspect theirs. In a collective it would wait for
ranks that never come; a key in a store can be looked up again and again. Every rank compares itself with rank 0, so the
traffic grows with the number of ranks, not with its square.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp_core.collectives import store_of

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
    weights: dict[torch.device, Tensor] = {}
    prints: list[Print | None] = []
    for tensor in tensors:
        if tensor is None or not is_plain(tensor):
            prints.append(None)
            continue
        if tensor.device not in weights:
            places = torch.arange(BLOCK, dtype=torch.float64, device=tensor.device)
            weights[tensor.device] = torch.stack([(places * 12.9898).cos(), (places * 78.233).sin()])
        prints.append(_fingerprint(tensor.detach(), weights[tensor.device]))
    return prints


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
    names = [name for name in {**first, **mine} if mine.get(name, absent).suspect or first.get(name, absent).suspect]
    return [name for name in names if _drift_apart(mine.get(name, absent), first.get(name, absent))]


def _drift_apart(one: Gradient, other: Gradient) -> bool:
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


_numbers: dict[str, int] = {}


def numbered(group: dist.ProcessGroup, what: str) -> str:
    """Return a key for the next thing of a kind on a group: things of one kind are made in one order on all ranks."""
    name = "unnamed"
    with contextlib.suppress(RuntimeError):  # "name not set": it is written in Python
        name = str(group.group_name)
    key = f"{name}/{zlib.crc32(what.encode()):08x}"
    _numbers[key] = _numbers.get(key, 0) + 1
    return f"{key}/{_numbers[key]}"


def compare(
    store: Any,
    key: str,
    rank: int,
    size: int,
    mine: Mapping[str, Gradient],
    limit: float,
    warn_of_late: Callable[[float], None],
) -> list[str] | None:
    """Return None if gradients are the same on all ranks, else the names of those that differ from rank 0's.

    The list is empty on a rank that is like rank 0 if another one is not. ``warn_of_late`` is called, with the seconds
    that are left, if not all ranks have come after ``PATIENCE``. Raises AbsentError if they have not after ``limit``
    seconds, and UnansweredError if the store fails.
    """
    names: list[str] | None = in_thread(
        lambda stopped: _meet(store, key, rank, size, mine, stopped), limit, warn_of_late
    )
    return names


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


def in_thread(ask: Callable[[threading.Event], Any], limit: float, warn_of_late: Callable[[float], None]) -> Any:
    """Return ``ask(stopped)``, called in a thread of its own: a store whose host has stopped never answers.

    Raises AbsentError after ``limit`` seconds, and then sets ``stopped``; ``warn_of_late`` is called in between.
    """
    asked = _Asked(ask)
    asked.start()
    begun = time.monotonic()
    try:
        if not asked.done.wait(min(PATIENCE, limit)) and limit > PATIENCE:
            warn_of_late(limit - PATIENCE)
            asked.done.wait(limit - PATIENCE)
    finally:  # after Ctrl-C too
        asked.stopped.set()
    if not asked.done.is_set():
        raise AbsentError(f"after {time.monotonic() - begun:.0f} s not all ranks have come to the same step")
    if asked.error is not None:
        raise UnansweredError(f"the store does not answer: {_first_line(asked.error)}") from asked.error
    return asked.answer


class _Asked(threading.Thread):
    """A question to the store, asked in a daemon thread: an unanswered one must not keep the process alive."""

    def __init__(self, ask: Callable[[threading.Event], Any]) -> None:
        super().__init__(name="ddp_core guard", daemon=True)
        self._ask = ask
        self.stopped, self.done = threading.Event(), threading.Event()
        self.answer: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Ask, and keep the answer or the error."""
        try:
            self.answer = self._ask(self.stopped)
        except BaseException as error:  # whatever it is, another thread is waiting
            self.error = error
        finally:
            self.done.set()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
