"""Elements and their indices, gathered from all ranks and added up."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from commhooks.compressors.sparse.indices import Coding, Indices, coding_of
from commhooks.language.bucket import Slot
from commhooks.language.compressor import Context
from commhooks.language.requests import AllGather, Asked, Judge


class Sent(NamedTuple):
    """What this rank sends of one parameter."""

    slot: Slot
    coding: Coding
    places: Tensor
    """[k], in the coding's order."""
    values: Tensor
    """[k]"""

    @classmethod
    def largest_of(cls, slot: Slot, memory: Tensor, indices: Indices, ratio: float) -> Sent:
        """Return a parameter's largest elements in `memory`."""
        coding = coding_of(indices, memory.numel(), ratio, memory.element_size())
        places = coding.choose(memory)
        return cls(slot, coding, places, memory[places])


class Received(NamedTuple):
    """What all ranks have sent of one parameter."""

    coding: Coding
    codes: Tensor
    values: Tensor
    """[W, k], divided by W."""

    def add_to(self, memory: Tensor) -> Tensor:
        """Add them to 1-D memory, in rank order, and return the memory."""
        for places, values in zip(self.coding.decode(self.codes), self.values, strict=True):
            memory.index_add_(0, places, values)
        return memory


def gather(sent: Sequence[Sent], context: Context) -> Generator[Asked, Any, tuple[Tensor, list[Received]]]:
    """Send to all ranks; return the verdict, and what was received of each parameter."""
    parts = [part for own in sent for part in (own.slot.part(own.values), own.slot.part(own.coding.encode(own.places)))]
    answers = yield AllGather(*parts, last=True)
    received = [
        Received(own.coding, codes, values / context.world_size)
        for own, values, codes in zip(sent, answers[::2], answers[1::2], strict=True)
    ]
    means = (of_all.add_to(own.slot.room.zero_()) for own, of_all in zip(sent, received, strict=True))
    return (yield Judge(*answers[::2], *sent[0].slot.tile.in_own_range(means))), received
