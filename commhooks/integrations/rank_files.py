"""The hook's state within a framework's checkpoint folder: one file for each rank, `<name>-rank<r>.pt`.

Frameworks keep each rank's random generators in the same way. The files are written in parallel, and no rank has to
hold the state of all others; `torch.load` reads each of them with its default arguments, which executes nothing. Each
carries the random name of its save, which all files of a folder must share; there is no manifest, since every host may
have its own disk.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from commhooks.checkpoints.disk import read_tensors, write_tensors
from commhooks.checkpoints.writer import Writer
from commhooks.communicators.ranks import Ranks
from commhooks.errors import CheckpointError
from commhooks.hooks.attach import Attachment
from commhooks.state.snapshot import LoadRules, Snapshot, merge_state_dicts

_MOST_TIMES = 10


def save_rank_files(folder: Path, name: str, attachment: Attachment) -> None:
    """Write this rank's file; call it on every rank, between two steps.

    Each file appears complete or not at all, and none before all ranks have written theirs. If another process saves
    into the same folder at once, all files are of one of the two saves in the end. Raises `CheckpointError` on every
    rank if any of them cannot write; the files that were there before then stay.
    """
    ranks = Ranks(attachment.process_group)
    for _ in range(_MOST_TIMES):
        if _save(folder, name, attachment, ranks):
            return
    writer = ranks.first("name the other writer", lambda: _load(_file(folder, name, 0)).get("writer"))
    raise CheckpointError(
        f"the files {name}-rank<r>.pt in {folder} were replaced {_MOST_TIMES} times while they were saved, the last "
        f"time by {writer}. End one of the two runs, or let it save into another folder."
    )


def load_rank_files(folder: Path, name: str, attachment: Attachment, rules: LoadRules) -> None:
    """Resume from the files in a folder; call it on every rank, between two steps.

    Raises `CheckpointError` on every rank, and loads nothing, if the folder holds no such files (unless `rules` say
    `missing="reset"`), if a rank's own file is missing or cannot be read, if files are of different saves, or if they
    do not match the run.
    """
    ranks = Ranks(attachment.process_group)
    if not any(ranks.gather("look for the hook's state", lambda: bool(_numbers(folder, name)))):
        if rules.missing == "reset":
            return
        raise CheckpointError(
            f"{folder} holds no state of the hook (no file {name}-rank<r>.pt): it was saved without compression, or "
            "the run ended before it was complete. Resume from another checkpoint, or pass missing='reset' to start "
            "the hook's state from zero."
        )
    state: dict[str, Any] | CheckpointError
    saves: dict[str, str] = {}
    try:
        state, saves = _read(folder, name, ranks, rules)
    except CheckpointError as error:  # the other ranks learn of it in load_state_dict
        state = error
    every = [file for told in ranks.gather("compare the saves", lambda: list(saves.items())) for file in told]
    if len({save for _, save in every}) > 1:  # known to all ranks alike
        state = _of_different_saves(folder, every)
    attachment.load_state_dict(state, world_size=rules.world_size, settings=rules.settings, missing=rules.missing)


def _save(folder: Path, name: str, attachment: Attachment, ranks: Ranks) -> bool:
    """Write all ranks' files; return False on every rank if another process has replaced some of them meanwhile."""
    save = ranks.first("name the save", lambda: uuid.uuid4().hex)
    part = folder / f"{name}-rank{ranks.rank}.{Writer.here().mark(save)}.part"
    try:
        ranks.each("save the hook's state", lambda: _write(part, attachment, save))
        written = ranks.each("put the hook's state in place", lambda: _put_in_place(part, folder, name, ranks))
    finally:
        with contextlib.suppress(OSError):  # after a failure that is raised
            part.unlink()
    in_place = ranks.gather("look for other saves", lambda: _identity(_file(folder, name, ranks.rank)) == written)
    return len(set(in_place)) == 1  # if all are replaced, that save is newer, and will see to it that it is complete


def _write(part: Path, attachment: Attachment, save: str) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)  # rank 0 may not have created it yet, or may have its own disk
    write_tensors(part, attachment.state_dict() | {"save": save, "writer": str(Writer.here())}, flush=False)


def _put_in_place(part: Path, folder: Path, name: str, ranks: Ranks) -> tuple[int, int] | None:
    """Give this rank's file its name, remove what other runs left in this folder, and return the file's identity."""
    written, now = _identity(part), part.stat().st_mtime
    own = _file(folder, name, ranks.rank)
    part.replace(own)
    if ranks.rank == 0:
        for number in _numbers(folder, name):
            if number >= ranks.world_size and _identity(own) == written:  # or they may be of another, newer save
                _file(folder, name, number).unlink(missing_ok=True)
    for left in folder.glob(f"{name}-rank*.part"):
        writer = Writer.of(left.name)
        with contextlib.suppress(FileNotFoundError):  # put in place, or removed by another rank
            if writer is not None and writer.abandoned(left, now):
                left.unlink()
    return written


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from others that had or will have its name; None if it is not there."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _read(folder: Path, name: str, ranks: Ranks, rules: LoadRules) -> tuple[dict[str, Any], dict[str, str]]:
    """Return this rank's state, or all ranks' if a different number of ranks saved it and `rules` spread it.

    The second result is the save of each file that was read, by the file's name.
    """
    own, here = _file(folder, name, ranks.rank), _numbers(folder, name)
    path = _file(folder, name, here[0]) if here and ranks.rank not in here else own
    first = _load(path)
    saves = {path.name: _save_of(first)}
    if first.get("world_size") == ranks.world_size:
        if ranks.rank not in here and rules.world_size != "reset":
            raise CheckpointError(f"{own} is missing; every rank must see the folder that it saved to.")
        return first, saves
    if not rules.spreads:
        return first, saves
    saved = range(Snapshot.from_dict(first).world_size)
    absent = [_file(folder, name, number).name for number in saved if number not in here]
    if absent:
        raise CheckpointError(f"{folder} lacks {', '.join(absent)}; every rank must see the files of all ranks.")
    parts = {_file(folder, name, number).name: _load(_file(folder, name, number)) for number in saved}
    saves = {file: _save_of(part) for file, part in parts.items()}
    if len(set(saves.values())) > 1:
        raise _of_different_saves(folder, saves.items())
    return merge_state_dicts(list(parts.values())), saves


def _save_of(content: Mapping[str, Any]) -> str:
    return str(content.get("save"))


def _of_different_saves(folder: Path, saves: Iterable[tuple[str, str]]) -> CheckpointError:
    named = "; ".join(f"{file}: {save}" for file, save in sorted(set(saves)))
    return CheckpointError(
        f"{folder} holds files of different saves ({named}); nothing was loaded. Resume from a folder that one save "
        "wrote to its end."
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        content = read_tensors(path)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged file does to the reader
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {str(error)[:200]}).") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no state of a hook (got {type(content).__name__}).")
    return content


def _file(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}-rank{rank}.pt"


def _numbers(folder: Path, name: str) -> list[int]:
    """Return the ranks whose files are in the folder."""
    found = (re.fullmatch(re.escape(name) + r"-rank(\d+)\.pt", path.name) for path in folder.glob(f"{name}-rank*.pt"))
    return sorted(int(match[1]) for match in found if match)
