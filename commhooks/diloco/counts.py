"""DiLoCo's statistics."""

from __future__ import annotations

import dataclasses

from commhooks.scheduling.ledger import Statistics
from commhooks.units import bytes_in_words, counted


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCoStatistics:
    """Counts of one rank since construction; bytes are bytes sent per rank."""

    steps: int
    """Calls of `DiLoCo.step`, including those before a resume."""
    rounds: int
    """Exchanges of a fragment whose means were used or dropped."""
    dropped_rounds: int
    """Rounds dropped because the mean was not finite: the fragment went back to its outer copy."""
    cleared: int
    """The number of times that a parameter's state in the inner optimizer was not finite on this rank, and was
    cleared."""
    bytes_per_step: float
    """Bytes sent since construction, buffers included, divided by the steps since then."""
    peak_bytes_per_step: float
    """Bytes of the largest exchange, divided by the steps that it may take: the delay, or 1."""
    traffic: Statistics
    """The total over all exchanges, buffers included."""

    def __str__(self) -> str:
        """Return a short table."""
        return (
            f"{counted(self.steps, 'step')}, {counted(self.rounds, 'round')}, {self.dropped_rounds} of them dropped; "
            f"{bytes_in_words(self.bytes_per_step)} a step, {bytes_in_words(self.peak_bytes_per_step)} a step while an "
            f"exchange is under way\n{self.traffic}"
        )
