"""The section of a parent group's store in which the ranks of one private group meet: its place, and its number.

The place is the number of sections begun before under the same label: ranks begin them in one order. Places are
counted anew once the parent has other ranks, since a rank that has joined has begun none. A section in which the ranks
failed to meet gives its place back, unless a later one has begun.

At one place, several sections may follow each other, also those of an earlier group of the same name. Rank 0 takes a
number from the store, which has counted them, and gives it to each rank that asks. An answer is never meant for an
earlier section, since it names the last question that it answers.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

_NUMBER, _ASKED, _ANSWERED = "number", "asked", "answered"


class Section:
    """A numbered section of a store, in which the ranks meet once those of the last one at its place have.

    All methods but `release` run on the store's thread.
    """

    def __init__(self, base: Store, rank: int, place: SectionPlace | None = None) -> None:
        self.base = base
        """The part of the parent's store in which the number is agreed on."""
        self.store: Store | None = None
        """The section; None until its number is known."""
        self.has_met = False
        """True once the ranks have met."""
        self.is_over = False
        """True once the ranks have met, or failed to."""
        self._rank = rank
        self._place = place
        self._before = place.begin(self) if place is not None else None
        self._question = 0
        self._answered = -1
        self._number = ""

    def release(self) -> None:
        """Make no more use of the place, and give it back if the ranks have failed to meet in this section."""
        if self._place is not None:
            self._place.release(is_used=self.has_met or not self.is_over)

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


@dataclasses.dataclass(eq=False)
class SectionPlaces:
    """The places under one label, as long as the parent has the same ranks."""

    members: tuple[int, ...]
    """What is known of these ranks."""
    sections: weakref.WeakValueDictionary[int, Section]
    """The last section at each place, also of other ranks."""
    begun: int = 0
    given_back: set[int] = dataclasses.field(default_factory=set)
    held: set[int] = dataclasses.field(default_factory=set)
    """The places that are not released yet."""

    def next(self) -> SectionPlace:
        """Return the next place."""
        self.held.add(self.begun)
        self.begun += 1
        return SectionPlace(self, self.begun - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class SectionPlace:
    """One section's place under its label."""

    places: SectionPlaces
    number: int

    def begin(self, section: Section) -> Section | None:
        """Note that a section begins, and return the last one at this place, if it still exists."""
        before = self.places.sections.get(self.number)
        self.places.sections[self.number] = section
        return before

    def release(self, *, is_used: bool) -> None:
        """Release the place, and give it back if it is not used; a second call does nothing.

        Nothing happens in a garbage collection, since other ranks collect the same garbage at another time.
        """
        places = self.places
        if self.number not in places.held or threading.get_ident() in _collecting:
            return
        places.held.remove(self.number)
        if not is_used:
            places.given_back.add(self.number)
        while places.begun - 1 in places.given_back:  # not below a later one: the other ranks have counted that too
            places.begun -= 1
            places.given_back.remove(places.begun)


class Sections:
    """The sections that this process has begun under one parent group."""

    def __init__(self) -> None:
        self._places: dict[str, SectionPlaces] = {}

    def begin(self, store: Store, label: str, members: tuple[int, ...], *, is_elastic: bool = False) -> Section:
        """Return a new section, at the next place under this label.

        `members` begin with this rank's number, and say what else is known of the parent's ranks. If it `is_elastic`,
        they may change unnoticed; then places are also counted anew once all are released, as everybody does then.
        """
        places = self._places.get(label)
        if places is None:
            places = self._places[label] = SectionPlaces(members, weakref.WeakValueDictionary())
        elif places.members != members or (is_elastic and not places.held):
            # New ones, so that releasing an earlier section later changes nothing.
            places = self._places[label] = SectionPlaces(members, places.sections)
        place = places.next()
        return Section(PrefixStore(f"{label}/{place.number}", store), members[0], place)


sections_under: weakref.WeakKeyDictionary[dist.ProcessGroup, Sections] = weakref.WeakKeyDictionary()
"""The sections of each parent group."""

_collecting: set[int] = set()
"""The threads that collect garbage at the moment."""


def _note_collection(phase: str, _info: dict[str, Any]) -> None:
    (_collecting.add if phase == "start" else _collecting.discard)(threading.get_ident())


gc.callbacks.append(_note_collection)
