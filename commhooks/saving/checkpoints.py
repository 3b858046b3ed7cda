"""Saving and restoring a whole run: model, optimiser, gradient scaler, and the hook's state of every rank.

A checkpoint is a folder, which all ranks must see under the same path:

    <directory>/checkpoint-00007-step-30/
        manifest.json    step, world size, the save's name and writer, and the bytes and the CRC-32 of each file
        shared.pt        the state that is the same on every rank, written by rank 0
        rank0.pt ...     each rank's own: residuals, buffers, random number generators, and with DiLoCo its model,
                         optimizer and scaler; written in parallel

It is written under another name, flushed to the disk, and renamed once complete: a run that is killed at any moment
leaves earlier checkpoints intact, and so does another run that saves into the same directory. Every file loads with
`torch.load(path)` and its default arguments, which executes nothing, and its checksums are compared first. It carries
the random name of its save, so files of two saves cannot be mixed unnoticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack

from torch.nn import Module

from commhooks.communicators.ranks import Ranks
from commhooks.errors import CheckpointError
from commhooks.saving.contents import Contents, read_contents
from commhooks.saving.files import write_tensors
from commhooks.saving.folder import newest, others_in, prepare, put_in_place, remove_abandoned, remove_all_but
from commhooks.saving.form import LAYOUT
from commhooks.saving.rules import LoadOptions, LoadRules
from commhooks.saving.run import HookState, Run, Stateful
from commhooks.saving.saved import refuse
from commhooks.version import VERSION

MOST_REMOVED = 10
"""A load gives up when this many checkpoints were removed while it read them."""


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
    optimizer: Stateful | None = None,
    scaler: Stateful | None = None,
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
    - `hooks` is a `Handle`, such as the result of `attach` or a `PowerSGDState`, or a `DiLoCo`. With that, each rank's
      own model, optimizer and scaler are saved, and `model` may be a plain module.
    - `extra` is any other plain data to restore: numbers, strings, tensors, lists and dictionaries.
    - `keep` is the number of newest checkpoints to keep in the directory (None: all).
    - `flush`: wait until everything is on the disk, so that the checkpoint also survives a crash of the machine.
      Otherwise it survives only a crash of the processes, but saving takes about half the time.

    Raises `CheckpointError` on every rank if any rank cannot write, naming the file and the cause; this checkpoint's
    files are removed, and the other checkpoints stay intact. If only an older checkpoint cannot be removed ("could not
    remove older checkpoints"), the new one is complete and stays.

    Other runs may save into the same directory at the same time, such as an earlier attempt of a job that has not ended
    yet. `keep` counts their checkpoints too, and an error names them.
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
    writing, save = ranks.first("prepare the checkpoint", lambda: prepare(root, step))
    with _removed_if_it_fails(root, writing, ranks):
        ranks.first("remove what killed runs left", lambda: remove_abandoned(root, writing))
        parts = ranks.gather(
            "write the checkpoint", lambda: _write(root / writing, run, step, save, ranks, extra or {}, flush)
        )
        written: dict[str, tuple[int, str]] = {name: sums for part in parts for name, sums in part.items()}
        manifest = {
            "layout": LAYOUT,
            "commhooks": VERSION,
            "save": save,
            "step": step,
            "world_size": ranks.world_size,
            "files": {name: size for name, (size, _) in written.items()},
            "crc32": {name: crc32 for name, (_, crc32) in written.items()},
        }
        name: str = ranks.first(
            "put the checkpoint in place", lambda: put_in_place(root, writing, step, manifest, flush=flush)
        )
    ranks.first("remove older checkpoints", lambda: remove_all_but(keep, root, name))
    return root / name


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: Module,
    optimizer: Stateful | None = None,
    scaler: Stateful | None = None,
    hooks: HookState | None = None,
    **rules: Unpack[LoadOptions],
) -> Checkpoint | None:
    """Restore the newest checkpoint in a directory, or the one at this path; return None if there is none.

    If another run that saves into this directory removes the checkpoint meanwhile, the next newest is restored.

    Call it on every rank, after attaching the hook, before or between steps. `world_size`, `settings` and `missing`
    allow differences in the hook's state: see `LoadRules`. If the number of ranks is unchanged, every rank also gets
    back its own buffers, and the state of torch's random number generators.

    Raises `CheckpointError` on every rank, and changes nothing, if on any rank it is damaged or does not match the run.
    """
    allowed = LoadRules(**rules)
    run = Run(model, optimizer, scaler, hooks)
    ranks = run.ranks()
    found = _read_newest(Path(directory), run, ranks, allowed)
    if found is None:
        return None
    path, contents = found
    if hooks is not None and contents.hooks is not None:
        hooks.restore(contents.hooks, allowed)
    contents.load_into(run)
    return Checkpoint(path, int(contents.shared["step"]), dict(contents.shared["extra"]))


@contextlib.contextmanager
def _removed_if_it_fails(root: Path, writing: str, ranks: Ranks) -> Iterator[None]:
    """Remove the files of a checkpoint that cannot be finished: the disk may be full because of them."""
    try:
        yield
    except CheckpointError as error:  # on all ranks
        others = ranks.first("find other writers", lambda: others_in(root, writing))
        raise CheckpointError(f"{error} {others}".rstrip()) from error.__cause__
    finally:
        if ranks.rank == 0 and (root / writing).exists():
            shutil.rmtree(root / writing, ignore_errors=True)  # a later save removes what is left


def _write(
    folder: Path, run: Run, step: int, save: str, ranks: Ranks, extra: Mapping[str, Any], flush: bool
) -> dict[str, tuple[int, str]]:
    """Write this rank's files, and return the size in bytes and the CRC-32 of each."""
    hooks = None if run.hooks is None else run.hooks.snapshot().as_dict()
    files = {f"rank{ranks.rank}.pt": run.own_part(hooks, step, save)}
    if ranks.rank == 0:
        files["shared.pt"] = run.shared_part(hooks, step, save, ranks.world_size, extra)
    return {name: write_tensors(folder / name, content, flush=flush) for name, content in files.items()}


