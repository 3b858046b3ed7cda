"""The hook's state within a framework's checkpoint folder: one file for each rank, `<name>-rank<r>.pt`.

Frameworks keep each rank's random generators in the same way. The files are written in parallel, and no rank has to
hold the state of all others; `torch.load` reads each of them with its default arguments, which executes nothing. Each
carries the random name of its save, which all files of a folder must share; there is no manifest, since every host may
have its own disk.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from commhooks.checkpoints.disk import read_tensors, write_tensors
from commhooks.communicators.ranks import Ranks
from commhooks.errors import CheckpointError
from commhooks.hooks.attach import Attachment
from commhooks.state.snapshot import LoadRules, Snapshot, merge_state_dicts


def save_rank_files(folder: Path, name: str, attachment: Attachment) -> None:
    """Write this rank's file; call it on every rank, between two steps.

    A file appears complete or not at all. Raises `CheckpointError` on every rank if any of them cannot write.
    """
    ranks = Ranks(attachment.process_group)
    save = ranks.first("name the save", lambda: uuid.uuid4().hex)
    ranks.each("save the hook's state", lambda: _write(folder, name, attachment, ranks, save))


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


def _write(folder: Path, name: str, attachment: Attachment, ranks: Ranks, save: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)  # rank 0 may not have created it yet, or may have its own disk
    part = folder / f"{name}-rank{ranks.rank}.part"
    try:
        write_tensors(part, attachment.state_dict() | {"save": save}, flush=False)
    except OSError:  # a full disk, for one
        part.unlink(missing_ok=True)
        raise
    part.replace(_file(folder, name, ranks.rank))
    if ranks.rank == 0:  # remove what a run with more ranks left in this folder
        for number in _numbers(folder, name):
            if number >= ranks.world_size:
                _file(folder, name, number).unlink()


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
    return str(content.get("save", "no name, as in earlier versions"))


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
