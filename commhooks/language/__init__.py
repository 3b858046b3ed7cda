"""The interface for authors of compressors: compressors, buckets, requests, entries of state, random numbers.

docs/guide/compressors.md introduces it with examples.
"""

from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import FEEDBACK_LAWS, Compressor, Context, Exchange
from commhooks.language.entries import Entry
from commhooks.language.loss import Loss, Sends
from commhooks.language.place import Place
from commhooks.language.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Group,
    Judge,
    Layout,
    Part,
    ReduceScatter,
    Request,
)
from commhooks.language.settings import setting
from commhooks.language.tile import Tile

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "BucketView",
    "Compressor",
    "Context",
    "Entry",
    "Exchange",
    "FEEDBACK_LAWS",
    "Group",
    "Judge",
    "Layout",
    "Loss",
    "Part",
    "Place",
    "ReduceScatter",
    "Request",
    "Sends",
    "Slot",
    "Tile",
    "setting",
]
