"""Taking an engine's state, and resuming from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from commhooks.communicators.disagreement import refusal_as_fingerprint
from commhooks.devices import wait_for_copies
from commhooks.engine.engine import Engine
from commhooks.engine.replay import Resumed
from commhooks.errors import AttachError, CheckpointError
from commhooks.language.bucket import Slot
from commhooks.language.entries import Declared
from commhooks.saving.misfits import Declaration, begun_again, misfits, usable
from commhooks.saving.rules import LoadRules
from commhooks.saving.saved import Saved, SavedChannel, refuse
from commhooks.saving.settings import settings_of
from commhooks.tensors import memory_order
from commhooks.version import VERSION


def snapshot_of(engine: Engine, bucket_plan: Mapping[str, Any]) -> SavedChannel:
    """Return a checkpoint's content, without copying tensors; `bucket_plan` is the DDP's addition to it.

    Call it between two steps, on every rank. Raises `CheckpointError` if names are not known, or after a failed step,
    of whose buckets some may have changed their state.
    """
    engine.stand_between_steps("state_dict")
    failure = engine.failure()
    if failure is not None:
        raise CheckpointError(
            f"state_dict: a step failed, and some of its buckets may have changed their state and others may not; "
            f"resume from the last checkpoint. The failure was: {failure}"
        )
    wait_for_copies(kept for state in engine.state.states() for kept in state.tensors.values())
    engine.state.choose(engine.compressor, engine.step)  # when loading, not all parameters' names may be known in time
    replicated, own = engine.state.export()
    buckets = {"handed_in": engine.buckets.names() or [list(names) for names in engine.resumed.plan]}
    named = engine.state.named()
    return SavedChannel(
        step=engine.step,
        world_size=engine.connection.world_size,
        policy=engine.policy,
        grad_scale=engine.loss_scale.value(),
        settings=settings_of(engine.compressor),
        shapes={name: list(parameter.shape) for name, parameter in named.items()},
        orders={name: memory_order(parameter) for name, parameter in named.items()},
        bucket_plan=buckets | dict(bucket_plan),
        kinds=engine.state.kinds(),
        replicated=replicated,
        local={engine.connection.rank: own},
    )


def declaration_of(engine: Engine, saved_size: int) -> Declaration:
    """Return what an engine's compressors declare, now and with the number of ranks that saved a state."""
    named = engine.state.named()
    now, then = (
        {name: _declared_by_each(engine, name, parameter, size) for name, parameter in named.items()}
        for size in (engine.connection.world_size, saved_size)
    )
    return Declaration(
        compressor=engine.compressor,
        named=named,
        rank=engine.connection.rank,
        world_size=engine.connection.world_size,
        now=now,
        then=then,
    )


def _declared_by_each(engine: Engine, name: str, parameter: Tensor, world_size: int) -> list[Declared]:
    """Return the entries of each compressor that may be in use for a parameter, the current compressor's first."""
    # A parameter as a compressor sees it: PyTorch's DDP passes complex gradients as pairs of real numbers.
    seen = torch.view_as_real(parameter.detach()).reshape(-1) if parameter.is_complex() else parameter
    place = engine.state.place(name, seen, world_size)
    return [compressor.state(place) for compressor in (engine.compressor, *engine.state.successors)]


def differences(engine: Engine, saved: SavedChannel, rules: LoadRules) -> list[str]:
    """List every mismatch between a saved state and the engine."""
    return misfits(saved, declaration_of(engine, saved.world_size), rules)


