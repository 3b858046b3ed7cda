"""The directory that holds a run's checkpoints: their names, and their atomic appearance.

A checkpoint is written under another name and renamed once complete; before it is removed, it is renamed again. So a
process that is killed at any moment never leaves a partial checkpoint under a checkpoint's name.

Several processes may save here at once, such as two attempts of one job, if a scheduler starts the second before the
first has ended. Each writes under a name of its own, and a checkpoint gets its number when it is renamed. This relies
on atomic renames, and needs no locks, which some network file systems lack.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commhooks.saving.files import flush_to_disk, read_json, write_text
from commhooks.saving.writer import Writer

_NAME = re.compile(r"checkpoint-(\d+)-step-(\d+)")
_WRITING = re.compile(r"\.writing-step-\d+-by-.*")
_REMOVING = re.compile(r"\.removing-(checkpoint-\d+-)?step-\d+.*")
_NAME_IS_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
_OTHERS_REMOVE_OR_READ_IT = (*_NAME_IS_TAKEN, errno.ENOENT, errno.EBUSY, errno.ESTALE)


def newest(directory: Path) -> Path | None:
    """Return the newest checkpoint in a directory, or the directory itself if it is a checkpoint; None if neither."""
    if _NAME.fullmatch(directory.name) or any((directory / name).exists() for name in ("manifest.json", "shared.pt")):
        return directory  # even if incomplete: naming a checkpoint means you expect it to exist
    found = checkpoints_in(directory) if directory.is_dir() else []
    return found[-1] if found else None


def checkpoints_in(root: Path) -> list[Path]:
    """Return the checkpoints in a directory, oldest first.

    If two processes save at once, two checkpoints may have the same number; these are ordered by step.
    """
    found = [(int(match[1]), int(match[2]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, _, path in sorted(found)]


def prepare(root: Path, step: int) -> tuple[str, str]:
    """Make the folder in which to write a checkpoint; return its name, which no other save has, and the save's."""
    root.mkdir(parents=True, exist_ok=True)
    save = uuid.uuid4().hex
    writing = f".writing-step-{step}-{Writer.here().mark(save)}"
    (root / writing).mkdir()
    return writing, save


def remove_abandoned(root: Path, writing: str) -> None:
    """Remove what killed processes left, but nothing that a process may still be writing; `writing` is the caller's."""
    now = (root / writing).stat().st_mtime  # by the file server's clock, like the times that it is compared with
    for left in root.iterdir():
        writer = _writer_of(left.name)
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile, so not abandoned
            if _REMOVING.fullmatch(left.name) or (writer is not None and writer.abandoned(left, now)):
                _remove(left)


def put_in_place(root: Path, writing: str, step: int, manifest: Mapping[str, Any], *, flush: bool) -> str:
    """Write the manifest, rename the checkpoint to its final name, and return that name."""
    content = {**manifest, "writer": str(_writer_of(writing))}
    write_text(root / writing / "manifest.json", json.dumps(content, indent=1), flush=flush)
    if flush:  # the names of its files must be on the disk before it gets its own name
        flush_to_disk(root / writing)
    name = _rename(root, writing, step)
    if flush:
        try:
            flush_to_disk(root)
        except OSError:  # save_checkpoint raises, so this checkpoint must not be found
            with contextlib.suppress(FileNotFoundError):
                (root / name).rename(root / writing)
            raise
    return name


def remove_all_but(keep: int | None, root: Path, name: str) -> None:
    """Remove all checkpoints but the newest `keep` and the one of this name; None keeps all."""
    for old in checkpoints_in(root)[:-keep] if keep is not None else ():
        if old.name != name:
            _remove(old)


def others_in(root: Path, writing: str) -> str:
    """Return a sentence that names the other processes that save, or saved, here; empty if none is known."""
    own, others = _writer_of(writing), set[str]()
    with contextlib.suppress(OSError, ValueError, AttributeError):  # this is for an error: it must not hide that one
        names = [path.name for path in root.iterdir()]
        others |= {str(writer) for name in names if (writer := _writer_of(name)) is not None}
        last = newest(root)
        if writing not in names and last is not None:  # removed by one that may have saved since
            others.add(str(read_json(last / "manifest.json").get("writer", own)))
    others.discard(str(own))
    return f"Others that have been saving into {root}: {', '.join(sorted(others))}." if others else ""


def _rename(root: Path, writing: str, step: int) -> str:
    """Give a complete checkpoint the next number, and return its name."""
    number = 0
    while True:
        number = 1 + max([number, *(int(path.name.split("-")[1]) for path in checkpoints_in(root))])
        name = f"checkpoint-{number:05d}-step-{step}"
        try:
            (root / writing).rename(root / name)
            return name
        except OSError as error:
            if error.errno not in _NAME_IS_TAKEN:  # by a process that saved the same step at the same moment
                raise


def _remove(path: Path) -> None:
    """Remove a folder, after giving it a name under which nobody looks for a checkpoint.

    What another process is removing too, or has open on a network file system, is left to it or to a later save.
    """
    removing = path.with_name(f".removing-{path.name.removeprefix('.removing-').removeprefix('.writing-')}")
    try:
        path.rename(removing)
        shutil.rmtree(removing)
    except OSError as error:
        if error.errno not in _OTHERS_REMOVE_OR_READ_IT:
            raise


def _writer_of(name: str) -> Writer | None:
    """Return who writes under this name; None if it is not the name of a checkpoint that is being written."""
    return Writer.of(name) if _WRITING.fullmatch(name) else None
