"""A communicator that starts nothing, and answers every collective at once with what this rank put in.

What a hook costs then remains, and what its transfers cost is gone: answers have their real sizes and lie in new
memory, as those of a process group do, but every rank counts as having sent the same as this one.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from commhooks.communicators.collective import Collective


class PretendingCommunicator:
    """One of `world_size` ranks, of which no other exists.

    The answer of an all-reduce is the tensor itself, as if the others had sent zeros, so that means stay finite.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def start(self, collective: Collective) -> Pretended:
        """Answer a collective."""
        return Pretended(_answer(collective, self.rank, self.world_size))


class Pretended:
    """A collective that is answered; `waited` is called when its answer is waited for."""

    def __init__(self, result: Tensor, waited: Callable[[], None] | None = None) -> None:
        self.result = result
        self._waited = waited

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return: the answer is there."""
        if self._waited is not None:
            self._waited()


def _answer(collective: Collective, rank: int, world_size: int) -> Tensor:
    tensor = collective.tensor
    if collective.kind == "all-reduce":
        return tensor
    room = collective.room_for_answer(world_size)
    if collective.kind == "reduce-scatter":
        place = rank if collective.group is None else 0
        return room.copy_(tensor[place])
    return room.copy_(tensor.expand_as(room))
