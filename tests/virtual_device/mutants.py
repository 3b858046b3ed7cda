"""Mutants of the CUDA code: what a mistake would be, where it is put in, and how the virtual device finds it.

They prove the device: a check that reports nothing is worth something only if it reports these.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.virtual_device import scenarios
from tests.virtual_device.scenarios import Scenario

RACE, NUMBER, WAIT = "race", "number", "wait"
"""How a mutant is found: two accesses in no order, other bits than in order, or a place where the host waits."""


@dataclass(frozen=True)
class Mutant:
    """A mistake, and how it is found."""

    name: str
    """What is wrong."""
    place: str
    """What is replaced: "module:name" or "module:Class.name"."""
    instead: Callable[[Any], Any]
    """Returns what takes the place, given what was there."""
    scenario: Scenario
    """In which it is found."""
    by: tuple[str, ...]
    """What finds it in late; races and waits do so in every schedule."""


def table(mutants: Sequence[Mutant]) -> str:
    """Return a table of mutants in Markdown, as docs/guide/virtual-device.md shows it."""
    lines = ["| mistake | replaced | found in | by |", "| --- | --- | --- | --- |"]
    for mutant in mutants:
        replaced = f"`{mutant.place.partition(':')[2]}` of `{_file(mutant.place)}`"
        lines.append(f"| {mutant.name} | {replaced} | {mutant.scenario.name} | {', '.join(mutant.by)} |")
    return "\n".join(lines) + "\n"


def _file(place: str) -> str:
    return place.partition(":")[0].replace(".", "/") + ".py"


class NotAppliedError(AssertionError):
    """A mutant changes nothing: what it replaces was not used."""


@contextlib.contextmanager
def put_in(mutant: Mutant) -> Iterator[None]:
    """Put a mutant in, within a `with`; raise `NotAppliedError` if its place was not used there.

    Raises `AttributeError` or `ModuleNotFoundError` if the place is gone.
    """
    module, _, path = mutant.place.partition(":")
    *classes, name = path.split(".")
    owner = functools.reduce(getattr, classes, importlib.import_module(module))
    mistaken = mutant.instead(getattr(owner, name))
    calls = 0

    @functools.wraps(mistaken)
    def counted(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return mistaken(*args, **named)

    with mock.patch.object(owner, name, counted):
        yield
    if not calls:
        raise NotAppliedError(f"mutant {mutant.name!r} no longer applies: {mutant.place} was not called")


# ---- what takes a place, given what was there ----
def _nothing(_there: Any) -> Any:
    return lambda *args, **named: None


def _everything(_there: Any) -> Any:
    return lambda scratch, kept, finite: finite


def _on_the_callers_stream(there: Any) -> Any:
    def there_on_default(*args: Any) -> Any:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return there(*args)

    return there_on_default


def _read_before_the_wait(there: Any) -> Any:
    def end_step(engine: Any) -> None:
        there(engine)
        for *_, residual in engine.state.residuals():
            residual.mul_(1 if float(residual.sum()) >= 0 else 2)

    return end_step


def _written_on_the_callers_stream(there: Any) -> Any:
    def end_step(engine: Any) -> None:
        there(engine)
        for *_, residual in engine.state.residuals():
            residual.mul_(1)

    return end_step


def _waiting_host(there: Any) -> Any:
    def wait(*args: Any) -> None:
        there(*args)
        torch.cuda.current_stream().synchronize()

    return wait


def _from_memory_that_is_freed(there: Any) -> Any:
    def begin(compressor: Any, view: Any, context: Any) -> Any:
        copy = view.memory.clone()  # in memory of the caller's stream, which gets it back at the exchange's end

        def exchange() -> Any:
            view.memory.copy_(copy)
            yield from there(compressor, view, context)

        return exchange()

    return begin


def _in_one_pinned_buffer(there: Any) -> Any:
    buffers: dict[tuple[int, ...], Tensor] = {}

    def drawn(shape: tuple[int, ...], seed: int, like: Tensor) -> Tensor:
        buffer = buffers.setdefault(shape, torch.empty(shape, pin_memory=True))
        return buffer.copy_(there(shape, seed, torch.zeros(()))).to(like, non_blocking=True)

    return drawn


def _marked_before_the_copy(_there: Any) -> Any:
    def queue(kept: Tensor, value: Tensor) -> Any:
        mark = torch.cuda.current_stream().record_event()
        kept.copy_(value, non_blocking=True)
        return mark

    return queue


def _shared_by_all(_there: Any) -> Any:
    memory: dict[Any, Tensor] = {}

    def room(scratch: Any, shape: torch.Size) -> Tensor:
        key = scratch._device, shape
        if key not in memory:
            memory[key] = torch.empty(shape, dtype=scratch._dtype, device=scratch._device)
        return memory[key]

    return room


def _messages_of_all(there: Any) -> Any:
    messages: dict[Any, Any] = {}

    def take(packer: Any, layout: Any, make: Any) -> Any:
        kind, parts = layout[:4], layout[4:]
        key = *kind, *(part[1:] for part in parts)  # not whose they are
        if key not in messages:
            messages[key] = there(packer, layout, make)
        return messages[key]

    return take


def _blocking_copies(there: Any) -> Any:
    def add(memories: Sequence[Tensor], residuals: Sequence[Tensor], decay: float = 1.0) -> None:
        there(memories, [kept.to(memories[0].device) for kept in residuals], decay)

    return add


MUTANTS: Sequence[Mutant] = (
    Mutant("the side stream does not wait for the gradients",
           "commhooks.engine.engine:mark_of", _nothing, scenarios.PLAIN, (RACE, NUMBER)),
    Mutant("the same, with a step's buckets together",
           "commhooks.engine.engine:mark_of", _nothing, scenarios.FUSED, (RACE, NUMBER)),
    Mutant("no stream waits for a collective of sums",
           "commhooks.communicators.process_group:WorkPending.wait", _nothing, scenarios.PLAIN, (RACE, NUMBER)),
    Mutant("no stream waits for an exchange of codes",
           "commhooks.communicators.process_group:WorkPending.wait", _nothing, scenarios.CODES, (RACE, NUMBER)),
    Mutant("collectives are issued on the caller's stream",
           "commhooks.communicators.process_group:ProcessGroupCommunicator.start", _on_the_callers_stream,
           scenarios.PLAIN, (RACE, NUMBER)),
    Mutant("a future is completed on the caller's stream",
           "commhooks.scheduling.task:BucketTask.succeed", _on_the_callers_stream, scenarios.PLAIN, (RACE, NUMBER)),
    Mutant("a future does not know that its tensor is on a device",
           "commhooks.engine.engine:future_on", lambda _: lambda device: torch.futures.Future(),
           scenarios.PLAIN, (RACE, NUMBER)),
    Mutant("ddp_core takes a mean without waiting for its future",
           "ddp_core.hooks:Pending.result", lambda _: lambda pending: pending.bucket.buffer(),
           scenarios.DDP, (RACE, NUMBER)),
    Mutant("ddp_core takes a sum without waiting for its collective",
           "ddp_core.hooks:result_of", _nothing, scenarios.DDP_ALONE, (RACE,)),
    Mutant("ddp_core reads which parameters are unused before they are counted",
           "ddp_core.features.unused:finish", _nothing, scenarios.DDP_ALONE, (RACE,)),
    Mutant("a residual is written on the caller's stream, and read on the side stream",
           "commhooks.engine.engine:Engine.end_step", _written_on_the_callers_stream, scenarios.PLAIN, (RACE,)),
    Mutant("memory of the caller's stream is freed while the side stream reads it",
           "commhooks.engine.engine:begin_exchange", _from_memory_that_is_freed, scenarios.PLAIN, (RACE, NUMBER)),
    Mutant("loaded state is freed while another stream reads it (no keep_until_read)",
           "commhooks.state.table:keep_until_read", _nothing, scenarios.LOADED, (RACE, NUMBER)),
    Mutant("a step is judged on one stream before means are there on the other",
           "commhooks.engine.undo:mark_of", _nothing, scenarios.ATOMIC, (RACE,)),
    Mutant("what a step is judged by is freed while another stream reads it",
           "commhooks.engine.undo:keep_until_read", _nothing, scenarios.ATOMIC, (RACE, NUMBER)),
    Mutant("the side streams do not join between steps",
           "commhooks.devices:SideStream.join", _nothing, scenarios.ATOMIC_ROUNDS, (RACE,)),
    Mutant("two models share scratch memory",
           "commhooks.language.tile:Scratch.room", _shared_by_all, scenarios.TWO_MODELS, (RACE,)),
    Mutant("two models share messages",
           "commhooks.scheduling.packing:Packer._take", _messages_of_all, scenarios.TWO_MODELS, (RACE,)),
    Mutant("random bases are drawn in one pinned buffer, which the device has yet to read",
           "commhooks.compressors.powersgd.powersgd:seeded_normal", _in_one_pinned_buffer, scenarios.COLD,
           (RACE, NUMBER)),
    Mutant("the host reads a residual in its memory before it waits",
           "commhooks.engine.engine:Engine.end_step", _read_before_the_wait, scenarios.HOST_LOSS_SCALE,
           (RACE, NUMBER)),
    Mutant("a copy to the host is marked before it, not after it",
           "commhooks.devices:_queue", _marked_before_the_copy, scenarios.HOST_LOSS_SCALE, (RACE, NUMBER)),
    Mutant("a changing loss scale does not wait for copies",
           "commhooks.state.loss_scale:wait_for_copies", _nothing, scenarios.HOST_LOSS_SCALE, (RACE, NUMBER)),
    Mutant("atomic alone does not wait for copies",
           "commhooks.engine.undo:wait_for_copies", _nothing, scenarios.HOST_ATOMIC, (RACE, NUMBER)),
    Mutant("the state of a parameter that no rank used is written",
           "commhooks.language.tile:Scratch.permits", _everything, scenarios.HOST_UNUSED, (NUMBER,)),
    Mutant("the guard of a rank that has joined does not wait for copies",
           "commhooks.engine.guards:wait_for_copies", _nothing, scenarios.HOST_JOINED, (RACE, NUMBER)),
    Mutant("loading does not wait for copies",
           "commhooks.state.table:wait_for_copies", _nothing, scenarios.HOST_LOADED, (RACE,)),
    Mutant("saving does not wait for copies",
           "commhooks.saving.resumption:wait_for_copies", _nothing, scenarios.HOST_SAVED, (RACE, NUMBER)),
    Mutant("saving waits for the current device, which may be another",
           "commhooks.saving.resumption:wait_for_copies", lambda _: lambda tensors: torch.cuda.synchronize(),
           scenarios.HOST_SAVED, (RACE, NUMBER, WAIT)),
    Mutant("saving does not wait for the side streams",
           "commhooks.devices:SideStream.let_caller_follow", _nothing, scenarios.SAVED_UNDER_WAY, (RACE, NUMBER)),
    Mutant("the basis of a matrix that no rank used is written",
           "commhooks.language.tile:Scratch.permits_each", _everything, scenarios.HOST_UNUSED, (NUMBER,)),
    Mutant("a replacement does not wait for copies",
           "commhooks.state.handover:wait_for_copies", _nothing, scenarios.HOST_REPLACED, (RACE, NUMBER)),
    Mutant("metrics do not wait for copies",
           "commhooks.exchange.metrics:wait_for_copies", _nothing, scenarios.HOST_METRICS, (RACE, NUMBER)),
    Mutant("the host waits for each collective",
           "commhooks.communicators.process_group:WorkPending.wait", _waiting_host, scenarios.ALONE, (WAIT,)),
    Mutant("a compressor reads its verdict (.item())",
           "commhooks.compressors.powersgd.powersgd:surely", lambda _: bool, scenarios.ALONE, (WAIT,)),
    Mutant("atomic reads its verdict",
           "commhooks.engine.undo:runs_later", lambda _: lambda tensor: False, scenarios.ALONE, (WAIT,)),
    Mutant("residuals are copied from the host without non_blocking",
           "commhooks.language.tile:add_residuals", _blocking_copies, scenarios.ALONE_ON_HOST, (WAIT,)),
    Mutant("the host reads whose turn it was before that has arrived",
           "commhooks.scheduling.turns:_Headers.have_arrived", lambda _: lambda headers: True,
           scenarios.TWO_CHANNELS, (RACE,)),
    Mutant("whose turn it is is copied from memory that is not pinned",
           "commhooks.scheduling.channels:copied_to", lambda _: lambda device, tensor: tensor.to(device),
           scenarios.TWO_CHANNELS, (WAIT,)),
    Mutant("a mean is spoilt on the caller's stream if it was another's turn",
           "commhooks.scheduling.channels:spoil", _on_the_callers_stream, scenarios.TWO_CHANNELS, (RACE, NUMBER)),
)  # fmt: skip


if __name__ == "__main__":  # python -m tests.virtual_device.mutants > docs/guide/virtual-device/mutants.md
    print(table(MUTANTS), end="")
