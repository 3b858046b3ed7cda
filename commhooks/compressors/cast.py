"""Cast: the mean, summed on the wire in a narrower dtype.

Source: PyTorch's fp16_compress_hook and bf16_compress_hook.
Idea: half the bytes for half the digits. The division by the number of ranks comes first, in the gradient's own dtype,
so the narrow dtype must hold only each rank's contribution to the mean, not the sum of the gradients.
Bytes on the wire: 2 per element. Weakness: it saves at most half of the dense bytes. The cast's rounding error is lost,
unless `ErrorFeedback` keeps it; in fp16 a contribution of at most 2**-25 = 3.0e-8 becomes 0 (64 ranks: a gradient of
1.9e-6).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.errors import SettingsError
from commhooks.language import AllReduce, AllToAll, BucketView, Compressor, Context, Exchange, Judge, Loss, Part, Sends
from commhooks.language.requests import Flags
from commhooks.tensors import mean_in_order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cast(Compressor):
    """A compressor that averages the gradient with `dtype` on the wire: one collective per bucket."""

    dtype: torch.dtype
    """Narrower: smaller messages, fewer digits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wire_dtype("Cast", self.dtype)

    def takes(self, gradient: Tensor) -> bool:
        """Return whether the gradient is dense; complex ones are sent as pairs of real numbers."""
        return not gradient.is_sparse

    sends = Sends.FIXED  # the sum is sent in `dtype`

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Return the square of the dtype's unit roundoff, if the cast makes the gradient smaller and therefore rounds.

        An element that becomes 0 loses more, but is small.
        """
        return Loss(float((torch.finfo(self.dtype).eps / 2) ** 2)) if self._narrows(parameter) else None

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Request the mean of the bucket's memory, cast on the wire."""
        if not self._narrows(bucket.memory):
            yield from AllReduceMean().compress(bucket, context)
            return
        # Tiles of a narrow bucket share one scratch buffer, so several tiles are copied out of it.
        formed = [tile.form() if len(bucket.tiles) == 1 else tile.form().clone() for tile in bucket.tiles]
        # The rounding error is computed before sending: the answer overwrites the memory.
        unsent = list(formed)
        for number, (tile, M) in enumerate(zip(bucket.tiles, formed, strict=True)):
            if tile.keeps:
                share = M / context.world_size
                unsent[number] = share.sub_(share.to(self.dtype)).mul_(context.world_size)
        parts = [tile.part(M, self.dtype) for tile, M in zip(bucket.tiles, formed, strict=True)]
        means = yield AllReduce(*parts, average=True, last=True)
        for tile, mean in zip(bucket.tiles, means, strict=True):
            tile.write(mean)
        if any(tile.keeps for tile in bucket.tiles):
            finite = yield Judge(*(tile.mean for tile in bucket.tiles))
            for tile, left in zip(bucket.tiles, unsent, strict=True):
                tile.keep(left, finite)

    def scatter(self, bucket: BucketView, context: Context) -> Exchange:
        """Exchange the rows, cast; each rank adds up its own, in rank order and in the gradient's own dtype.

        So each rank's tensor is rounded once, while a sum in the narrow dtype rounds at every addition.
        """
        if not self._narrows(bucket.memory):
            yield from AllReduceMean().scatter(bucket, context)
            return
        tiles = [tile for slot in bucket.slots for tile in slot.shards]
        for tile in tiles:
            tile.form()  # in place, since the memory is wide
        sent = [memory.to(self.dtype) for memory, _ in bucket.rows]
        flags = [Flags.of(sent, context.world_size)] if bucket.keeps else []
        received = yield AllToAll(*map(Part, sent), *flags, last=True)
        if flags:
            finite = yield Judge(received.pop())
            for (memory, _), own in zip(bucket.rows, sent, strict=True):
                memory.sub_(own)
            for tile in tiles:
                tile.keep(tile.gradient, finite)
        for (memory, place), of_ranks in zip(bucket.rows, received, strict=True):
            first, *others = of_ranks[:, : len(place)]
            place.copy_(mean_in_order(first.to(memory.dtype), others, context.world_size))

    def _narrows(self, memory: Tensor) -> bool:
        """Return whether casting a gradient makes it smaller; fp16 for bf16 would not, and could overflow."""
        return memory.element_size() // (2 if memory.is_complex() else 1) > self.dtype.itemsize


def check_wire_dtype(owner: str, dtype: torch.dtype) -> None:
    """Raise `SettingsError` for a dtype in which gradients cannot be summed."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise SettingsError(
            f"{owner}(dtype={dtype}): dtype must be a floating-point torch.dtype of at least 16 bits, "
            "such as torch.float16."
        )
