"""The three passes over blocks in which `TwoHop` uses a codec: send, serve, write.

They are made of the codec's `encode` and `decode`, and called for few blocks at a time, so that temporaries stay in the
processor's cache. Legend: k blocks of n elements; W ranks; b rows for each in a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.errors import CompressorError
from commhooks.language.memory import elements_at_once
from commhooks.language.noise import Noise
from commhooks.language.settings import cached_for_each
from commhooks.tensors import mean_in_order


class Places(NamedTuple):
    """The places of some blocks' codes in a message, [k] each."""

    ranks: Tensor
    """The rank that serves each block."""
    rows: Tensor
    """Its row among those for that rank."""
    flat: Tensor
    """The same, counted over all ranks: rank · b + row."""


class Passes:
    """The passes of a codec, whose decoded values are multiplied by `damping`."""

    def __init__(self, codec: Codec, damping: float | None) -> None:
        self.codec = codec
        self.damping = damping
        # A subclass that defines `decode` alone inherits a `decode_into` that may do something else.
        self._decodes_into = next(
            "decode_into" in vars(kind) for kind in type(codec).__mro__ if {"decode", "decode_into"} & vars(kind).keys()
        )

    def blocks_at_once(self, device: torch.device) -> int:
        """Return the number of blocks for one call of the passes."""
        return max(1, elements_at_once(device) // self.codec.block)

    def send(
        self, blocks: Tensor, noise: Noise | None, message: Sequence[Tensor], places: Places, *, keeps: bool
    ) -> Tensor | None:
        """Encode blocks [k, n] into a message, tensors [W, b, ...]; if `keeps`, they become the code's error.

        Returns a 0-dim 0, or NaN if there is an inf or NaN; None if the codes themselves show that.
        """
        code = self._encode(blocks, noise)
        flaw = None if self.codec.shows_non_finite else blocks.abs().amax() * 0
        for payload, part in zip(message, code, strict=True):
            _put(payload, part, places)
        if keeps:
            blocks.sub_(self.decode(code))
        return flaw

    def serve(
        self, received: Sequence[Tensor], noise: Noise | None, coded: Sequence[Tensor], left: Tensor | None
    ) -> None:
        """Encode the mean of the received codes, tensors [W, k, ...], into `coded`, tensors [k, ...].

        `left` [k, n] is added to the mean, and then becomes the code's error.
        """
        y = self.mean(received)
        if left is not None:
            y.add_(left)
        code = self._encode(y, noise)
        for payload, part in zip(coded, code, strict=True):
            payload.copy_(part)
        if left is not None:
            torch.sub(y, self.decode(code), out=left)

    def write(self, message: Sequence[Tensor], places: Places, blocks: Tensor) -> Tensor:
        """Decode rows of a message, tensors [W, b, ...], into blocks [k, n], and return these."""
        code = [_rows(payload, places) for payload in message]
        if self._decodes_into:
            self.codec.decode_into(code, blocks)
        else:
            blocks.copy_(self.codec.decode(code))
        return blocks if self.damping is None else blocks.mul_(self.damping)

    def mean(self, received: Sequence[Tensor]) -> Tensor:
        """Return the mean over the ranks of the received codes, tensors [W, k, ...], added up in rank order."""
        ranks, k = received[0].shape[:2]
        decoded = self._of_ranks(received, max(1, elements_at_once(received[0].device) // (k * self.codec.block)))
        return mean_in_order(next(decoded), decoded, ranks)

    def evidence(self, message: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors that show inf and NaN in codes, tensors [W, b, ...]."""
        if type(self.codec).evidence is Codec.evidence:
            return self.codec.evidence(message)  # of any shape
        return self.codec.evidence([payload.flatten(0, 1) for payload in message])

    def decode(self, code: Sequence[Tensor]) -> Tensor:
        """Return the blocks of a code, tensors [k, ...], in new memory."""
        blocks = self.codec.decode(code)
        if blocks.shape != (len(code[0]), self.codec.block):
            raise CompressorError(
                f"{self.codec!r}.decode must return blocks of shape {(len(code[0]), self.codec.block)} "
                f"(got {tuple(blocks.shape)})."
            )
        return blocks if self.damping is None else blocks.mul_(self.damping)

    def _encode(self, blocks: Tensor, noise: Noise | None) -> Sequence[Tensor]:
        code = self.codec.encode(blocks, blocks.new_empty(0) if noise is None else noise.uniform())
        if not isinstance(code, (tuple, list)) or any(len(payload) != len(blocks) for payload in code):
            raise CompressorError(
                f"{self.codec!r}.encode must return a tuple of tensors of {len(blocks)} rows, one for each block."
            )
        return code

    def _of_ranks(self, received: Sequence[Tensor], at_once: int) -> Iterator[Tensor]:
        """Yield each rank's blocks, decoded for some ranks at a time."""
        for of_some in zip(*(payload.split(at_once) for payload in received), strict=True):
            yield from self.decode([payload.flatten(0, 1) for payload in of_some]).unflatten(0, (len(of_some[0]), -1))


@cached_for_each
def payloads_of(codec: Codec, dtype: torch.dtype) -> Sequence[tuple[torch.Size, torch.dtype]]:
    """Return the shape, without the first dimension, and the dtype of each tensor of a code of blocks of a dtype."""
    block = torch.zeros(1, codec.block, dtype=dtype, device="cpu")
    code = codec.encode(block, block.float() if codec.draws else block.new_empty(0))
    return [(payload.shape[1:], payload.dtype) for payload in code]


def _put(payload: Tensor, part: Tensor, places: Places) -> None:
    """Write rows [k, ...] to places in a payload [W, b, ...]; as wide elements, if possible."""
    wide, rows = _as_wide(payload, 2), _as_wide(part.to(payload.dtype), 1)
    if wide is None or rows is None:
        payload[places.ranks, places.rows] = part
    else:
        wide[places.ranks, places.rows] = rows


def _rows(payload: Tensor, places: Places) -> Tensor:
    """Return rows [k, ...] of a payload [W, b, ...]."""
    wide = _as_wide(payload, 2)
    rows: Tensor = (payload if wide is None else wide)[places.ranks, places.rows]
    return rows.view(payload.dtype).view(len(rows), *payload.shape[2:])


def _as_wide(rows: Tensor, leading: int) -> Tensor | None:
    """View rows as rows of int64, after `leading` dimensions; return None if that is not possible."""
    flat = rows.flatten(leading) if rows.dim() > leading else rows.unsqueeze(leading)  # a number for each block
    size = rows.element_size()
    numbers = (flat.shape[-1], flat.storage_offset(), *flat.stride()[:-1])
    return None if any(number * size % 8 for number in numbers) or flat.stride(-1) != 1 else flat.view(torch.int64)
