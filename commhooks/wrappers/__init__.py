"""Wrappers: each takes a compressor and is a compressor itself."""

from commhooks.wrappers.error_feedback import ErrorFeedback, WithoutFeedback
from commhooks.wrappers.hierarchical import Hierarchical
from commhooks.wrappers.per_parameter import Match, PerParameter
from commhooks.wrappers.start_after import StartAfter, schedule
from commhooks.wrappers.wire_dtype import WireDtype

__all__ = [
    "ErrorFeedback",
    "Hierarchical",
    "Match",
    "PerParameter",
    "StartAfter",
    "WireDtype",
    "WithoutFeedback",
    "schedule",
]
