"""Elements and their indices, exchanged so that each rank gets the elements of its own shards.

Legend: W ranks; K entries and C bytes of codes in a row, the most that any rank has.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from commhooks.compressors.sparse.gathering import Plan, Received, Sent, encoded, received_of
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Context
from commhooks.language.requests import AllToAll, Asked, Judge, Layout, Part
from commhooks.language.shards import Flags
from commhooks.tensors import bytes_of, computing_dtype


def scatter(
    bucket: BucketView, plans: Sequence[Plan], sent: Sequence[Sequence[Sent]], context: Context
) -> Generator[Asked, Any, tuple[Tensor | None, list[Received]]]:
    """Send each rank the elements of its shards; return the verdict, and the received elements of each piece.

    The verdict is None if no unsent part is kept.
    """
    ranks, dtype = len(plans), computing_dtype(bucket.memory.dtype)
    values = bucket.memory.new_zeros(ranks, max(plan.layout.elements for plan in plans), dtype=dtype)  # [W, K]
    codes = bucket.memory.new_zeros(ranks, max(map(_code_bytes, plans)), dtype=torch.uint8)  # [W, C]
    seen = [values]
    for plan, own, of_row, code in zip(plans, sent, values, codes, strict=True):
        if own:
            chosen, of_codings = encoded(plan, own)
            of_row[: len(chosen)] = chosen
            code[: _code_bytes(plan)] = torch.cat([bytes_of(one) for one in of_codings])
            seen += own[0].piece.tile.in_own_range([chosen])
    layout = _together(plans)
    flags = [Flags.of(seen, ranks)] if bucket.keeps else []
    *answers, of_values, of_codes = yield AllToAll(*flags, Part(values, layout), Part(codes, layout), last=True)
    finite = (yield Judge(*answers)) if bucket.keeps else None
    plan = plans[context.rank]
    if not plan.pieces:
        return finite, []
    sizes = [coding.code_bytes for coding, _ in plan.codings]
    apart = of_codes[:, : sum(sizes)].split(sizes, 1)
    typed = [code.contiguous().view(coding.dtype) for (coding, _), code in zip(plan.codings, apart, strict=True)]
    return finite, received_of(plan, of_values[:, : plan.layout.elements].contiguous(), typed)


def _code_bytes(plan: Plan) -> int:
    return sum(coding.code_bytes for coding, _ in plan.codings)


def _together(plans: Sequence[Plan]) -> Layout:
    """Return the layout of the entries for all ranks."""
    counts: dict[str, int] = {}
    for plan in plans:
        for name, count in zip(plan.layout.keys, plan.layout.sizes, strict=True):
            counts[name] = counts.get(name, 0) + count
    return Layout(tuple(counts), tuple(counts.values()))
