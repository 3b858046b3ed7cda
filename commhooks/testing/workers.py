"""One compressor on N workers of this process, over the lockstep communicator, for trying laws."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commhooks.communicators import Collective, LockstepCommunicator, LockstepGroup, Pending
from commhooks.communicators.collective import Traffic
from commhooks.engine.engine import Engine
from commhooks.engine.replay import Resumed
from commhooks.language.compressor import Compressor
from commhooks.language.entries import Declared, blocks_served
from commhooks.language.place import Place
from commhooks.saving.resumption import differences, lay_out, restore, snapshot_of
from commhooks.saving.rules import LoadRules
from commhooks.saving.saved import SavedChannel, refuse
from commhooks.scheduling.ledger import Ledger
from commhooks.scheduling.lockstep import LockstepConnection, run_in_turns
from commhooks.state.table import StateTable


class BrokenLawError(AssertionError):
    """A law does not hold; the message names the parameter, the step, the rank, and the difference."""


class GivenBucket:
    """A bucket like those that a DDP hands in."""

    def __init__(self, number: int, memory: Tensor, members: list[Tensor], *, is_last: bool) -> None:
        self._number = number
        self._memory = memory
        self._members = members
        self._is_last = is_last

    def index(self) -> int:
        """Return its number in the step."""
        return self._number

    def buffer(self) -> Tensor:
        """Return the gradients."""
        return self._memory

    def parameters(self) -> list[Tensor]:
        """Return whose gradients they are."""
        return self._members

    def is_last(self) -> bool:
        """Return whether the step ends with it."""
        return self._is_last


class BucketApart(GivenBucket):
    """A bucket whose mean goes to other memory."""

    def __init__(self, number: int, memory: Tensor, members: list[Tensor], *, is_last: bool, output: Tensor) -> None:
        super().__init__(number, memory, members, is_last=is_last)
        self._output = output

    def output(self) -> Tensor:
        """Return the memory for the mean."""
        return self._output


class _Watched:
    """A worker's end of its group, which notes the kinds of collectives, and in which dtypes sums are sent."""

    def __init__(self, inner: LockstepCommunicator, kinds: set[str], summed: set[torch.dtype]) -> None:
        self.rank, self.world_size = inner.rank, inner.world_size
        self._inner, self._kinds, self._summed = inner, kinds, summed

    def start(self, collective: Collective) -> Pending:
        """Submit this worker's collective."""
        self._kinds.add(collective.kind)
        if collective.kind in ("all-reduce", "reduce-scatter"):
            self._summed.add(collective.tensor.dtype)
        return self._inner.start(collective)


