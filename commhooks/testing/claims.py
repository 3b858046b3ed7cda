"""The claims that a compressor's declarations make: the laws that hold for it, and how much they let it round."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Self

import torch
from torch import Tensor

from commhooks.compressors.codecs import Codec
from commhooks.compressors.kernels.codes import payloads_of
from commhooks.compressors.noop import NoOp
from commhooks.language.compressor import Compressor, inner_of
from commhooks.testing.bounds import of_conservation, unit_roundoff
from commhooks.testing.workers import Workers, normal, zeros
from commhooks.wrappers import ErrorFeedback

SHAPES = ((24, 40), (40,), (3, 5, 3, 3), (24, 40), (7,), (64, 33), (3, 20, 16), (1, 1), (0, 4), ())
"""The shapes of the parameters that laws are tried on: matrices, two of one shape, a stack of them, vectors, an empty
one, and a 0-dim one."""
NEVER = 10**9
"""The number of steps that stands for "never"."""
_LARGEST_BLOCK = 60
"""The largest block for which these shapes suffice; larger ones would compress none, so a parameter is added."""
_ROUNDINGS = 256
"""The roundings of each element in a step that any code is allowed: far more than occur, and far less than a mistake
loses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claims:
    """The claims of a compressor, from its declarations or, for this package's compressors, from the table of tests."""

    exchanges: bool = True
    """True if ranks end with the same mean."""
    error_feedback: bool = False
    """True if it keeps the unsent part, in the state "residual"."""
    decay: float = 1.0
    """The fraction of the residual that is added to the next gradient; the rest is lost."""
    drops: str = ""
    """The reason why mean + residual may differ from what was to be sent; empty if they must be equal."""
    depends_on_buckets: bool = False
    """True if its messages and its mean depend on which parameters share a bucket."""
    rank: int = 0
    """The rank of the factors that it sends; 0: it sends none."""
    wire: torch.dtype | None = None
    """The dtype in which its sums are sent, if it differs from the one used for computing."""
    roundings: int = 0
    """The number of times that a step rounds an element, other than by a cast or by factors."""
    range: torch.dtype | None = None
    """The dtype that bounds what it can send, if its range is shorter than fp32's."""
    overshoots: bool = True
    """True if a mean may be larger than every rank's gradient, so that fp16 cannot hold it."""
    is_derived: bool = False
    """True if read from a compressor's declarations, which say less than a row of the table: not whether a mean
    `overshoots`, or whether 1e30 can be sent."""
    exempt: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The reason for breaking a law by design, by the law's key; see `Compressor.exempt`."""
    block: int = 0
    """The elements of its codes' largest blocks; 0: it has no blocks."""

    @classmethod
    def of(cls, compressor: Compressor) -> Self:
        """Return the claims of a compressor's declarations and settings, including the compressors that it wraps."""
        nest = list(every_one_in(compressor))
        feeding = [one for one in nest if isinstance(one, ErrorFeedback)]
        decays = {one.decay for one in feeding}
        codecs = codecs_in(nest)
        block = max((codec.block for codec in codecs), default=0)
        workers = Workers(compressor, 2, zeros(*cls(block=block).shapes(*SHAPES)))
        workers.step(normal(workers.parameters, 2, seed=0))
        kinds = {entry.kind for declared in workers.kinds().values() for entry in declared.values()}
        exempt = {key: why for one in nest for key, why in one.exempt.items()}
        narrow = workers.summed_in | {dtype for codec in codecs for _, dtype in payloads_of(codec, torch.float32)}
        return cls(
            exchanges=not any(isinstance(one, NoOp) for one in nest),
            error_feedback="residual" in kinds,
            decay=max(decays, default=1.0),
            drops="its residuals fade by different factors" if len(decays) > 1 else "",
            depends_on_buckets="buckets" in exempt,
            rank=_ROUNDINGS // 4,
            wire=max((one for one in workers.summed_in if one.itemsize == 2), key=unit_roundoff, default=None),
            roundings=_ROUNDINGS,
            range=torch.float16 if torch.float16 in narrow else None,
            exempt=exempt,
            block=block,
            is_derived=True,
        )

    def shapes(self, *shapes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes, and one more with eight of the codes' blocks if blocks are too large for the others."""
        return (*shapes, (8, self.block + 3)) if self.block > _LARGEST_BLOCK else shapes

    def lost(
        self, gradients: list[list[Tensor]], residuals: list[list[Tensor]], *, on_one_rank: bool = False
    ) -> list[float]:
        """Return, for each parameter, how much of what is to be sent a step may round away, as a mean over ranks.

        gradients, residuals: [rank][parameter]; the residuals before the step. On one rank nothing is summed, so that a
        narrow wire loses nothing.
        """
        to_send = [
            [g.double() + self.decay * e for g, e in zip(*both, strict=True)]
            for both in zip(gradients, residuals, strict=True)
        ]
        if self.depends_on_buckets:  # all of a bucket is one matrix
            to_send = [[torch.cat([part.flatten() for part in own])] * len(own) for own in to_send]
        dtype = torch.promote_types(gradients[0][0].dtype, torch.float32)
        wire = None if on_one_rank else self.wire
        return [
            of_conservation(of_ranks, self.rank, dtype, wire, self.roundings) for of_ranks in zip(*to_send, strict=True)
        ]

    def horizon(self, contraction: float) -> int:
        """Return the number of steps after which error feedback has sent everything, at this error."""
        kept = 1 - self.decay**2 * contraction
        return max(120, round(8 / kept)) if kept > 0 else NEVER


def every_one_in(compressor: Compressor) -> Iterator[Compressor]:
    """Yield a compressor and those in its settings, at any depth."""
    yield compressor
    for one in inner_of(compressor):
        yield from every_one_in(one)


def codecs_in(nest: list[Compressor]) -> list[Codec]:
    """Return the codecs in the settings of compressors."""
    return [value for one in nest for value in vars(one).values() if isinstance(value, Codec)]
