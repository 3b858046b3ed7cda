"""Saving and restoring a whole run: model, optimiser, gradient scaler, and the hook's state of every rank.

A checkpoint is a folder, which all ranks must see under the same path:

    <directory>/checkpoint-00007-step-30/
        manifest.json    step, world size, the save's name, and the bytes and the CRC-32 of each file
        shared.pt        the state that is the same on every rank, written by rank 0
        rank0.pt ...     each rank's own: residuals, buffers, random number generators, and with DiLoCo its model,
                         optimizer and scaler; written in parallel

It is written under another name, flushed to the disk, and renamed once complete: a run that is killed at any moment
leaves earlier checkpoints intact. Every file loads with `torch.load(path)` and its default arguments, which executes
nothing, and its checksums are compared first. It carries the random name of its save, so files of two saves cannot be
mixed unnoticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack

from torch.nn import Module

from commhooks.checkpoints.contents import Contents, read_contents
from commhooks.checkpoints.disk import write_tensors
from commhooks.checkpoints.folder import newest, prepare, put_in_place, remove_all_but
from commhooks.checkpoints.run import FORMAT_VERSION, HookState, Run, Saved
from commhooks.communicators.ranks import Ranks
from commhooks.errors import CheckpointError
from commhooks.state.snapshot import LoadOptions, LoadRules, refuse


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The result of `load_checkpoint`: path, step and extra data."""

    path: Path
    step: int
    extra: dict[str, Any]


def save_checkpoint(
    directory: str | os.PathLike[str],
    *,
    step: int,
    model: Module,
    optimizer: Saved | None = None,
    scaler: Saved | None = None,
    hooks: HookState | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = 2,
    flush: bool = True,
) -> Path:
    """Write one checkpoint, and return its path; call it on every rank, between the same two steps.

    - `model` is the DistributedDataParallel; rank 0's parameters are saved, and every rank's buffers that are in its
      state_dict.
    - `optimizer` and `scaler` must have the same state on every rank; rank 0's is saved. The state of a
      `ZeroRedundancyOptimizer`, which is sharded over the ranks, is consolidated on rank 0 first.
    - `hooks` is the result of `attach`, the hook's `PowerSGDState`, or a `DiLoCo`. With a `DiLoCo`, every rank's own
      model, optimizer and scaler are saved, and `model` may be a plain module.
    - `extra` is any other plain data to restore: numbers, strings, tensors, lists and dictionaries.
    - `keep` is the number of newest checkpoints to keep in the directory (None: all).
    - `flush`: wait until everything is on the disk, so that the checkpoint also survives a crash of the machine.
      Otherwise it survives only a crash of the processes, but saving takes about half the time.

    Raises `CheckpointError` on every rank if any rank cannot write, naming the file and the cause; this checkpoint's
    files are removed, and the other checkpoints stay intact. If only an older checkpoint cannot be removed ("could not
    remove older checkpoints"), the new one is complete and stays.
    """
    if keep is not None and keep < 1:
        raise CheckpointError(f"save_checkpoint(keep={keep!r}): keep must be at least 1, or None.")
    if type(step) is not int or step < 0:
        raise CheckpointError(f"save_checkpoint(step={step!r}): step must be an int of at least 0.")
    run, root = Run(model, optimizer, scaler, hooks), Path(directory)
    ranks = run.ranks()
    steps = ranks.gather("compare steps", lambda: step)
    if len(set(steps)) > 1:
        raise CheckpointError(f"save_checkpoint: ranks disagree about the step: by rank {', '.join(map(str, steps))}.")
    ranks.each("consolidate the optimizer's state", run.consolidate_optimizer)
    name: str
    (name, writing), save = ranks.first("prepare the checkpoint", lambda: (prepare(root, step), uuid.uuid4().hex))
    with _removed_if_it_fails(root / writing, ranks):
        parts = ranks.gather(
            "write the checkpoint", lambda: _write(root / writing, run, step, save, ranks, extra or {}, flush)
        )
        written: dict[str, tuple[int, str]] = {name: sums for part in parts for name, sums in part.items()}
        manifest = {
            "format_version": FORMAT_VERSION,
            "save": save,
            "step": step,
            "world_size": ranks.world_size,
            "files": {name: size for name, (size, _) in written.items()},
            "crc32": {name: crc32 for name, (_, crc32) in written.items()},
        }
        ranks.first("put the checkpoint in place", lambda: put_in_place(root, writing, name, manifest, flush=flush))
    ranks.first("remove older checkpoints", lambda: remove_all_but(keep, root))
    return root / name


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: Module,
    optimizer: Saved | None = None,
    scaler: Saved | None = None,
    hooks: HookState | None = None,
    **rules: Unpack[LoadOptions],
) -> Checkpoint | None:
    """Restore the newest checkpoint in a directory, or the one at this path; return None if there is none.

    Call it on every rank, after attaching the hook, before or between steps. `world_size`, `settings` and `missing`
    allow differences in the hook's state: see `LoadRules`. If the number of ranks is unchanged, every rank also gets
    back its own buffers, and the state of torch's random number generators.

    Raises `CheckpointError` on every rank, and changes nothing, if on any rank it is damaged or does not match the run.
    """
    allowed = LoadRules(**rules)
    run = Run(model, optimizer, scaler, hooks)
    ranks = run.ranks()
    path: Path | None = ranks.first("find the checkpoint", lambda: newest(Path(directory)))
    if path is None:
        return None
    contents = ranks.each("load the checkpoint", lambda: _read_what_fits(path, run, ranks, allowed))
    saves = ranks.gather("compare the checkpoint's save", lambda: contents.shared.get("save"))
    if len(set(saves)) > 1:
        raise CheckpointError(
            f"ranks see different checkpoints under {path}: by rank, the save {', '.join(map(str, saves))}; nothing "
            "was loaded. Every rank must see the folder that rank 0 sees."
        )
    if hooks is not None and contents.hooks is not None:
        state = contents.hooks.as_dict()
        hooks.load_state_dict(state, **rules)
    contents.load_into(run)
    return Checkpoint(path, int(contents.shared["step"]), dict(contents.shared["extra"]))


@contextlib.contextmanager
def _removed_if_it_fails(writing: Path, ranks: Ranks) -> Iterator[None]:
    """Remove the files of a checkpoint that cannot be finished: the disk may be full because of them."""
    try:
        yield
    except CheckpointError:  # all ranks raise it, so none of them is still writing
        if ranks.rank == 0:
            shutil.rmtree(writing, ignore_errors=True)  # the next save removes what is left
        raise


def _write(
    folder: Path, run: Run, step: int, save: str, ranks: Ranks, extra: Mapping[str, Any], flush: bool
) -> dict[str, tuple[int, str]]:
    """Write this rank's files, and return the size in bytes and the CRC-32 of each."""
    snapshot = None if run.hooks is None else run.hooks.snapshot()
    files = {f"rank{ranks.rank}.pt": run.own_part(snapshot, step, save)}
    if ranks.rank == 0:
        files["shared.pt"] = run.shared_part(snapshot, step, save, ranks.world_size, extra)
    return {name: write_tensors(folder / name, content, flush=flush) for name, content in files.items()}


def _read_what_fits(path: Path, run: Run, ranks: Ranks, rules: LoadRules) -> Contents:
    contents = read_contents(path, ranks.rank, ranks.world_size, rules)
    faults = contents.faults(run, rules)
    if faults:
        raise refuse(f"{path} does not fit", faults)
    return contents
