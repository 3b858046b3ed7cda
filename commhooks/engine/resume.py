"""Saving an engine's state, and resuming from it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from commhooks.communicators.disagreement import refusal_as_fingerprint
from commhooks.devices import wait_for_copies
from commhooks.engine.engine import Engine
from commhooks.engine.replay import Resumed
from commhooks.errors import AttachError, CheckpointError
from commhooks.language.bucket import Slot
from commhooks.language.entries import Declared, Entry
from commhooks.state.fitness import begun_again, misfits
from commhooks.state.formats import VERSION, description_of
from commhooks.state.groups import Snapshots
from commhooks.state.settings import settings_of
from commhooks.state.snapshot import LoadRules, Snapshot, refuse
from commhooks.tensors import memory_order


def snapshot_of(engine: Engine, bucket_plan: Mapping[str, Any]) -> Snapshot:
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
    return Snapshot(
        step=engine.step,
        world_size=engine.line.world_size,
        policy=engine.policy,
        grad_scale=engine.loss_scale.value(),
        settings=settings_of(engine.compressor),
        shapes={name: list(parameter.shape) for name, parameter in named.items()},
        orders={name: memory_order(parameter) for name, parameter in named.items()},
        bucket_plan=buckets | dict(bucket_plan),
        kinds=engine.state.kinds(),
        replicated=replicated,
        local={engine.line.rank: own},
    )


def differences(engine: Engine, snapshot: Snapshot, rules: LoadRules) -> list[str]:
    """List every mismatch between a snapshot and the engine."""
    named = engine.state.named()
    where = engine.line.world_size, engine.line.rank
    kept = _declared(engine, snapshot)
    found = snapshot.differences(engine.compressor, named, kept, *where, rules)
    if found:
        return found
    if rules.missing == "reset":
        snapshot = snapshot.without_entries_not_in(kept, engine.line.world_size)
    declared = {name: _by_each(engine, name, parameter) for name, parameter in named.items()}
    return misfits(snapshot, named, declared, engine.line.world_size, rules)


def _by_each(engine: Engine, name: str, parameter: Tensor) -> list[Declared]:
    """Return the entries of each compressor that may be in use for a parameter, the current compressor's first."""
    compressors, compressed = (engine.compressor, *engine.state.successors), _as_compressed(parameter)
    return [compressor.state(engine.state.place(name, compressed)) for compressor in compressors]


def _declared(engine: Engine, snapshot: Snapshot) -> dict[str, Declared]:
    """Return the entries, for each parameter, of the compressor and of those that may take over from it.

    If several use one name for different entries, the current compressor's counts or, if it has none, the saved one.
    """
    sizes = snapshot.world_size, engine.line.world_size
    declared: dict[str, Declared] = {}
    for name, parameter in engine.state.named().items():
        own: dict[str, Entry] = {}
        for compressor in (*engine.state.successors, engine.compressor):
            then, now = (compressor.state(engine.state.place(name, _as_compressed(parameter), size)) for size in sizes)
            for entry, what in {**then, **now}.items():
                saved = snapshot.kinds.get(name, {}).get(entry)
                was_saved = saved is not None and description_of(saved) == description_of(what)
                if entry not in own or was_saved or compressor is engine.compressor:
                    own[entry] = what
        declared[name] = own
    return declared


def _as_compressed(parameter: Tensor) -> Tensor:
    """Return a parameter as a compressor sees it: PyTorch's DDP passes complex gradients as pairs of real numbers."""
    return torch.view_as_real(parameter.detach()).reshape(-1) if parameter.is_complex() else parameter


