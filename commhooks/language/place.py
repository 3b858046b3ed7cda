"""The place of a parameter's state, the argument of `Compressor.state`."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from commhooks.language.requests import Layout


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """The place of a parameter's state: the parameter, in a bucket, among ranks, in a step."""

    name: str
    """The parameter's name, or a placeholder for it."""
    parameter: Tensor
    """The parameter; use its shape, strides and dtype, but not its values."""
    world_size: int
    """The number of ranks."""
    _: dataclasses.KW_ONLY
    bucket: Layout | None = None
    """The whole bucket that this parameter leads, whose own state is kept with it; None: it leads none, or buckets are
    not known yet."""
    is_sharded: bool = False
    """True if its bucket consists of shards; see `Compressor.scatter`."""
    step: int | None = None
    """The step. None: any step, so declare the entries of all steps."""
