"""What a communicator has carried: collectives, bytes, seconds of waiting."""

from __future__ import annotations

import dataclasses

from commhooks.communicators.collective import Collective, ring_bytes


@dataclasses.dataclass
class KindTraffic:
    """Counts for the collectives of one kind."""

    collectives: int = 0
    payload_bytes: int = 0
    moved_bytes: int = 0


@dataclasses.dataclass
class Traffic:
    """Counts for what a communicator carried, in total and for each kind of collective."""

    collectives: int = 0
    payload_elements: int = 0
    payload_bytes: int = 0
    moved_bytes: int = 0
    seconds_waiting: float = 0.0
    by_kind: dict[str, KindTraffic] = dataclasses.field(default_factory=dict)

    def count(self, collective: Collective, world_size: int) -> None:
        """Add one collective."""
        payload = collective.payload_bytes
        moved = ring_bytes(collective.kind, payload, world_size, is_sparse=collective.tensor.is_sparse)
        self.payload_elements += collective.payload_elements
        for counts in (self, self.by_kind.setdefault(collective.kind, KindTraffic())):
            counts.collectives += 1
            counts.payload_bytes += payload
            counts.moved_bytes += moved