def agreed(engine: Engine, saved: Saved | CheckpointError, differences: Callable[[], Sequence[str]]) -> str:
    """Return the fingerprint of the state to continue from, once every rank has found that it matches.

    Raises `CheckpointError` on every rank if it does not match on any rank, or if ranks pass different ones. A rank
    that cannot even read its state passes the error instead. If the connection is not open yet, ranks compare the
    fingerprint when it is.
    """
    checked = saved
    if isinstance(saved, Saved):
        try:
            faults = differences()
        except Exception as error:  # whatever damaged data cause: the other ranks are waiting for an answer
            faults = [f"it is damaged ({type(error).__name__}: {error})"]
        checked = refuse(f"rank {engine.connection.rank}: the checkpoint does not fit", faults) if faults else saved
    if isinstance(checked, CheckpointError):
        fingerprint = refusal_as_fingerprint(checked)
    else:
        fingerprint = f"loaded state, step: {checked.step}\nloaded state, digest: {checked.digest()}"
    if engine.scheduler is not None and (named := engine.state.named()):
        try:
            engine.agree(fingerprint, "load_state_dict", next(iter(named.values())).device)
        except AttachError as error:
            if not isinstance(checked, CheckpointError):
                raise CheckpointError(f"load_state_dict: nothing was loaded. {error}") from error
    if isinstance(checked, CheckpointError):
        raise checked
    return fingerprint


@torch.inference_mode(False)  # as Engine.run
@torch.no_grad()
def restore(engine: Engine, saved: SavedChannel, rules: LoadRules, fingerprint: str = "", uncut_steps: int = 0) -> None:
    """Continue from a state that matches, and on which all ranks have `agreed`; call it between two steps.

    The DDP makes `uncut_steps` steps before it splits its buckets.
    """
    declared = declaration_of(engine, saved.world_size)
    for text in _warnings(engine, saved, declared, rules):
        # The stack level is that of who calls load_state_dict: the two decorators have frames of their own.
        warnings.warn(f"commhooks: {text}", stacklevel=7)
    saved = usable(saved, declared, rules)
    kinds = saved.kinds | {
        name: {e: what for e, what in entries.items() if not what.is_own} | saved.kinds.get(name, {})
        for name, entries in declared.kept(saved).items()
    }
    unchecked = saved.shapes if not declared.named and rules.missing == "refuse" else None
    own = saved.entries_for(declared.rank, declared.world_size, rules)
    engine.state.load(saved.replicated, own, kinds, unchecked, saved.orders)
    handed_in = saved.bucket_plan.get("handed_in", [])
    engine.go_on_from(saved.step, saved.grad_scale, Resumed(fingerprint, handed_in, uncut_steps))


def _warnings(engine: Engine, saved: SavedChannel, declared: Declaration, rules: LoadRules) -> Iterator[str]:
    """Yield what is lost, or may differ, although the rules allow it."""
    if again := begun_again(saved, declared):
        listed = ", ".join(again[:8]) + (f" and {len(again) - 8} more" if len(again) > 8 else "")
        yield f"with this run's settings, {listed} starts from scratch."
    if saved.commhooks != VERSION:  # its compressors may have sent other messages
        yield (
            f"the checkpoint was saved by commhooks {saved.commhooks}, and this is {VERSION}. All of its state is "
            "continued, but the run may differ from what it would have been, as with another seed."
        )
    if rules.world_size != "keep" or declared.rank > 0:
        return
    ranks, of = declared.world_size, f" of {engine.channel.name}" * bool(engine.channel.name)
    lost = [f"that of rank {number} (norm {norm:.4g})" for number, norm in saved.lost_with(ranks).items()]
    if lost:
        yield f"what ranks that have left had not sent{of} is lost: {', '.join(lost)}."
    shares = any(what.kind == "share" for entries in saved.kinds.values() for what in entries.values())
    if shares and ranks != saved.world_size:
        yield (
            f"{ranks} ranks serve other blocks{of} than {saved.world_size} did: the errors of served blocks start from "
            "zero."
        )


@torch.inference_mode(False)  # as Engine.run
@torch.no_grad()
def lay_out(engine: Engine, sparse: Set[Tensor]) -> None:
    """Lay out all state that the compressor will ever keep; none for `sparse` parameters.

    A checkpoint that is read into existing tensors (`torch.distributed.checkpoint`) thus finds a place for everything.
    """
    for name, parameter in engine.state.named().items():
        gradient = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        if parameter not in sparse and engine.compressor.takes(gradient):
            flat = parameter.detach().reshape(-1)  # for its size: apart from that only dtype and device matter
            declared = engine.compressor.state(engine.state.place(name, parameter))
            engine.state.lay_out_entries(Slot(parameter, flat, engine.state.of(parameter)), declared)
