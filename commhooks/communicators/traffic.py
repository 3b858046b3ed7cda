"""What a communicator has sent: collectives, bytes, seconds of waiting."""

from __future__ import annotations

import dataclasses

from commhooks.communicators.collective import Collective


@dataclasses.dataclass
class KindTraffic:
    """Counts for the collectives of one kind."""

    collectives: int = 0
    payload_bytes: int = 0
    moved_bytes: int = 0


@dataclasses.dataclass
class Traffic:
    """Counts of what a communicator has sent, in total and for each kind of collective."""

    collectives: int = 0
    payload_elements: int = 0
    payload_bytes: int = 0
    moved_bytes: int = 0
    seconds_waiting: float = 0.0
    by_kind: dict[str, KindTraffic] = dataclasses.field(default_factory=dict)
    by_group: dict[str, KindTraffic] = dataclasses.field(default_factory=dict)
    """The traffic among some of the ranks: "inner" inside machines, "outer" between them."""

    def count(self, collective: Collective, world_size: int) -> None:
        """Add one collective."""
        payload = collective.payload_bytes
        moved = collective.ring_bytes(world_size)
        self.payload_elements += collective.payload_elements
        counted: list[Traffic | KindTraffic] = [self, self.by_kind.setdefault(collective.kind, KindTraffic())]
        if collective.group is not None:
            counted.append(self.by_group.setdefault(collective.group.kind, KindTraffic()))
        for counts in counted:
            counts.collectives += 1
            counts.payload_bytes += payload
            counts.moved_bytes += moved