class Workers:
    """Every worker's engine, for `parameters` in the given number of buckets; settings are those of `Engine`.

    `apart`: means do not take the gradients' place.
    """

    def __init__(
        self,
        compressor: Compressor,
        world_size: int,
        parameters: Sequence[Tensor],
        names: Sequence[str] | None = None,
        buckets: int = 1,
        policy: Any = "fifo",
        storage: Any = "fp32",
        apart: bool = False,
        **settings: Any,
    ) -> None:
        self.compressor = compressor
        self.is_apart = apart
        self.world_size = world_size
        self.parameters: list[Tensor] = list(parameters)
        self.summed_in: set[torch.dtype] = set()
        """The dtypes in which sums were sent."""
        self.asked_for: set[str] = set()
        """The kinds of collectives that were asked for."""
        ends = LockstepGroup(world_size).communicators()
        self.connections: list[LockstepConnection] = [
            LockstepConnection(_Watched(end, self.asked_for, self.summed_in), policy) for end in ends
        ]
        self.engines: list[Engine] = [
            Engine(compressor, connection, residuals=storage, **settings) for connection in self.connections
        ]
        order = list(range(len(self.parameters)))
        self.names: list[str] = list(names or [f"layer{i}" for i in order])
        for engine in self.engines:
            may_be_unused = settings.get("may_be_unused", False)
            engine.bind(list(zip(self.names, self.parameters, strict=True)), may_be_unused=may_be_unused)
        self.deal([order[bucket::buckets] for bucket in range(buckets)])

    @property
    def states(self) -> list[StateTable]:
        """Every worker's state."""
        return [engine.state for engine in self.engines]

    @property
    def step_number(self) -> int:
        """The number of steps so far; it can be set."""
        return self.engines[0].step

    @step_number.setter
    def step_number(self, step: int) -> None:
        for engine in self.engines:
            engine.go_on_from(step, engine.loss_scale.value(), Resumed())

    @property
    def ledger(self) -> Ledger:
        """The first worker's counts, by parameter."""
        return self.engines[0].channel.ledger

    @property
    def traffic(self) -> Traffic:
        """The first worker's statistics."""
        return self.engines[0].channel.traffic or Traffic()

    @property
    def memories(self) -> list[Tensor]:
        """The memory of every worker's buckets."""
        return [memory for own in self._memories for memory in own]

    def step(self, gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Average gradients[rank][parameter]; return every worker's means, in the same form.

        Raises whatever the compressor raises, with a note of what it was tried on.
        """
        step = self.step_number
        try:
            return self._step(gradients)
        except Exception as error:
            error.add_note(f"in step {step} {self}")
            raise

    def __str__(self) -> str:
        shapes = ", ".join(shape_of(parameter) for parameter in self.parameters)
        ranks = f"{self.world_size} worker{'s' * (self.world_size > 1)}"
        dtype = str(self.parameters[0].dtype).removeprefix("torch.")
        return f"on {ranks}, with {dtype} parameters of shapes {shapes} in {len(self.dealt)} bucket(s)"

    def _step(self, gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        futures = []
        for rank, engine in enumerate(self.engines):
            for number, (memory, members) in enumerate(zip(self._memories[rank], self.dealt, strict=True)):
                memory.copy_(torch.cat([flat(gradients[rank][i], self.parameters[i]) for i in members]))
                is_last = number == len(self.dealt) - 1
                owners, mean = [self.parameters[i] for i in members], self._outputs[rank][number]
                bucket = GivenBucket(number, memory, owners, is_last=is_last)
                if self.is_apart:
                    bucket = BucketApart(number, memory, owners, is_last=is_last, output=mean.fill_(torch.nan))
                futures.append((mean, engine.run(bucket)))
        run_in_turns(self.connections)
        for mean, future in futures:
            if not future.done():
                raise BrokenLawError("a rank asked for a collective that the others did not ask for")
            assert future.value().data_ptr() == mean.data_ptr()
        return [self._means(own) for own in self._outputs]

    def saved(self) -> bytes:
        """Return every worker's state_dict as a file of torch.save holds them, for buckets that may change."""
        file = io.BytesIO()
        for engine in self.engines:
            lay_out(engine, set())  # as `Handle.state_dict` does
        torch.save([snapshot_of(engine, {}).as_dict() | {"bucket_plan": {}} for engine in self.engines], file)
        return file.getvalue()

    def resume(self, saved: bytes) -> None:
        """Go on from what other workers saved; read as torch.load reads by default."""
        for engine, state in zip(self.engines, torch.load(io.BytesIO(saved)), strict=True):
            take_up(engine, state)

    def kinds(self) -> dict[str, Declared]:
        """Return the entries that the compressor declares, by parameter's name."""
        named = zip(self.names, self.parameters, strict=True)
        return {name: self.compressor.state(Place(name, parameter, self.world_size)) for name, parameter in named}

    def deal(self, dealt: list[list[int]]) -> None:
        """Put the parameters of these numbers into one bucket each."""
        self.dealt = dealt
        sizes = [sum(self.parameters[i].numel() for i in members) for members in dealt]
        dtypes = [self.parameters[members[0]].dtype for members in dealt]
        self._memories = [
            [torch.zeros(size, dtype=dtype, device="cpu") for size, dtype in zip(sizes, dtypes, strict=True)]
            for _ in range(self.world_size)
        ]
        self._outputs = self._memories
        if self.is_apart:
            self._outputs = [[torch.empty_like(memory) for memory in own] for own in self._memories]

    def residual(self, rank: int, index: int) -> Tensor:
        """Return a worker's residual for a parameter, in the parameter's shape; zeros where it keeps none."""
        parameter = self.parameters[index]
        kept = self.states[rank].of(parameter).tensors.get("residual")
        if kept is None:
            return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
        return kept.reshape(-1).as_strided(parameter.shape, parameter.stride())

    def unsent(self, index: int) -> Tensor:
        """Return the part that has not reached the mean yet, in float64: the residuals' mean, and the servers' shares.

        Entries are found by kind, whatever their names.
        """
        parameter = self.parameters[index]
        ranks = range(self.world_size)
        total = torch.zeros_like(parameter, dtype=torch.float64)
        for rank in ranks:
            for kept in self.states[rank].of(parameter).of_kind("residual").values():
                total += kept.double().as_strided(parameter.shape, parameter.stride()) / self.world_size
        for rank in ranks:
            state = self.states[rank].of(parameter)
            for entry, served in state.of_kind("share").items():
                holders = state.entries[entry].holders
                if rank % holders == 0:
                    total += self._whole(index, served, rank // holders, self.world_size // holders)
        return total

    def _whole(self, index: int, served: Tensor, server: int, servers: int) -> Tensor:
        """Return one server's blocks in the shape of their parameter, with zeros elsewhere."""
        parameter, block = self.parameters[index], served.shape[1]
        whole = torch.zeros(parameter.numel() // block, block, dtype=torch.float64, device="cpu")
        whole[list(blocks_served(self.names[index], len(whole), server, servers))] = served.double()
        memory = torch.zeros(parameter.numel(), dtype=torch.float64, device="cpu")
        memory[: whole.numel()] = whole.view(-1)
        return memory.as_strided(parameter.shape, parameter.stride())

    def _means(self, memories: Sequence[Tensor]) -> list[Tensor]:
        means: dict[int, Tensor] = {}
        for memory, members in zip(memories, self.dealt, strict=True):
            parts = memory.clone().split([self.parameters[i].numel() for i in members])
            means |= dict(zip(members, parts, strict=True))
        return [
            means[i].as_strided(p.shape, p.stride(), means[i].storage_offset()) for i, p in enumerate(self.parameters)
        ]


def flat(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient's elements in the parameter's order in memory."""
    laid_out = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
    laid_out.copy_(gradient)
    return laid_out.as_strided((parameter.numel(),), (1,))


def shape_of(parameter: Tensor) -> str:
    """Return a parameter's shape as text: "24×40", or "0-dim"."""
    return "×".join(map(str, parameter.shape)) or "0-dim"


def take_up(engine: Engine, state: Mapping[str, Any], rules: LoadRules | None = None) -> None:
    """Have a worker's engine continue from a state; raise `CheckpointError`, and change nothing, if it does not match.

    This is `Handle.load_state_dict` for an engine without a handle.
    """
    saved, allowed = SavedChannel.from_dict(state), rules or LoadRules()
    if faults := differences(engine, saved, allowed):
        raise refuse(f"rank {engine.connection.rank}: the checkpoint does not fit", faults)
    restore(engine, saved, allowed)


def zeros(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return a parameter of zeros for each shape."""
    return [torch.zeros(shape, dtype=dtype, device="cpu") for shape in shapes]


def normal(parameters: Sequence[Tensor], world_size: int, seed: int, scale: float = 1.0) -> list[list[Tensor]]:
    """Return one standard normal gradient for each rank and parameter."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randn(p.shape, generator=generator, dtype=torch.float32, device="cpu").mul_(scale).to(p.dtype)
            for p in parameters
        ]
        for _ in range(world_size)
    ]


def mean_of(gradients: Sequence[Sequence[Tensor]], index: int) -> Tensor:
    """Return the true mean over ranks, in float64."""
    return torch.stack([rank[index].double() for rank in gradients]).mean(0)


def largest(*tensors: Tensor) -> float:
    """Return the largest magnitude of any element; 0 if there are none. Raise `BrokenLawError` for a NaN."""
    magnitudes = [float(tensor.double().abs().max()) for tensor in tensors if tensor.numel()]
    if any(map(math.isnan, magnitudes)):
        raise BrokenLawError("a NaN among means or state, from finite gradients")
    return max(magnitudes, default=0.0)
