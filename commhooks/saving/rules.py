"""The allowed differences between a saved state and the run that loads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypedDict

from commhooks.errors import SettingsError


class LoadOptions(TypedDict, total=False):
    """The fields of `LoadRules`, as keyword arguments of functions that load."""

    world_size: str
    settings: str
    missing: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadRules:
    """The allowed differences between a checkpoint and the run that loads it."""

    world_size: str = "refuse"
    """The rule for a different world size: "refuse"; "spread", which keeps the sum of the residuals over the ranks,
    appropriate if the learning rate is scaled with their number; "spread-mean", which keeps their mean, appropriate if
    it is not; "keep", with which each rank continues with the state of the rank of its number, a rank that has joined
    starts from zero, and a warning gives the norm of the residuals lost with ranks that have left; or "reset", which
    starts residuals from zero (also if this rank's are not in the checkpoint). Per-rank state of served blocks is
    redistributed; under "spread" it is multiplied by the old number of ranks over the new, and under "keep" it starts
    from zero."""
    settings: str = "refuse"
    """The rule for a compressor with different settings: "refuse", or "change"."""
    missing: str = "refuse"
    """The rule for parameters that only the checkpoint or only the model has, and for local state that the compressor
    does not keep: "refuse", or "reset", which initialises the model's and drops the rest."""

    def __post_init__(self) -> None:
        allowed = {
            "world_size": ("refuse", "spread", "spread-mean", "keep", "reset"),
            "settings": ("refuse", "change"),
            "missing": ("refuse", "reset"),
        }
        for name, values in allowed.items():
            value = getattr(self, name)
            if value not in values:
                raise SettingsError(f"{name}={value!r}: {name} must be one of {', '.join(values)}.")

    @property
    def spreads(self) -> bool:
        """True if, with a different world size, each rank needs the residuals of all ranks and must read them."""
        return self.world_size in ("spread", "spread-mean")

    def ranks_to_read(self, rank: int, saved_size: int, world_size: int) -> Sequence[int]:
        """Return the ranks whose own state one of `world_size` ranks reads from a checkpoint of `saved_size` ranks.

        With "keep", rank 0 also reads the state of ranks that have left, to report the loss.
        """
        if saved_size == world_size:
            return [rank]
        if self.world_size == "keep":
            left = range(world_size, saved_size) if rank == 0 else []
            return [*range(rank, min(rank + 1, saved_size)), *left]
        return range(saved_size if self.spreads else 0)
