"""The directory that holds a run's checkpoints: their names, and their atomic appearance.

A checkpoint is written under another name and renamed once complete; before it is removed, it is renamed again. So a
process that is killed at any moment never leaves a partial checkpoint under a checkpoint's name.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commhooks.checkpoints.disk import flush_to_disk, write_text

_NAME = re.compile(r"checkpoint-(\d+)-step-(\d+)")
_WRITING, _REMOVING = ".writing-", ".removing-"


def newest(directory: Path) -> Path | None:
    """Return the newest checkpoint in a directory, or the directory itself if it is a checkpoint; None if neither."""
    if _NAME.fullmatch(directory.name) or any((directory / name).exists() for name in ("manifest.json", "shared.pt")):
        return directory  # even if incomplete: naming a checkpoint means you expect it to exist
    found = checkpoints_in(directory) if directory.is_dir() else []
    return found[-1] if found else None


def checkpoints_in(root: Path) -> list[Path]:
    """Return the checkpoints in a directory, oldest first."""
    numbered = {int(match[1]): path for path in root.iterdir() if (match := _NAME.fullmatch(path.name))}
    return [numbered[number] for number in sorted(numbered)]


def prepare(root: Path, step: int) -> tuple[str, str]:
    """Return the name of a new checkpoint, and the name under which to write it; clean up after killed runs."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.iterdir():
        if left.name.startswith((_WRITING, _REMOVING)) and _NAME.fullmatch(left.name.partition("-")[2]):
            shutil.rmtree(left)
    numbers = [int(match[1]) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    name = f"checkpoint-{max(numbers, default=0) + 1:05d}-step-{step}"
    (root / (_WRITING + name)).mkdir()
    return name, _WRITING + name


def put_in_place(root: Path, writing: str, name: str, manifest: Mapping[str, Any], *, flush: bool) -> None:
    """Write the manifest, and rename the checkpoint to its final name."""
    write_text(root / writing / "manifest.json", json.dumps(manifest, indent=1), flush=flush)
    if flush:  # the names of its files must be on the disk before it gets its own name
        flush_to_disk(root / writing)
    (root / writing).rename(root / name)
    if flush:
        try:
            flush_to_disk(root)
        except OSError:  # save_checkpoint raises, so this checkpoint must not be found
            (root / name).rename(root / writing)
            raise


def remove_all_but(keep: int | None, root: Path) -> None:
    """Remove all checkpoints but the newest `keep`; None keeps all."""
    for old in checkpoints_in(root)[:-keep] if keep is not None else ():
        removing = old.with_name(_REMOVING + old.name)
        old.rename(removing)
        shutil.rmtree(removing)
