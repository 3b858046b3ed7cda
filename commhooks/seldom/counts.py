"""What DiLoCo counts."""

from __future__ import annotations

import dataclasses

from commhooks.scheduling.ledger import Statistics
from commhooks.units import bytes_in_words, counted


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCoStatistics:
    """Counts of one rank since construction; bytes are those sent per rank."""

    steps: int
    """Calls of `DiLoCo.step`, those before a resume included."""
    rounds: int
    """Exchanges of a fragment whose means were used or dropped."""
    dropped_rounds: int
    """Those of them whose mean was not finite: the fragment went back to its outer copy."""
    cleared: int
    """How often the inner optimizer's state of a parameter was not finite on this rank, and was cleared."""
    bytes_per_step: float
    """Bytes sent since construction, those of buffers included, over the steps since then."""
    peak_bytes_per_step: float
    """Bytes of the largest exchange, over the steps for which it may be under way: the delay, or 1."""
    traffic: Statistics
    """The counts of all exchanges together, those of buffers included."""

    def __str__(self) -> str:
        """Return a short table."""
        return (
            f"{counted(self.steps, 'step')}, {counted(self.rounds, 'round')}, {self.dropped_rounds} of them dropped; "
            f"{bytes_in_words(self.bytes_per_step)} a step, {bytes_in_words(self.peak_bytes_per_step)} a step while an "
            f"exchange is under way\n{self.traffic}"
        )