def _read_newest(directory: Path, run: Run, ranks: Ranks, rules: LoadRules) -> tuple[Path, Contents] | None:
    """Read the newest checkpoint, or the next one if a process that saves there removes it meanwhile."""
    removed: list[Path] = []
    while len(removed) < MOST_REMOVED:
        path: Path | None = ranks.first("find the checkpoint", lambda: newest(directory))
        if path is None:
            break
        contents = _read_on_all_ranks(path, run, ranks, rules, must_be_there=path in removed)
        if contents is not None:
            return path, contents
        removed.append(path)
    if not removed:
        return None
    raise CheckpointError(
        f"checkpoints in {directory} were removed while they were read, {len(removed)} of them, and none was left or "
        "time to read it. Another process removes them: end it, or let it keep more (save_checkpoint(keep=...))."
    )


def _read_on_all_ranks(path: Path, run: Run, ranks: Ranks, rules: LoadRules, *, must_be_there: bool) -> Contents | None:
    """Return what this rank needs of a checkpoint; None on every rank if it was removed before one had read it."""
    contents = ranks.each("load the checkpoint", lambda: _read_what_fits(path, run, ranks, rules, must_be_there))
    saves = ranks.gather("compare the checkpoint's save", lambda: contents and (contents.shared.get("save"),))
    if None in saves:
        return None
    if len(set(saves)) > 1:
        by_rank = ", ".join(str(save) for (save,) in saves)
        raise CheckpointError(
            f"ranks see different checkpoints under {path}: by rank, the save {by_rank}; nothing was loaded. Every "
            "rank must see the folder that rank 0 sees."
        )
    return contents


def _read_what_fits(path: Path, run: Run, ranks: Ranks, rules: LoadRules, must_be_there: bool) -> Contents | None:
    """Return what this rank needs of a checkpoint; None if it has been removed, unless it must be there."""
    try:
        contents = read_contents(path, ranks.rank, ranks.world_size, rules)
    except CheckpointError:
        if must_be_there or path.exists():
            raise
        return None
    if faults := contents.misfits(run, rules):
        raise refuse(f"{path} does not fit", faults)
    return contents
