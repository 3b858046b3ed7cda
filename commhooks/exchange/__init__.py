"""Exchanges: a feed's named tensors, averaged by engines, and the handle that a user has on them."""

from commhooks.exchange.exchanger import Averaging, Exchanger, TensorChannel
from commhooks.exchange.feed import Channel, Feed
from commhooks.exchange.handle import Handle, open_exchange
from commhooks.exchange.options import Options
from commhooks.scheduling.connection import ProcessGroupConnection
from commhooks.scheduling.ledger import ParameterTraffic, Statistics
from commhooks.state.memory import MemoryReport

__all__ = [
    "Averaging",
    "Channel",
    "Exchanger",
    "Feed",
    "Handle",
    "MemoryReport",
    "Options",
    "ParameterTraffic",
    "ProcessGroupConnection",
    "Statistics",
    "TensorChannel",
    "open_exchange",
]
