"""What a compressor remembers from step to step: declared by kind, kept for each parameter, owned by a table.

Whatever happens to state without its compressor (checkpoints, another world size, a change of the loss scale, a rank
that has run out of inputs, a step that does not count) happens by kind.
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
"""The name of the integer that `Compressor.choose` has returned for a parameter: 0-dim, 0 until it does."""
RESIDUAL = "residual"
"""The name of what this rank has not sent yet; see `ErrorFeedback`."""

Kind = Literal["replicated", "residual", "private", "share"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """How one tensor that is remembered for a parameter looks, and how it behaves.

    - "replicated": the same on every rank, such as a warm start. Kept at another world size.
    - "residual": what this rank has not sent yet, one value an element, in units of the gradient. Spread over another
      world size; a rank that has joined sends none of it, and keeps it.
    - "private": other sums of this rank's own gradients, such as a momentum. Spread, and kept, as residuals are.
    - "share": what this rank holds for the blocks that it serves for all ranks, in units of the mean, such as a two-hop
      compressor's server error: [blocks served, block]. Dealt out anew for another world size. A rank that has joined
      goes on serving.
    """

    kind: Kind
    shape: tuple[int, ...] | None = None
    """None: one value for each element of the gradient, 1-D, in the order of the parameter's memory."""
    dtype: torch.dtype | None = None
    """None: at least fp32; what is not replicated is then kept where and how `attach(residuals=)` says."""
    init: Callable[[Tensor], Tensor] | None = None
    """From a tensor of the right shape, dtype and device, which it may overwrite, to the first value; None: zeros."""
    units: int | None = None
    """The power of the loss scale that it follows: 1 if it is scaled like gradients, 2 like their squares, or 0.
    None: 0 for what is replicated, and 1 for the rest."""
    block: int = 0
    """Of a share: elements of a block."""
    holders: int = 1
    """How many ranks in a row have the same one, and act as one, as a machine does under `Hierarchical`. A rank that
    has joined goes on with what it holds in common with others."""

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
        """Whether it has one value for each element of the gradient."""
        return self.shape is None and not self.block

    @property
    def power(self) -> int:
        """The power of the loss scale."""
        return self.units if self.units is not None else int(self.kind != "replicated")

    def is_like(self, other: Entry) -> bool:
        """Return whether both may share a tensor: only their first values may differ."""
        return dataclasses.replace(self, init=None) == dataclasses.replace(other, init=None)

    @property
    def is_own(self) -> bool:
        """Whether ranks have different ones."""
        return self.kind != "replicated"


class ParameterState:
    """What is remembered for one parameter: tensors by name, each with the entry that declared it."""

    def __init__(self, key: str) -> None:
        self.key = key
        """The parameter's name, or "#<position>" where nobody told the names; random numbers are seeded by it."""
        self.tensors: dict[str, Tensor] = {}
        self.entries: dict[str, Entry] = {}
        self._choice = 0
        self._original: ParameterState | None = None

    @property
    def choice(self) -> int:
        """The host's copy of the tensor `CHOICE`, which may lie on a GPU; the same under all names."""
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
        """Return the same tensors under the names that a compressor declared, given the names that they are kept by."""
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
        """Return the bytes that this parameter's state takes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


Declared = Mapping[str, Entry]
"""What is remembered for one parameter, by name."""


def first_server(name: str, world_size: int) -> int:
    """Return the rank that serves a parameter's first block; the next rank serves the next one, and so on.

    A function of the name, so that who serves what does not depend on buckets.
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") % world_size


def blocks_served(name: str, blocks: int, rank: int, world_size: int) -> range:
    """Return the numbers of the blocks, of so many that a parameter has, which a rank serves."""
    return range((rank - first_server(name, world_size)) % world_size, blocks, world_size)
