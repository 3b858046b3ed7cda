"""What a compressor remembers, kept for each parameter and never for a bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from commhooks.errors import CheckpointError, CompressorError, SettingsError
from commhooks.streams import keep_until_read
from commhooks.tensors import computing_dtype, is_dense

RESIDUAL = "residual"
"""The name of what a rank still owes; every compressor with error feedback keeps it, in units of its gradients."""

RESIDUAL_STORAGES = ("fp32", "bf16", "host")
"""Where residuals are kept: in fp32 at least, in half of that, or in the host's memory."""

Entries = dict[str, dict[str, Tensor]]
"""For each parameter's name, what is remembered for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalEntry:
    """How one name in `ParameterState.local` behaves where state must change without its compressor."""

    kind: Literal["residual", "share"]
    """"residual": what this rank has not sent yet, or another sum of its own gradients. Ranks that load another world
    size's checkpoint take over the sum of all; a rank that has joined sends nothing of it, and keeps it.

    "share": what this rank holds for the elements that it serves for all ranks, such as a two-hop compressor's server
    error. Who serves what depends on the world size, so for another one it is reset or refused; a rank that has joined
    goes on serving, and it changes."""
    units: int = 1
    """The power of the loss scale that it follows: 1 if it is scaled like gradients, 2 like their squares, or 0."""


_ALWAYS_DECLARED = {RESIDUAL: LocalEntry(kind="residual")}


@dataclasses.dataclass
class ParameterState:
    """Remember one parameter's share: what is the same on every rank, and what is this rank's own.

    What holds one value for each of the parameter's elements is kept 1-D, in the order of the parameter's memory;
    that is how a checkpoint knows to save it in the parameter's shape.
    """

    key: str
    """The parameter's name, or "#<position>" where nobody told the names; random bases are seeded by it."""
    replicated: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    local: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    storage: str = "fp32"
    """One of `RESIDUAL_STORAGES`."""
    declared: Mapping[str, LocalEntry] = dataclasses.field(default_factory=lambda: dict(_ALWAYS_DECLARED), repr=False)
    """The names that `local` may hold; the same mapping for all of a table's parameters."""

    def residual(self, gradient: Tensor) -> Tensor:
        """Return what this rank still owes: 1-D like `gradient`, zeros at first, kept as `storage` says."""
        return self.kept(RESIDUAL, gradient)

    def kept(self, name: str, like: Tensor) -> Tensor:
        """Return the local entry of this name: 1-D, of `like`'s size, zeros at first, kept as `storage` says."""
        kept = self.local.get(name)
        dtype = torch.bfloat16 if self.storage == "bf16" else computing_dtype(like.dtype)
        device = torch.device("cpu") if self.storage == "host" else like.device
        if kept is None or kept.numel() != like.numel() or kept.dtype != dtype or kept.device != device:
            pinned = self.storage == "host" and like.is_cuda
            fresh = torch.zeros(like.numel(), dtype=dtype, device=device, pin_memory=pinned)
            if kept is not None and kept.numel() == like.numel():
                fresh.copy_(kept)
                keep_until_read([kept])
            kept = self.local[name] = fresh
        return kept

    def entry(self, name: str) -> LocalEntry:
        """Return how a local entry behaves; raise `CompressorError` if no compressor has declared it."""
        if name not in self.declared:
            raise CompressorError(
                f"parameter {self.key!r} has local state {name!r}, which no compressor has declared, so nobody knows "
                "what becomes of it at another world size or loss scale; name it in Compressor.local_entries() "
                f"(declared: {', '.join(sorted(self.declared))})."
            )
        return self.declared[name]

    def memory_bytes(self) -> int:
        """Return the bytes that this parameter's state takes."""
        tensors = [*self.replicated.values(), *self.local.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class StateTable:
    """Keep one `ParameterState` for each parameter; the key is the parameter object.

    Buckets are rebuilt after a first iteration and may be of another size in the next run, so neither a bucket's index
    nor an offset in it can find a parameter's state again.
    """

    def __init__(self, storage: str = "fp32") -> None:
        if storage not in RESIDUAL_STORAGES:
            raise SettingsError(f"residuals={storage!r}: residuals must be one of {', '.join(RESIDUAL_STORAGES)}.")
        self.storage = storage
        self._declared: dict[str, LocalEntry] = dict(_ALWAYS_DECLARED)
        self._states: dict[Tensor, ParameterState] = {}
        self._names: dict[Tensor, str] = {}
        self._awaited: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] | None = None
        self._shapes: dict[str, tuple[int, ...]] | None = None

    def declare(self, entries: Mapping[str, LocalEntry]) -> None:
        """Learn what a compressor keeps in `ParameterState.local`; what one before it kept may be there still."""
        self._declared.update(entries)

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

    def describe(self, parameters: Sequence[Tensor]) -> str:
        """Name parameters for a message; their shapes where nobody told the names."""
        names = [self.name_of(parameter) or f"one of shape {tuple(parameter.shape)}" for parameter in parameters]
        shown = ", ".join(names[:8])
        return f"parameters {shown}" if len(names) <= 8 else f"parameters {shown} and {len(names) - 8} more"

    def named(self) -> dict[str, Tensor]:
        """Return the parameters whose names are known, by name."""
        return {name: parameter for parameter, name in self._names.items()}

    def of(self, parameter: Tensor) -> ParameterState:
        """Return the parameter's state, a new one at first use."""
        state = self._states.get(parameter)
        if state is None:
            key = self._names.get(parameter, f"#{len(self._states)}")
            state = self._states[parameter] = ParameterState(key, storage=self.storage, declared=self._declared)
            if self._awaited is not None:
                self._take_awaited(parameter, state)
        return state

    def knows_none_of(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether there are parameters here, met or named, and none of these is among them."""
        return bool(self._states or self._names) and not any(p in self._states or p in self._names for p in parameters)

    def parameters(self) -> list[Tensor]:
        """Return every parameter that was met or named."""
        return list({**self._names, **self._states})

    def states(self) -> list[ParameterState]:
        """Return the state of every parameter that was met."""
        return list(self._states.values())

    def residuals(self) -> list[Tensor]:
        """Return every residual that there is."""
        return [state.local[RESIDUAL] for state in self._states.values() if RESIDUAL in state.local]

    def local_by_units(self) -> dict[int, list[Tensor]]:
        """Return all local state, by the power of the loss scale that it is in."""
        found: dict[int, list[Tensor]] = {}
        for state in self._states.values():
            for name, kept in state.local.items():
                found.setdefault(state.entry(name).units, []).append(kept)
        return found

    def export(self) -> tuple[Entries, Entries]:
        """Return what is replicated and what is local, by name, without copying it; element-wise state in its shape.

        Raises `CheckpointError` for a parameter whose name nobody told.
        """
        replicated: Entries = {}
        local: Entries = {}
        for parameter, state in self._states.items():
            if parameter not in self._names and (state.replicated or state.local):
                raise CheckpointError(
                    f"state of a parameter of shape {tuple(parameter.shape)} cannot be saved, for its name is not "
                    "known; call bind(model) on the hook's state, or use attach. (PyTorch's "
                    "DistributedDataParallel tells a hook no names.)"
                )
            if state.replicated:
                replicated[state.key] = {name: _shaped(kept, parameter) for name, kept in state.replicated.items()}
            if state.local:
                local[state.key] = {name: _shaped(kept, parameter) for name, kept in state.local.items()}
        return replicated, local

    def load(self, replicated: Entries, local: Entries, shapes: Mapping[str, Sequence[int]] | None = None) -> None:
        """Take entries as `export` gives them in the place of all state that is there; they are copied.

        Parameters whose names are not known yet take theirs when they are met. With `shapes`, those of all parameters
        by name, `CheckpointError` is raised then for one that has none there, or another.
        """
        self._states.clear()
        self._shapes = None if shapes is None else {name: tuple(shape) for name, shape in shapes.items()}
        self._awaited = {name: (replicated.get(name, {}), local.get(name, {})) for name in {*replicated, *local}}
        for parameter in self._names:
            self.of(parameter)

    def end_loading(self) -> None:
        """Raise `CheckpointError` if something was loaded for a parameter that was never met; forget the rest."""
        left = sorted(self._shapes or ())
        self._awaited = self._shapes = None
        if left:
            raise CheckpointError(
                f"state was loaded for parameters that this model has not, or not by this name: {', '.join(left[:8])}."
            )

    def memory_bytes(self) -> int:
        """Return the bytes that all parameters' state takes."""
        return sum(state.memory_bytes() for state in self._states.values())

    def _take_awaited(self, parameter: Tensor, state: ParameterState) -> None:
        if parameter not in self._names:
            raise CheckpointError(
                f"state was loaded by name, and the name of a parameter of shape {tuple(parameter.shape)} is not "
                "known; call bind(model) on the hook's state before the first backward pass. (PyTorch's "
                "DistributedDataParallel tells a hook no names.)"
            )
        assert self._awaited is not None, "nothing was loaded"
        shape = tuple(parameter.shape) if self._shapes is None else self._shapes.pop(state.key, None)
        if shape != tuple(parameter.shape):
            raise CheckpointError(
                f"checkpoint has {'no state' if shape is None else f'state of shape {shape}'} for parameter "
                f"{state.key!r} of shape {tuple(parameter.shape)}."
            )
        replicated, local = self._awaited.pop(state.key, ({}, {}))
        state.replicated = {name: _as_kept(saved, parameter) for name, saved in replicated.items()}
        state.local = {name: _as_kept(saved, parameter) for name, saved in local.items()}
        if RESIDUAL in state.local:
            gradient = parameter.detach().reshape(-1)
            if gradient.is_complex() and state.local[RESIDUAL].numel() == 2 * gradient.numel():
                gradient = torch.view_as_real(gradient).reshape(-1)  # as PyTorch's DDP hands it in
            state.residual(gradient)  # in the dtype, and the memory, that this run keeps it in


def _shaped(kept: Tensor, parameter: Tensor) -> Tensor:
    """Return element-wise state in its parameter's shape; a gradient without gaps lies in the order of dimensions."""
    if kept.dim() != 1 or kept.numel() != parameter.numel():
        return kept
    if not is_dense(parameter):
        return kept.view(parameter.shape)
    return kept.as_strided(parameter.shape, parameter.stride(), kept.storage_offset())


def _as_kept(saved: Tensor, parameter: Tensor) -> Tensor:
    """Return a copy of what `_shaped` returned, in the memory order and on the device of this run's parameter."""
    if saved.shape != parameter.shape:
        return saved.detach().to(parameter.device, copy=True)
    flat = torch.empty(parameter.numel(), dtype=saved.dtype, device=parameter.device)
    _shaped(flat, parameter).copy_(saved)
    return flat
