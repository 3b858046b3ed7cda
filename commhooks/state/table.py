"""The state of compressors, kept for each parameter and never for a bucket; the table owns the memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from commhooks.devices import keep_until_read, wait_for_copies
from commhooks.errors import CheckpointError, SettingsError
from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import Compressor
from commhooks.language.entries import CHOICE, RESIDUAL, Declared, Entry, ParameterState, blocks_served
from commhooks.language.place import Place
from commhooks.tensors import computing_dtype, is_dense, memory_order

ResidualStorage = Literal["fp32", "bf16", "host"]
"""The storage of per-rank state: in at least fp32, in bf16, or in the host's memory."""
RESIDUAL_STORAGES: tuple[ResidualStorage, ...] = get_args(ResidualStorage)

Entries = dict[str, dict[str, Tensor]]
"""The entries of each parameter, by its name."""
Kinds = dict[str, dict[str, Entry]]
"""The per-rank entries by parameter's name and entry's name, which may mean different things for two parameters."""


@dataclasses.dataclass
class _Loaded:
    """State loaded for a parameter, until its memory is laid out."""

    replicated: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    kinds: Mapping[str, Entry]

    def items(self) -> Iterator[tuple[str, Tensor, Entry]]:
        """Yield each tensor with its name and its entry."""
        for name, tensor in self.replicated.items():
            yield name, tensor, self.kinds.get(name, Entry(kind="replicated", shape=tuple(tensor.shape)))
        for name, tensor in self.own.items():
            yield name, tensor, self.kinds[name]


