"""What a compressor remembers, kept for each parameter and never for a bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import Tensor


@dataclasses.dataclass
class ParameterState:
    """Remember one parameter's share: what is the same on every rank, and what is this rank's own."""

    key: str
    """The parameter's name, or "#<position>" where nobody told the names; random bases are seeded by it."""
    replicated: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    local: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def memory_bytes(self) -> int:
        """Return the bytes that this parameter's state takes."""
        tensors = [*self.replicated.values(), *self.local.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class StateTable:
    """Keep one `ParameterState` for each parameter; the key is the parameter object.

    Buckets are rebuilt after a first iteration and may be of another size in the next run, so neither a bucket's index
    nor an offset in it can find a parameter's state again.
    """

    def __init__(self) -> None:
        self._states: dict[Tensor, ParameterState] = {}
        self._names: dict[Tensor, str] = {}

    def bind(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Learn parameters' names; state that is there already takes its parameter's name."""
        for name, parameter in named_parameters:
            self._names[parameter] = name
            if parameter in self._states:
                self._states[parameter].key = name

    def name_of(self, parameter: Tensor) -> str | None:
        """Return the parameter's name, or None where nobody told it."""
        return self._names.get(parameter)

    def names(self) -> list[str]:
        """Return the name, or what stands for it, of every parameter that was told or met."""
        return [*self._names.values(), *(s.key for p, s in self._states.items() if p not in self._names)]

    def of(self, parameter: Tensor) -> ParameterState:
        """Return the parameter's state, a new one at first use."""
        state = self._states.get(parameter)
        if state is None:
            key = self._names.get(parameter, f"#{len(self._states)}")
            state = self._states[parameter] = ParameterState(key)
        return state

    def memory_bytes(self) -> int:
        """Return the bytes that all parameters' state takes."""
        return sum(state.memory_bytes() for state in self._states.values())
