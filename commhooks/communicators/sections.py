"""The section of a parent group's store in which the ranks of one private group meet, and its number.

A rank that has joined the parent later has made fewer private groups, so what a process counts is no name. Rank 0 takes
the number from the store, which has counted all groups of this label, and gives it to each rank that asks. An answer is
never meant for an earlier group, since it names the last question that it answers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

_NUMBER, _ASKED, _ANSWERED = "number", "asked", "answered"


class Section:
    """A numbered section of a store; all methods but `begin` run on the store's thread.

    `begun` is called with it when it begins, and returns an earlier section of the same base, if there was one.
    """

    def __init__(self, base: Store, rank: int, begun: Callable[[Section], Section | None] = lambda _: None) -> None:
        self.base = base
        """The part of the parent's store in which the number is agreed on."""
        self.store: Store | None = None
        """The section; None until its number is known."""
        self.is_over = False
        """True once the ranks have met, or failed to."""
        self._rank = rank
        self._begun: Callable[[Section], Section | None] | None = begun
        self._before: Section | None = None
        self._question = 0
        self._answered = -1
        self._number = ""

    def begin(self) -> None:
        """Let the ranks meet from now on, after those of earlier sections; a second call does nothing."""
        if self._begun is not None:
            self._before, self._begun = self._begun(self), None

    def look(self) -> Store | None:
        """Ask for the number, or give it to those that ask; return the section once its number is known."""
        if self._before is not None and not self._before.is_over:
            return None
        self._before = None
        if self._rank == 0:
            self._answer()
        elif self.store is None:
            self._ask()
        return self.store

    def _answer(self) -> None:
        if self.store is None:
            self._enter(str(self.base.add(_NUMBER, 1)))
        asked = int(self.base.get(_ASKED)) if self.base.check([_ASKED]) else 0
        if asked != self._answered:
            self.base.set(_ANSWERED, f"{asked} {self._number}")
            self._answered = asked

    def _ask(self) -> None:
        self._question = self._question or self.base.add(_ASKED, 1)
        if self.base.check([_ANSWERED]):
            answered, number = self.base.get(_ANSWERED).decode().split()
            if int(answered) >= self._question:
                self._enter(number)

    def _enter(self, number: str) -> None:
        self._number, self.store = number, PrefixStore(number, self.base)


class Sections:
    """The sections that this process has made under one parent group.

    Ranks make them in one order, and may begin them in another: models' first buckets come in any order.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, set[int]] = {}
        self._begun: dict[tuple[str, int], Section] = {}

    def make(self, store: Store, label: str, rank: int) -> Section:
        """Return a new section, whose base is named by its place among those of this label that have not begun yet.

        So a rank that has just joined finds the base of the others, which have begun all that they made.
        """
        waiting = self._waiting.setdefault(label, set())
        place = max(waiting, default=-1) + 1
        waiting.add(place)
        base = PrefixStore(f"{label}/{place}", store)
        return Section(base, rank, functools.partial(self._begin, label, place))

    def _begin(self, label: str, place: int, section: Section) -> Section | None:
        self._waiting[label].discard(place)
        before = self._begun.get((label, place))
        self._begun[label, place] = section
        return before


sections_under: weakref.WeakKeyDictionary[dist.ProcessGroup, Sections] = weakref.WeakKeyDictionary()
"""The sections of each parent group."""
