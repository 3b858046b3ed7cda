"""The three passes over blocks in which `TwoHop` uses a codec: send, serve, write.

Eager ones are made of the codec's `encode` and `decode`, and called for few blocks at a time, so that temporaries stay
in the processor's cache. Some codecs have compiled ones, on a CPU in fp32. Equal bytes are decoded to equal bits, so
ranks with and without them can be mixed. Codes are also the same, except that scales which are sums, of `Sign` and
`QSGD`, are added up in another order: they agree to n·ε for blocks of n elements.

Legend: k blocks of n elements; W ranks; b rows for each in a message.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.errors import CompressorError
from commhooks.language.memory import elements_at_once
from commhooks.language.noise import Keys, Noise
from commhooks.language.settings import cached_for_each
from commhooks.native import library
from commhooks.native.passes import CodeFormat, CodeKernels, NoiseTable
from commhooks.tensors import mean_in_order

_INF = 0x7F800000
"""The bits of inf in fp32."""


class CodePlaces(NamedTuple):
    """The places of some blocks' codes in a message, [k] each."""

    ranks: Tensor
    """The rank that serves each block."""
    rows: Tensor
    """Its row among those for that rank."""
    flat: Tensor
    """The same, counted over all ranks: rank · b + row."""


class CodecPasses:
    """The passes of a codec, whose decoded values are multiplied by `damping`; given a level, compiled ones.

    A codec that names its compiled form has those, for blocks in fp32 on a CPU.
    """

    def __init__(self, codec: Codec, damping: float | None, level: str | None = None) -> None:
        self.codec = codec
        self.damping = damping
        self._native: CodeKernels | None = None
        if level is not None:
            assert codec.compiled is not None, "a codec that names its compiled form"
            kind, levels = codec.compiled
            form = CodeFormat(kind, codec.block, levels)
            self._native = CodeKernels(level, form, 1.0 if damping is None else damping)
        # A subclass that defines `decode` alone inherits a `decode_into` that may do something else.
        self._decodes_into = next(
            "decode_into" in vars(kind) for kind in type(codec).__mro__ if {"decode", "decode_into"} & vars(kind).keys()
        )

    def blocks_at_once(self, device: torch.device, *, apart: bool = True) -> int:
        """Return the number of blocks for one call of the passes: more for compiled ones, which have no temporaries.

        `apart`: blocks are formed in scratch memory, as large as they are together.
        """
        times = 1 if self._native is None else 4 if apart else 16
        return max(1, elements_at_once(device) // self.codec.block) * times

    @property
    def exchanges_state(self) -> bool:
        """True if passes can add state and overwrite it at once, and leave its old values elsewhere."""
        return self._native is not None

    def send(
        self,
        blocks: Tensor,
        noise: Noise | None,
        message: Sequence[Tensor],
        places: CodePlaces,
        *,
        keeps: bool,
        residuals: Sequence[Tensor] = (),
    ) -> Tensor | None:
        """Encode blocks [k, n] into a message, tensors [W, b, ...]; if `keeps`, they become the code's error.

        If `exchanges_state`, `residuals` of k blocks may be given: they are added first and become the code's error,
        and the blocks become what they were.
        Returns a 0-dim 0, or NaN if there is an inf or NaN; None if the codes themselves show that.
        """
        if self._native is not None:
            largest = self._native.send(
                blocks, message, places.flat, _table_of(noise), keeps=keeps, residuals=residuals
            )
            if self.codec.shows_non_finite:
                return None
            return torch.tensor(0.0 if largest < _INF else torch.nan, dtype=torch.float32, device="cpu")
        code = self._encode(blocks, noise)
        flaw = None if self.codec.shows_non_finite else blocks.abs().amax() * 0
        for payload, part in zip(message, code, strict=True):
            _put(payload, part, places)
        if keeps:
            blocks.sub_(self.decode(code))
        return flaw

    def serve(
        self,
        received: Sequence[Tensor],
        noise: Noise | None,
        coded: Sequence[Tensor],
        left: Tensor | None,
        errors: Sequence[Tensor] = (),
    ) -> None:
        """Encode the mean of the received codes, tensors [W, k, ...], into `coded`, tensors [k, ...].

        `left` [k, n] is added to the mean, and then becomes the code's error. If `exchanges_state`, `errors` of k
        blocks may be given: those are added and become the code's error, and `left` becomes what they were.
        """
        if self._native is not None:
            error = None if errors else left
            self._native.serve(received, coded, _table_of(noise), error=error, left=left, errors=errors)
            return
        y = self.mean(received)
        if left is not None:
            y.add_(left)
        code = self._encode(y, noise)
        for payload, part in zip(coded, code, strict=True):
            payload.copy_(part)
        if left is not None:
            torch.sub(y, self.decode(code), out=left)

    def write(self, message: Sequence[Tensor], places: CodePlaces, blocks: Tensor) -> Tensor:
        """Decode rows of a message, tensors [W, b, ...], into blocks [k, n], and return these."""
        if self._native is not None:
            self._native.write(message, blocks, places.flat)
            return blocks
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
        code = self.codec.encode(blocks, _uniform(blocks, noise))
        if not isinstance(code, (tuple, list)) or any(len(payload) != len(blocks) for payload in code):
            raise CompressorError(
                f"{self.codec!r}.encode must return a tuple of tensors of {len(blocks)} rows, one for each block."
            )
        return code

    def _of_ranks(self, received: Sequence[Tensor], at_once: int) -> Iterator[Tensor]:
        """Yield each rank's blocks, decoded for some ranks at a time."""
        for of_some in zip(*(payload.split(at_once) for payload in received), strict=True):
            yield from self.decode([payload.flatten(0, 1) for payload in of_some]).unflatten(0, (len(of_some[0]), -1))


def passes_for(codec: Codec, damping: float | None, dtype: torch.dtype, device: torch.device) -> CodecPasses:
    """Return the passes to use for blocks of a dtype on a device: compiled ones, if there are any."""
    if codec.compiled is None or dtype != torch.float32 or device.type != "cpu":
        return CodecPasses(codec, damping)
    level = library.chosen()
    is_used = level is not None and not _is_redefined(type(codec)) and _agree(codec, level)
    return CodecPasses(codec, damping, level if is_used else None)


@functools.cache
def _is_redefined(kind: type[Codec]) -> bool:
    """Return whether a subclass of a codec with compiled passes overrides encoding or decoding."""
    heirs = itertools.takewhile(lambda one: "compiled" not in vars(one), kind.__mro__)
    return any(name in vars(one) for one in heirs for name in ("encode", "decode", "decode_into", "scales"))


@cached_for_each
def _agree(codec: Codec, level: str) -> bool:
    """Return whether a codec's compiled passes agree with its `encode` and `decode` on some blocks; warn if not."""
    eager, compiled = CodecPasses(codec, None), CodecPasses(codec, None, level)
    ranks, b = 3, 4
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(ranks * b, codec.block, generator=generator, dtype=torch.float32, device="cpu")
    blocks *= torch.logspace(-6, 6, ranks * b, dtype=torch.float32, device="cpu").unsqueeze(1)
    noise = Noise.of(Keys.of("", ranks * b, codec.block), codec.block, 0, 0) if codec.draws else None
    rows = torch.randperm(ranks * b, generator=generator, dtype=torch.int64, device="cpu")
    places = CodePlaces(rows // b, rows % b, rows)
    shapes = [(payload.shape[1:], payload.dtype) for payload in codec.encode(blocks, _uniform(blocks, noise))]
    own = noise and noise.at(slice(0, b))
    answers: list[tuple[Tensor, list[Tensor], list[Tensor], Tensor]] = []
    for passes in (eager, compiled):
        message = [torch.zeros(ranks, b, *shape, dtype=dtype, device="cpu") for shape, dtype in shapes]
        coded = [torch.zeros(b, *shape, dtype=dtype, device="cpu") for shape, dtype in shapes]
        unsent, left = blocks.clone(), blocks[:b].clone()
        passes.send(unsent, noise, message, places, keeps=True)
        passes.serve(answers[0][1] if answers else message, own, coded, left)  # of the same bytes
        answers.append((unsent, message, coded, left))
    (_, sent, coded, left), (unsent_c, sent_c, coded_c, left_c) = answers
    decoded = eager.write(sent_c, places, torch.empty_like(blocks))
    means = eager.mean(sent) + blocks[:b]
    close = codec.block * torch.finfo(torch.float32).eps
    agrees = (
        all(map(functools.partial(_close, tolerance=close), [*sent, *coded], [*sent_c, *coded_c]))
        and torch.equal(compiled.write(sent_c, places, torch.empty_like(blocks)), decoded)
        and torch.equal(unsent_c, blocks - decoded)
        and _close(left_c, means - eager.decode(coded_c), tolerance=close)
    )
    if not agrees:
        warnings.warn(
            f"commhooks: the compiled passes ({level}) of {codec!r} do not agree with its encode and decode; "
            "eager ones are used instead. Build the package again, or report this.",
            stacklevel=2,
        )
    return agrees


def _close(one: Tensor, other: Tensor, *, tolerance: float) -> bool:
    """Return whether tensors agree: floating-point numbers relative to the largest, and 99 in 100 bytes."""
    if one.is_floating_point():
        return bool((one - other).abs().max() <= tolerance * one.abs().max())
    return bool((one != other).float().mean() <= 0.01)


@cached_for_each
def payloads_of(codec: Codec, dtype: torch.dtype) -> Sequence[tuple[torch.Size, torch.dtype]]:
    """Return the shape, without the first dimension, and the dtype of each tensor of a code of blocks of a dtype."""
    block = torch.zeros(1, codec.block, dtype=dtype, device="cpu")
    code = codec.encode(block, block.float() if codec.draws else block.new_empty(0))
    return [(payload.shape[1:], payload.dtype) for payload in code]


def _put(payload: Tensor, part: Tensor, places: CodePlaces) -> None:
    """Write rows [k, ...] to places in a payload [W, b, ...]; as wide elements, if possible."""
    wide, rows = _as_wide(payload, 2), _as_wide(part.to(payload.dtype), 1)
    if wide is None or rows is None:
        payload[places.ranks, places.rows] = part
    else:
        wide[places.ranks, places.rows] = rows


def _rows(payload: Tensor, places: CodePlaces) -> Tensor:
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


def _uniform(blocks: Tensor, noise: Noise | None) -> Tensor:
    return blocks.new_empty(0) if noise is None else noise.uniform()


def _table_of(noise: Noise | None) -> NoiseTable | None:
    return None if noise is None else NoiseTable(noise.numbers, noise.rows, noise.shifts)