@torch.inference_mode(False)  # as Engine.run
@torch.no_grad()
def restore(engine: Engine, read: Snapshot | CheckpointError, rules: LoadRules, uncut_steps: int) -> None:
    """Continue from a snapshot; call it between two steps, on every rank.

    Raises `CheckpointError` on every rank, and changes nothing, if the snapshot does not match on any rank, or if ranks
    pass different ones. A rank that cannot even read its snapshot passes the error instead. The DDP makes `uncut_steps`
    steps before it splits its buckets.
    """
    engine.stand_between_steps("load_state_dict")
    rank, world_size = engine.line.rank, engine.line.world_size
    checked = _checked(engine, read, rules) if isinstance(read, Snapshot) else read
    fingerprint = agreed(engine, checked)
    if isinstance(checked, CheckpointError):
        raise checked
    # The stack level of warnings is that of who calls load_state_dict: the two decorators have frames of their own.
    _warn_of_new_beginnings(engine, checked)
    _warn_of_another_version(checked)
    if rules.world_size == "keep" and rank == 0:
        _warn_of_losses(engine, checked)
    declared = _declared(engine, checked)
    if rules.missing == "reset":
        checked = checked.without_entries_not_in(declared, world_size)
    kinds = checked.kinds | {
        name: {e: what for e, what in entries.items() if not what.is_own} | checked.kinds.get(name, {})
        for name, entries in declared.items()
    }
    unchecked = checked.shapes if not engine.state.named() and rules.missing == "refuse" else None
    own = checked.entries_for(rank, world_size, rules)
    engine.state.load(checked.replicated, own, kinds, unchecked, checked.orders)
    engine.go_on_from(checked.step, checked.grad_scale, Resumed(fingerprint, checked.buckets_handed_in(), uncut_steps))


def _warn_of_new_beginnings(engine: Engine, checked: Snapshot) -> None:
    """Warn of replicated state whose saved size does not match this run's settings."""
    named = engine.state.named()
    declared = {name: _by_each(engine, name, parameter) for name, parameter in named.items()}
    again = begun_again(checked, named, declared)
    if again:
        listed = ", ".join(again[:8]) + (f" and {len(again) - 8} more" if len(again) > 8 else "")
        warnings.warn(f"commhooks: with this run's settings, {listed} starts from scratch.", stacklevel=7)


def _warn_of_another_version(checked: Snapshot) -> None:
    """Warn if another version of commhooks saved a checkpoint: its compressors may have sent other messages."""
    if checked.commhooks != VERSION:
        warnings.warn(
            f"commhooks: the checkpoint was saved by commhooks {checked.commhooks}, and this is {VERSION}. All of its "
            "state is continued, but the run may differ from what it would have been, as with another seed.",
            stacklevel=7,
        )


def _warn_of_losses(engine: Engine, checked: Snapshot) -> None:
    """Warn of residuals lost with ranks that have left, with norms, and of lost errors of served blocks."""
    ranks, of = engine.line.world_size, f" of {engine.lane.name}" * bool(engine.lane.name)
    lost = [f"that of rank {number} (norm {norm:.4g})" for number, norm in checked.lost_with(ranks).items()]
    if lost:
        warnings.warn(
            f"commhooks: what ranks that have left had not sent{of} is lost: {', '.join(lost)}.", stacklevel=7
        )
    shares = any(what.kind == "share" for entries in checked.kinds.values() for what in entries.values())
    if shares and ranks != checked.world_size:
        warnings.warn(
            f"commhooks: {ranks} ranks serve other blocks{of} than {checked.world_size} did: the errors of served "
            "blocks start from zero.",
            stacklevel=7,
        )


def _checked(engine: Engine, read: Snapshot, rules: LoadRules) -> Snapshot | CheckpointError:
    what = f"rank {engine.line.rank}: the checkpoint does not fit"
    try:
        faults = differences(engine, read, rules)
    except Exception as error:  # whatever damaged data cause: the other ranks are waiting for an answer
        faults = [f"it is damaged ({type(error).__name__}: {error})"]
    return refuse(what, faults) if faults else read


def agreed(engine: Engine, loaded: Snapshot | Snapshots | CheckpointError) -> str:
    """Return the fingerprint of the loaded state; if the line is open, raise unless every rank loads the same."""
    if isinstance(loaded, CheckpointError):
        fingerprint = refusal_as_fingerprint(loaded)
    else:
        fingerprint = f"loaded state, step: {loaded.step}\nloaded state, digest: {loaded.digest()}"
    if engine.scheduler is not None and (named := engine.state.named()):
        try:
            engine.agree(fingerprint, "load_state_dict", next(iter(named.values())).device)
        except AttachError as error:
            if not isinstance(loaded, CheckpointError):
                raise CheckpointError(f"load_state_dict: nothing was loaded. {error}") from error
    return fingerprint


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
