"""A replacement for FSDP2's reduce-scatter: its input is a bucket of shards, and its output this rank's shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from commhooks.devices import Mark, mark_of
from commhooks.engine.engine import Engine
from commhooks.engine.rows import RowsBucket
from commhooks.sharded.fsdp import Unit, changed_since

_CHANGED = changed_since("attach_sharded")


class Memory:
    """Memory that the reduce-scatters of a model's modules use in turn, as large as the largest of them needs."""

    def __init__(self) -> None:
        self._of_kind: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._read: Mark | None = None

    def read(self, device: torch.device) -> None:
        """Record that what was taken is no longer needed after the work queued so far in the current stream."""
        self._read = mark_of(device)

    def take(self, what: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory, 1-D, which the next call for the same purpose returns again.

        The stream waits until the last module's is no longer needed: modules of different FSDP roots have streams of
        their own.
        """
        if self._read is not None:
            self._read.wait()
        found = self._of_kind.get((what, dtype, device))
        if found is None or found.numel() < elements:
            found = self._of_kind[what, dtype, device] = torch.empty(elements, dtype=dtype, device=device)
        return found[:elements]

    def bytes(self) -> int:
        """Return the number of bytes held."""
        return sum(memory.untyped_storage().nbytes() for memory in self._of_kind.values())


class CompressedReduceScatter:
    """The reduce-scatter that FSDP2 calls for one module, in each backward pass that synchronises."""

    def __init__(self, unit: Unit, engine: Engine, memory: Memory, others: Sequence[Engine] = ()) -> None:
        """Reduce with an engine; if that fails, `others`, on other connections, are told."""
        self._unit, self._engine, self._memory, self._others = unit, engine, memory, others
        self._like = [*engine.state.named().values()]
        self._chunks = [parameter.chunk for parameter in unit.parameters()]
        self._trained = unit.trained()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for an input, or new memory for an output, which becomes the gradient."""
        ranks, width = self._engine.connection.world_size, sum(self._chunks)
        if ranks > 1 and tuple(size) == (ranks * width,):
            return self._memory.take("input", ranks * width, dtype, device)
        return torch.empty(*size, dtype=dtype, device=device)

    @_disable_dynamo  # a compiled training step would trace the engine
    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write the mean of this rank's row, or the sum that `op` asks for, in the order of the current stream."""
        try:
            self._reduce(output_tensor, input_tensor, op)
        except Exception as error:  # other ranks may wait for this one on the other connections only
            for other in self._others:
                other.stop(str(error))
            raise

    def _reduce(self, output_tensor: Tensor, input_tensor: Tensor, op: Any) -> None:
        ranks, width = self._engine.connection.world_size, sum(self._chunks)
        if input_tensor.numel() != ranks * width:
            self._engine.fail(
                f"the gradients have {input_tensor.numel():,} elements in place of {ranks * width:,}: {_CHANGED}"
            )
        if self._unit.trained() != self._trained:  # others of as many elements
            self._engine.fail(_CHANGED)
        mean = self._memory.take("output", width, input_tensor.dtype, input_tensor.device)
        self._engine.run(RowsBucket(input_tensor.view(ranks, width), mean, self._like, self._chunks)).wait()
        output_tensor.copy_(mean)
        self._memory.read(input_tensor.device)
        if op != dist.ReduceOp.AVG:
            output_tensor.mul_(ranks)
            if op != dist.ReduceOp.SUM:  # of terms that FSDP2 wants divided by its factor; other sums it divides itself
                output_tensor.div_(self._unit.divide_factor or ranks)