class StateTable:
    """One `ParameterState` for each parameter; the key is the parameter object.

    Buckets are rebuilt after the first iteration and may have other sizes in the next run, so neither a bucket's index
    nor an offset in it can identify a parameter's state. Memory stays in place once it is laid out: loaded state is
    copied into it.
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, storage: ResidualStorage = "fp32", *, is_sharded: bool = False
    ) -> None:
        if storage not in RESIDUAL_STORAGES:
            raise SettingsError(f"residuals={storage!r}: residuals must be one of {', '.join(RESIDUAL_STORAGES)}.")
        self.rank = rank
        self.world_size = world_size
        self.storage = storage
        self.is_sharded = is_sharded
        """True if all buckets consist of shards, which have no server errors."""
        self.successors: tuple[Compressor, ...] = ()
        """Compressors that may take over from the one in use: their state may be loaded, too."""
        self.in_phase: tuple[Compressor, int] | None = None
        """The compressor, and its phase's first step, to which state was handed over; None while loaded state has not
        been."""
        self._dimensions: Mapping[Tensor, int] = {}
        """The dimensions along which parameters are cut into rows, one for each rank, if these are not the first."""
        self._states: dict[Tensor, ParameterState] = {}
        self._names: dict[Tensor, str] = {}
        self._loaded: dict[str, _Loaded] | None = None
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._orders: Mapping[str, Sequence[int]] = {}

    # --- parameters and their names -----------------------------------------------------------------------------------

    def bind(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Learn parameters' names; existing state takes its parameter's name."""
        for name, parameter in named_parameters:
            self._names[parameter] = name
            if parameter in self._states:
                self._states[parameter].key = name

    def name_of(self, parameter: Tensor) -> str | None:
        """Return the parameter's name, or None if it is not known."""
        return self._names.get(parameter)

    def described(self) -> dict[str, Tensor]:
        """Return every parameter named or seen so far, by its name or a placeholder."""
        return self.named() | {s.key: p for p, s in self._states.items() if p not in self._names}

    def describe(self, parameters: Sequence[Tensor]) -> str:
        """Name parameters for a message, or give their shapes if names are not known."""
        names = [self.name_of(parameter) or f"one of shape {tuple(parameter.shape)}" for parameter in parameters]
        shown = ", ".join(names[:8])
        return f"parameters {shown}" if len(names) <= 8 else f"parameters {shown} and {len(names) - 8} more"

    def named(self) -> dict[str, Tensor]:
        """Return the parameters whose names are known, by name."""
        return {name: parameter for parameter, name in self._names.items()}

    def parameters(self) -> list[Tensor]:
        """Return every parameter named or seen so far."""
        return list({**self._names, **self._states})

    def knows_none_of(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the table knows parameters, by name or from a bucket, but none of these."""
        return bool(self._states or self._names) and not any(p in self._states or p in self._names for p in parameters)

    # --- state --------------------------------------------------------------------------------------------------------

    def of(self, parameter: Tensor) -> ParameterState:
        """Return the parameter's state, which is empty at first."""
        state = self._states.get(parameter)
        if state is None:
            state = self._states[parameter] = ParameterState(self._names.get(parameter, f"#{len(self._states)}"))
            if self._loaded is not None:
                self._check_loaded(parameter, state.key)
        return state

    def place(self, name: str, parameter: Tensor, world_size: int | None = None, step: int | None = None) -> Place:
        """Return a parameter's place among so many ranks, by default this run's, for use outside its bucket."""
        return Place(name, parameter, world_size or self.world_size, is_sharded=self.is_sharded, step=step)

    def cut_along(self, dimensions: Mapping[Tensor, int]) -> None:
        """Learn that buckets of shards hold parts of these parameters along other dimensions than the first.

        A parameter's elements are then in the order of the rows, the parts one after another; saved state has them in
        the order of the parameter, as any other number of ranks needs them.
        """
        self._dimensions = dimensions

    def lay_out(self, bucket: BucketView, compressor: Compressor) -> None:
        """Lay out a compressor's state for a bucket's parameters."""
        for slot, place in zip(bucket.slots, bucket.places(self.world_size), strict=True):
            self.lay_out_entries(slot, compressor.state(place))

    def lay_out_entries(self, slot: Slot, declared: Declared) -> None:
        """Allocate entries if needed; entries with a new shape or number of holders start from their first value."""
        state = slot.remembered
        for name, entry in declared.items():
            kept, before = state.tensors.get(name), state.entries.get(name)
            state.entries[name] = entry
            fresh = self._empty(state.key, entry, slot.gradient, slot.parameter.numel())
            is_there = kept is not None and kept.shape == fresh.shape and _have_same_holders(before, entry)
            if kept is not None and is_there and kept.dtype == fresh.dtype and kept.device == fresh.device:
                continue
            _begin(fresh, entry)
            if kept is not None and is_there:  # stored differently: by another compressor, or as it was saved
                wait_for_copies([kept])
                fresh.copy_(kept)
                keep_until_read([kept])
            state.tensors[name] = fresh
        if self._loaded is not None and state.key in self._loaded:
            self._fill(slot.parameter, state, self._loaded[state.key])

    def choose(self, compressor: Compressor, step: int) -> None:
        """Ask a compressor for its choices before a step's first bucket, given the state of all parameters.

        Does nothing while loaded state waits for its parameter: the choice was loaded with it.
        """
        if self.is_waiting:
            return
        for parameter, choice in compressor.choose(self._states, step).items():
            self._states[parameter].choice = choice
            self._states[parameter].tensors[CHOICE].fill_(choice)

    def states(self) -> list[ParameterState]:
        """Return the state of every parameter seen so far."""
        return list(self._states.values())

    def slots(self) -> list[Slot]:
        """Return a slot of each parameter seen so far, to lay out state for; its gradient has only the right size."""
        found = []
        for parameter, state in self._states.items():
            flat = parameter.detach().reshape(-1)
            pairs = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat  # as PyTorch's DDP passes them
            found.append(Slot(pairs if flat.is_complex() else parameter, pairs, state))
        return found

    def residuals(self) -> list[tuple[str, Tensor, Tensor]]:
        """Return every residual, as (name of its parameter, parameter, residual)."""
        kept = [(state.key, p, state.tensors.get(RESIDUAL)) for p, state in self._states.items()]
        return [(name, parameter, residual) for name, parameter, residual in kept if residual is not None]

    def by_units(self) -> dict[int, list[Tensor]]:
        """Return all state that follows the loss scale, by the power of the scale that it follows."""
        found: dict[int, list[Tensor]] = {}
        for state in self._states.values():
            for name, kept in state.tensors.items():
                if state.entries[name].power:
                    found.setdefault(state.entries[name].power, []).append(kept)
        return found

    # --- saving and loading -------------------------------------------------------------------------------------------

    def export(self) -> tuple[Entries, Entries]:
        """Return the replicated state and this rank's own, by name, without copying it.

        Element-wise state has its parameter's shape. Raises `CheckpointError` for a parameter whose name is not known.
        """
        replicated: Entries = {}
        own: Entries = {}
        for parameter, state in self._states.items():
            if parameter not in self._names and state.tensors:
                raise CheckpointError(
                    f"state of a parameter of shape {tuple(parameter.shape)} cannot be saved: its name is not "
                    "known; call bind(model) on the hook's state, or use attach. (PyTorch's "
                    "DistributedDataParallel does not pass names to a hook.)"
                )
            for name, kept in state.tensors.items():
                held = own if state.entries[name].is_own else replicated
                is_by_element = state.entries[name].by_element
                held.setdefault(state.key, {})[name] = self._shaped(kept, parameter) if is_by_element else kept
        return replicated, own

    def kinds(self) -> Kinds:
        """Return the entries of this rank's own state."""
        kinds: Kinds = {}
        for state in self._states.values():
            own = {name: state.entries[name] for name in state.tensors if state.entries[name].is_own}
            if own:
                kinds[state.key] = own
        return kinds

    def load(
        self,
        replicated: Entries,
        own: Entries,
        kinds: Kinds,
        shapes: Mapping[str, Sequence[int]] | None = None,
        orders: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Replace all state with entries in the form of `export`, of these kinds; they are copied.

        A parameter that was not seen yet gets its state when it is. If `shapes`, of all parameters by name, is given, a
        parameter that is missing in it or has another shape then raises `CheckpointError`, as does one whose dimensions
        lie in memory otherwise than `orders` say.
        """
        self._orders = orders or {}
        self.in_phase = None
        self._shapes = None if shapes is None else {name: tuple(shape) for name, shape in shapes.items()}
        self._loaded = {
            name: _Loaded(replicated.get(name, {}), own.get(name, {}), kinds.get(name, {}))
            for name in {*replicated, *own}
        }
        for parameter in {**self._names, **self._states}:
            state = self.of(parameter)
            if state.tensors:
                self._check_loaded(parameter, state.key)
            wait_for_copies(state.tensors.values())
            for name, tensor in state.tensors.items():
                _begin(tensor, state.entries[name])
            state.choice = 0
            self._fill(parameter, state, self._loaded.get(state.key, _Loaded({}, {}, {})))

    @property
    def is_waiting(self) -> bool:
        """True while loaded state waits for its parameter to be seen."""
        return bool(self._loaded)

    def end_loading(self) -> None:
        """Raise `CheckpointError` if something was loaded for a parameter that was never seen; forget the rest."""
        left = sorted(self._shapes or ())
        self._loaded = self._shapes = None
        if left:
            raise CheckpointError(
                f"loaded state names parameters that this model does not have: {', '.join(left[:8])}."
            )

    def _check_loaded(self, parameter: Tensor, key: str) -> None:
        if parameter not in self._names:
            raise CheckpointError(
                f"state was loaded by name, but the name of a parameter of shape {tuple(parameter.shape)} is not "
                "known; call bind(model) on the hook's state before the first backward pass. (PyTorch's "
                "DistributedDataParallel does not pass names to a hook.)"
            )
        shape = tuple(parameter.shape) if self._shapes is None else self._shapes.pop(key, None)
        if shape != tuple(parameter.shape):
            raise CheckpointError(
                f"checkpoint has {'no state' if shape is None else f'state of shape {shape}'} for parameter "
                f"{key!r} of shape {tuple(parameter.shape)}."
            )
        if key in self._orders and (fault := fault_of_order(self._orders, key, parameter)):
            raise CheckpointError(f"{fault}.")

    def _fill(self, parameter: Tensor, state: ParameterState, loaded: _Loaded) -> None:
        """Copy loaded state into allocated entries; keep the rest for a compressor that declares it."""
        if CHOICE in loaded.replicated:
            state.choice = int(loaded.replicated[CHOICE])
        for name, saved, entry in loaded.items():
            kept = state.tensors.get(name)
            declared = entry if kept is None else state.entries[name]
            values = (
                self._flat(saved, parameter) if declared.by_element else saved.detach().to(parameter.device, copy=True)
            )
            if kept is None:
                state.entries[name] = entry
                state.tensors[name] = values
            elif kept.shape == values.shape and _have_same_holders(entry, state.entries[name]):
                kept.copy_(values)
        if self._loaded is not None:
            self._loaded.pop(state.key, None)

    def _shaped(self, kept: Tensor, parameter: Tensor) -> Tensor:
        """Return element-wise state in its parameter's shape, copied only if parts must be put together."""
        dimension = self._dimensions.get(parameter)
        if dimension is None or kept.numel() != parameter.numel():
            return _shaped(kept, parameter)
        part = [*parameter.shape]
        part[dimension] //= self.world_size
        return torch.cat([row.view(part) for row in kept.view(self.world_size, -1)], dimension)

    def _flat(self, saved: Tensor, parameter: Tensor) -> Tensor:
        """Return a copy of the result of `_shaped`, in the order and on the device of this run's parameter."""
        dimension = self._dimensions.get(parameter)
        if dimension is None or saved.shape != parameter.shape:
            return _flat(saved, parameter)
        parts = saved.detach().to(parameter.device).chunk(self.world_size, dimension)
        return torch.cat([part.reshape(-1) for part in parts])

    def _empty(self, key: str, entry: Entry, gradient: Tensor, elements: int) -> Tensor:
        """Allocate memory for an entry, on the device and in the dtype in which it is kept."""
        shape = entry.shape if entry.shape is not None else (elements,)
        if entry.block:
            server, servers = self.rank // entry.holders, self.world_size // entry.holders
            served = blocks_served(key, elements // entry.block, server, servers)
            shape = (len(served), entry.block)
        device, dtype = gradient.device, entry.dtype or computing_dtype(gradient.dtype)
        if entry.is_own and entry.dtype is None and self.storage != "fp32":
            dtype = torch.bfloat16 if self.storage == "bf16" else dtype
            device = torch.device("cpu") if self.storage == "host" else device
        pinned = device != gradient.device
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)


def fault_of_order(orders: Mapping[str, Sequence[int]], name: str, parameter: Tensor) -> str:
    """Return what is wrong if a parameter lies in memory otherwise than when it was saved; empty if it does not.

    `orders` are the saved `memory_order` of parameters, by name; those of others are taken for contiguous.
    """
    now = memory_order(parameter)
    then = list(orders.get(name, sorted(now)))
    if then == now:
        return ""
    return (
        f"parameter {name!r}: saved with its dimensions in the order {then} in memory, now {now}; load it into a model "
        "of the memory format that it was saved with (model.to(memory_format=...))"
    )


def _have_same_holders(one: Entry | None, other: Entry) -> bool:
    """Return whether the same number of ranks share both entries: a rank's own state differs from a machine's."""
    return one is not None and one.holders == other.holders


def _begin(memory: Tensor, entry: Entry) -> None:
    """Write the initial value."""
    if entry.init is None:
        memory.zero_()
    else:
        memory.copy_(entry.init(memory))


def _shaped(kept: Tensor, parameter: Tensor) -> Tensor:
    """Return element-wise state in its parameter's shape; a gradient without gaps lies in the order of dimensions."""
    if kept.dim() != 1 or kept.numel() != parameter.numel():
        return kept
    if not is_dense(parameter):
        return kept.view(parameter.shape)
    return kept.as_strided(parameter.shape, parameter.stride(), kept.storage_offset())


def _flat(saved: Tensor, parameter: Tensor) -> Tensor:
    """Return a copy of the result of `_shaped`, in the memory order and on the device of this run's parameter."""
    if saved.shape != parameter.shape:
        return saved.detach().to(parameter.device, copy=True)
    flat = torch.empty(parameter.numel(), dtype=saved.dtype, device=parameter.device)
    _shaped(flat, parameter).copy_(saved)
    return flat
