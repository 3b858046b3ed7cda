"""A rank that is late: away until the others have told what they wait to tell, not for a time that suits no machine."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from torch.distributed.distributed_c10d import _get_default_store

from tests.world.launcher import HANG_SECONDS


def tell(rank: int) -> None:
    """Let go whoever stays away until this rank has told."""
    _get_default_store().set(_key(rank), "")


def stay_away(until: Iterable[int] = (0,), seconds: float = HANG_SECONDS) -> None:
    """Stay in this call until each of these ranks has told."""
    _get_default_store().wait([_key(rank) for rank in until], timedelta(seconds=seconds))


def _key(rank: int) -> str:
    return f"rank {rank} has told"
