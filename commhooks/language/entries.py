"""A compressor's state between steps: declared by kind, kept for each parameter, owned by a table.

An entry's kind decides what happens to it in everything that does not involve the compressor: checkpoints, a different
world size, a change of the loss scale, a rank that has run out of inputs, a step that does not count.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from commhooks.errors import CompressorError, SettingsError

CHOICE = "choice"
"""The name of the integer that `Compressor.choose` returned for a parameter: 0-dim, 0 at first."""
RESIDUAL = "residual"
"""The name of the entry for this rank's unsent values; see `ErrorFeedback`."""

Kind = Literal["replicated", "residual", "private", "share"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """The shape and behaviour of a tensor that is remembered for a parameter.

    - "replicated": the same on every rank, such as a warm start. Kept when the world size changes.
    - "residual": this rank's unsent values, one for each element, in units of the gradient. Redistributed when the
      world size changes; a rank that has joined sends none of it, and keeps it.
    - "private": other sums of this rank's own gradients, such as a momentum. Treated like residuals.
    - "share": this rank's values for the blocks that it serves for all ranks, in units of the mean, such as the server
      error of a two-hop compressor: [blocks served, block]. Redistributed when the world size changes. A rank that has
      joined continues to serve its blocks. Its values are unsent: if the next compressor does not use it, they are
      added to the residual.
    """

    kind: Kind
    shape: tuple[int, ...] | None = None
    """Its shape. None: one value for each element of the gradient, 1-D, in the memory order of the parameter."""
    dtype: torch.dtype | None = None
    """Its dtype. None: at least fp32 or, if not replicated, as `attach(residuals=)` sets."""
    init: Callable[[Tensor], Tensor] | None = None
    """A function from a tensor of the right shape, dtype and device, which it may overwrite, to the first value; None:
    zeros."""
    units: int | None = None
    """The power of the loss scale that it follows: 1 if it is scaled like gradients, 2 like their squares, or 0. None:
    0 for replicated entries, and 1 for the others."""
    block: int = 0
    """A share's number of elements in a block; 0 for other entries."""
    holders: int = 1
    """The number of consecutive ranks that share one value and act as one, as a machine does under `Hierarchical`. A
    rank that has run out of inputs continues to use a shared value."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SettingsError(f"Entry(kind={self.kind!r}): kind must be one of {', '.join(KINDS)}.")
        if (self.kind == "share") is not (self.block > 0):
            raise SettingsError(
                f"Entry(kind={self.kind!r}, block={self.block}): a share has a block, and nothing else has."
            )
        if self.holders < 1:
            raise SettingsError(f"Entry(holders={self.holders}): holders must be at least 1.")

    @property
    def by_element(self) -> bool:
        """True if it has one value for each element of the gradient."""
        return self.shape is None and not self.block

    @property
    def power(self) -> int:
        """The power of the loss scale."""
        return self.units if self.units is not None else int(self.kind != "replicated")

    def is_like(self, other: Entry) -> bool:
        """Return whether two entries may share a tensor: they differ in their first values at most."""
        return dataclasses.replace(self, init=None) == dataclasses.replace(other, init=None)

    @property
    def is_own(self) -> bool:
        """True if each rank has its own value."""
        return self.kind != "replicated"


class ParameterState:
    """A parameter's state: tensors by name, each with the entry that declared it."""

    def __init__(self, key: str) -> None:
        self.key = key
        """The parameter's name, or "#<position>" if names are not known; random numbers are seeded by it."""
        self.tensors: dict[str, Tensor] = {}
        self.entries: dict[str, Entry] = {}
        self._choice = 0
        self._original: ParameterState | None = None

    @property
    def choice(self) -> int:
        """The host's copy of the tensor `CHOICE`, which may be on a GPU; the same under all names."""
        return self._choice if self._original is None else self._original.choice

    @choice.setter
    def choice(self, choice: int) -> None:
        self._choice = choice

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor; raise `CompressorError` if no compressor has declared it."""
        if name not in self.tensors:
            raise CompressorError(
                f"parameter {self.key!r} has no state {name!r}: no compressor has declared it; name it in "
                f"Compressor.state() (declared: {', '.join(sorted(self.entries)) or 'nothing'})."
            )
        return self.tensors[name]

    def renamed(self, names: Mapping[str, str]) -> ParameterState:
        """Return the same tensors under the names that a compressor declared, given the names they are kept under."""
        state = ParameterState(self.key)
        state._original = self
        own = {kept: declared for declared, kept in names.items()}
        hidden = names.keys() - own.keys()
        for name, tensor in self.tensors.items():
            if name not in hidden:
                state.tensors[own.get(name, name)] = tensor
                state.entries[own.get(name, name)] = self.entries[name]
        return state

    def of_kind(self, *kinds: Kind) -> dict[str, Tensor]:
        """Return the tensors of these kinds, by name."""
        return {name: tensor for name, tensor in self.tensors.items() if self.entries[name].kind in kinds}

    def memory_bytes(self) -> int:
        """Return the number of bytes of this parameter's state."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


Declared = Mapping[str, Entry]
"""The entries declared for one parameter, by name."""


def first_server(name: str, world_size: int) -> int:
    """Return the rank that serves a parameter's first block; the next block is served by the next rank, and so on.

    It depends only on the name, so that the assignment does not depend on buckets.
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") % world_size


def blocks_served(name: str, blocks: int, rank: int, world_size: int) -> range:
    """Return the numbers of the blocks that a rank serves, of a parameter with `blocks` blocks."""
    return range((rank - first_server(name, world_size)) % world_size, blocks, world_size)
