"""The three passes in C, if they are built, for the codes that have them: on a CPU, in fp32.

Equal bytes are decoded to equal bits, so ranks with and without compiled passes can be mixed. Codes are also the same,
except that scales which are sums, of `Sign` and `QSGD`, are added up in another order: they agree to n·ε for blocks of
n elements.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.compressors.codecs.passes import Passes, Places
from commhooks.language.noise import Keys, Noise
from commhooks.language.settings import cached_for_each
from commhooks.native.passes import Form, Message
from commhooks.native.passes import Noise as NativeNoise
from commhooks.native.passes import Passes as NativePasses

_INF = 0x7F800000
"""The bits of inf in fp32."""


class CompiledPasses(Passes):
    """The compiled passes of a codec at one level of the library."""

    def __init__(self, codec: Codec, damping: float | None, native: NativePasses) -> None:
        super().__init__(codec, damping)
        assert codec.compiled is not None, "a codec that names its compiled form"
        kind, levels = codec.compiled
        self._form = Form(kind, codec.block, levels)
        self._native = native
        self._damping = 1.0 if damping is None else damping
        self._message: tuple[Sequence[Tensor], Message] | None = None

    def blocks_at_once(self, device: torch.device) -> int:
        """Return the number of blocks for one call of the passes: more than for eager ones, which have temporaries."""
        return 4 * super().blocks_at_once(device)

    def send(
        self, blocks: Tensor, noise: Noise | None, message: Sequence[Tensor], places: Places, *, keeps: bool
    ) -> Tensor | None:
        """Encode blocks [k, n] into a message; see `Passes.send`."""
        drawn, rows = _native(noise), places.flat
        checked = self._checked(message)
        largest = self._native.send(
            self._form, blocks, checked, rows=rows, noise=drawn, keeps=keeps, damping=self._damping
        )
        if self.codec.shows_non_finite:
            return None
        return torch.tensor(0.0 if largest < _INF else torch.nan, dtype=torch.float32, device="cpu")

    def serve(
        self, received: Sequence[Tensor], noise: Noise | None, coded: Sequence[Tensor], left: Tensor | None
    ) -> None:
        """Encode the mean of the received blocks; see `Passes.serve`."""
        drawn = _native(noise)
        self._native.serve(self._form, received, coded, error=left, left=left, noise=drawn, damping=self._damping)

    def write(self, message: Sequence[Tensor], places: Places, blocks: Tensor) -> Tensor:
        """Decode rows of a message into blocks [k, n]; see `Passes.write`."""
        self._native.write(self._form, self._checked(message), blocks, rows=places.flat, damping=self._damping)
        return blocks

    def _checked(self, message: Sequence[Tensor]) -> Message:
        """Return a message as the passes take it, looked at once for all of its blocks."""
        if self._message is None or self._message[0] is not message:
            self._message = message, Message.of(self._form, message)
        return self._message[1]


def passes_for(codec: Codec, damping: float | None, dtype: torch.dtype, device: torch.device) -> Passes:
    """Return the passes to use for blocks of a dtype on a device: compiled ones, if there are any."""
    if codec.compiled is None or dtype != torch.float32 or device.type != "cpu":
        return Passes(codec, damping)
    native = NativePasses.chosen()
    if native is None or _is_redefined(type(codec)) or not _agree(codec, native):
        return Passes(codec, damping)
    return CompiledPasses(codec, damping, native)


@functools.cache
def _is_redefined(kind: type[Codec]) -> bool:
    """Return whether a subclass of a codec with compiled passes overrides encoding or decoding."""
    heirs = itertools.takewhile(lambda one: "compiled" not in vars(one), kind.__mro__)
    return any(name in vars(one) for one in heirs for name in ("encode", "decode", "decode_into", "scales"))


@cached_for_each
def _agree(codec: Codec, native: NativePasses) -> bool:
    """Return whether a codec's compiled passes agree with its `encode` and `decode` on some blocks; warn if not."""
    eager, compiled = Passes(codec, None), CompiledPasses(codec, None, native)
    ranks, b = 3, 4
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(ranks * b, codec.block, generator=generator, dtype=torch.float32, device="cpu")
    blocks *= torch.logspace(-6, 6, ranks * b, dtype=torch.float32, device="cpu").unsqueeze(1)
    noise = Noise.of(Keys.of("", ranks * b, codec.block), codec.block, 0, 0) if codec.draws else None
    rows = torch.randperm(ranks * b, generator=generator, dtype=torch.int64, device="cpu")
    places = Places(rows // b, rows % b, rows)
    shapes = [(payload.shape[1:], payload.dtype) for payload in codec.encode(blocks, _uniform(noise, blocks))]
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
            f"commhooks: the compiled passes ({native.level}) of {codec!r} do not agree with its encode and decode; "
            "eager ones are used instead. Build the package again, or report this.",
            stacklevel=2,
        )
    return agrees


def _close(one: Tensor, other: Tensor, *, tolerance: float) -> bool:
    """Return whether tensors agree: floating-point numbers relative to the largest, and 99 in 100 bytes."""
    if one.is_floating_point():
        return bool((one - other).abs().max() <= tolerance * one.abs().max())
    return bool((one != other).float().mean() <= 0.01)


def _uniform(noise: Noise | None, blocks: Tensor) -> Tensor:
    return blocks.new_empty(0) if noise is None else noise.uniform()


def _native(noise: Noise | None) -> NativeNoise | None:
    return None if noise is None else NativeNoise(noise.numbers, noise.rows, noise.shifts)
