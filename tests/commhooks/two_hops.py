"""A compressor with state of its own kind: what a rank serves for all leaves an error on that rank alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from commhooks import AllGather, AllToAll, BucketView, Compressor, Context, LocalEntry, Result
from commhooks.language.compressor import Exchange, residual_of

SERVER_ERROR = "server error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoHops(Compressor):
    """Send signs and one scale for each share; rank r adds up share r, and sends the sum's signs on.

    Source: Tang et al., "1-bit Adam", ICML 2021, section 5. Takes buckets of one parameter.
    """

    entries: Mapping[str, LocalEntry] = dataclasses.field(
        default_factory=lambda: {SERVER_ERROR: LocalEntry(kind="share")}, hash=False
    )

    def local_entries(self) -> Mapping[str, LocalEntry]:
        return self.entries

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        slot, size, W = bucket.slots[0], bucket.memory.numel(), context.world_size
        width = -(-size // W)
        residual, error = residual_of(slot), slot.state.kept(SERVER_ERROR, bucket.memory[:1].expand(width))
        M = bucket.memory.to(residual.dtype) + residual
        sent = _signs(torch.cat([M, M.new_zeros(W * width - size)]).view(W, width))
        received = yield AllToAll(sent)
        served = received.mean(0) + error
        answer = _signs(served.view(1, width))
        shares = yield AllGather(answer[0], last=True)
        finite = context.all_finite(shares)
        context.commit(residual, M - sent.view(-1)[:size], finite)
        context.commit(error, served - answer[0], finite)
        bucket.memory.copy_(shares.reshape(-1)[:size])
        return Result(bucket.memory)


def _signs(rows: Tensor) -> Tensor:
    """Return each row's signs, times the mean of its magnitudes."""
    return torch.where(rows < 0, -1.0, 1.0).to(rows.dtype) * rows.abs().mean(1, keepdim=True)
