"""Workers that get the means of shards: row r of each one's bucket holds what rank r keeps of every parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.engine.engine import Engine
from commhooks.language.compressor import Compressor
from commhooks.scheduling.connection import Connection
from commhooks.scheduling.lockstep import LockstepConnection, lockstep_connections, run_in_turns
from tests.commhooks.workers import GivenBucket

PADDING = 3
"""Columns after the last shard."""
GAP = 2
"""Elements between two rows in memory."""


class BucketOfShards(GivenBucket):
    """Gradients in rows, as FSDP2 lays them out, with a gap between the rows."""

    def __init__(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], ranks: int, rank: int) -> None:
        self._chunks = [chunk_of(parameter, ranks) for parameter in parameters]
        width, dtype = sum(self._chunks) + PADDING, gradients[0].dtype
        memory = torch.zeros(ranks, width + GAP, dtype=dtype)[:, :width]
        for place, gradient in zip(memory.split([*self._chunks, PADDING], dim=1), gradients, strict=False):
            padded = torch.cat([gradient.reshape(-1), gradient.new_zeros(place.numel() - gradient.numel())])
            place.copy_(padded.view(place.shape))
        super().__init__(0, memory, list(parameters), is_last=True)
        self.of_rank = torch.full((width,), 7.0, dtype=dtype)
        self._own = [
            min(max(parameter.numel() - rank * chunk, 0), chunk)
            for parameter, chunk in zip(parameters, self._chunks, strict=True)
        ]

    def chunks(self) -> list[int]:
        return self._chunks

    def output(self) -> Tensor:
        return self.of_rank

    def means(self) -> list[Tensor]:
        """Return the mean of each parameter's shard, without padding."""
        places = self.of_rank[:-PADDING].split(self._chunks)
        return [place[:own] for place, own in zip(places, self._own, strict=True)]


def chunk_of(parameter: Tensor, ranks: int) -> int:
    """Return how many elements of a parameter a row holds: as many of its first dimension for each rank."""
    rows = len(parameter) if parameter.dim() else 1
    return -(-rows // ranks) * (parameter.numel() // max(rows, 1))


def shard_of(tensor: Tensor, ranks: int, rank: int) -> Tensor:
    """Return the elements of a tensor that a rank keeps."""
    chunk = chunk_of(tensor, ranks)
    return tensor.reshape(-1)[rank * chunk : (rank + 1) * chunk]


class Sharded:
    """One engine for each worker of a process, or this rank's of a process group."""

    def __init__(
        self, compressor: Compressor, parameters: Sequence[Tensor], connections: Sequence[Connection], **settings: Any
    ):
        self.parameters = list(parameters)
        self.connections = connections
        self.engines = [
            Engine(compressor, connection, may_join=False, is_sharded=True, **settings) for connection in connections
        ]
        for engine in self.engines:
            engine.bind([(f"layer{number}", parameter) for number, parameter in enumerate(parameters)])

    @classmethod
    def in_lockstep(cls, compressor: Compressor, ranks: int, parameters: Sequence[Tensor], **settings: Any) -> Sharded:
        return cls(compressor, parameters, lockstep_connections(ranks, settings.pop("policy", "fifo")), **settings)

    def step(self, gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Average gradients[rank][parameter] of these workers; return the mean of each one's shards."""
        ranks = self.engines[0].connection.world_size
        buckets = [
            BucketOfShards(self.parameters, own, ranks, engine.connection.rank)
            for engine, own in zip(self.engines, gradients, strict=True)
        ]
        futures = [engine.run(bucket) for engine, bucket in zip(self.engines, buckets, strict=True)]
        self.take_turns()
        for bucket, future in zip(buckets, futures, strict=True):
            assert future.wait().data_ptr() == bucket.of_rank.data_ptr()
        return [bucket.means() for bucket in buckets]

    def take_turns(self) -> None:
        """Run what was handed in, if the workers are in one process."""
        run_in_turns([connection for connection in self.connections if isinstance(connection, LockstepConnection)])

    def residuals(self) -> list[list[Tensor]]:
        """Return each worker's residuals, which are those of whole parameters."""
        return [
            [
                engine.state.of(parameter).tensors.get("residual", torch.zeros(0)).clone()
                for parameter in self.parameters
            ]
            for engine in self.engines
        ]


def whole_means(gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the mean of each parameter's gradient, in fp64."""
    return [torch.stack([one.double() for one in of_ranks]).mean(0) for of_ranks in zip(*gradients, strict=True)]


PLAIN = AllReduceMean()
