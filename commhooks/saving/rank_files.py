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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commhooks.communicators.ranks import Ranks
from commhooks.errors import CheckpointError
from commhooks.saving.files import read_tensors, write_tensors
from commhooks.saving.parts import OWN, Part, joined, own_part, read_parts, shared_part
from commhooks.saving.rules import LoadRules
from commhooks.saving.run import HookState
from commhooks.saving.saved import Saved, read
from commhooks.saving.writer import Writer

_MOST_TIMES = 10


def save_rank_files(folder: Path, name: str, hooks: HookState) -> None:
    """Write this rank's file; call it on every rank, between two steps.

    Each file appears complete or not at all, and none before all ranks have written theirs. If another process saves
    into the same folder at once, all files are of one of the two saves in the end. Raises `CheckpointError` on every
    rank if any of them cannot write; the files that were there before then stay.
    """
    ranks = Ranks(hooks.process_group)
    for _ in range(_MOST_TIMES):
        if _save(folder, name, hooks, ranks):
            return
    writer = ranks.first("name the other writer", lambda: RankFiles(folder, name).read(0).get("writer"))
    raise CheckpointError(
        f"the files {name}-rank<r>.pt in {folder} were replaced {_MOST_TIMES} times while they were saved, the last "
        f"time by {writer}. End one of the two runs, or let it save into another folder."
    )


def load_rank_files(folder: Path, name: str, hooks: HookState, rules: LoadRules) -> None:
    """Resume from the files in a folder; call it on every rank, between two steps.

    Raises `CheckpointError` on every rank, and loads nothing, if the folder holds no such files (unless `rules` say
    `missing="reset"`), if a rank's own file is missing or cannot be read, if files are of different saves, or if they
    do not match the run.
    """
    ranks = Ranks(hooks.process_group)
    files = RankFiles(folder, name, ranks.rank, rules)
    if not any(ranks.gather("look for the hook's state", lambda: bool(files.numbers()))):
        if rules.missing == "reset":
            return
        raise CheckpointError(
            f"{folder} holds no state of the hook (no file {name}-rank<r>.pt): it was saved without compression, or "
            "the run ended before it was complete. Resume from another checkpoint, or pass missing='reset' to start "
            "the hook's state from zero."
        )
    saved: Saved | CheckpointError
    try:
        shared, own = read_parts(files, ranks.rank, ranks.world_size, rules)
        saved = read(joined(shared, own.values()))
    except CheckpointError as error:  # the other ranks learn of it in restore
        saved = error
    every = {file for told in ranks.gather("compare the saves", lambda: list(files.saves.items())) for file in told}
    if len({save for _, save in every}) > 1:  # known to all ranks alike
        named = "; ".join(f"{file}: {save}" for file, save in sorted(every))
        saved = CheckpointError(
            f"{folder} holds files of different saves ({named}); nothing was loaded. Resume from a folder that one "
            "save wrote to its end."
        )
    hooks.restore(saved, rules)


class RankFiles:
    """The files in a folder as a source of ranks' parts, for one rank; `saves` names the save of each file read."""

    def __init__(self, folder: Path, name: str, rank: int = 0, rules: LoadRules | None = None) -> None:
        self._folder, self._name, self._rank = folder, name, rank
        self._rules = rules or LoadRules()
        self._read: dict[int, Part] = {}
        self.saves: dict[str, str] = {}

    def path(self, rank: int) -> Path:
        """Return the path of a rank's file."""
        return self._folder / f"{self._name}-rank{rank}.pt"

    def numbers(self) -> list[int]:
        """Return the ranks whose files are in the folder."""
        name = re.compile(re.escape(self._name) + r"-rank(\d+)\.pt")
        found = (name.fullmatch(path.name) for path in self._folder.glob(f"{self._name}-rank*.pt"))
        return sorted(int(match[1]) for match in found if match)

    def shared(self) -> Part:
        """Return the part that all ranks share, from this rank's own file if it is there."""
        here = self.numbers()
        return shared_part(self.read(here[0] if here and self._rank not in here else self._rank))

    def own(self, rank: int) -> Part:
        """Return a rank's own part; an empty one if its file is missing and the rules do not need it."""
        if not self.path(rank).exists():
            is_needed = rank == self._rank or self._rules.spreads
            if self._rules.world_size != "reset" and is_needed:
                raise CheckpointError(
                    f"{self.path(rank)} is missing; every rank must see the file that it saved, and to spread "
                    "residuals those of all ranks."
                )
            return {part: {} for part in OWN}
        return own_part(self.read(rank))

    def read(self, rank: int) -> Mapping[str, Any]:
        """Return the content of a rank's file."""
        if rank not in self._read:
            content = self._read[rank] = read_tensors(self.path(rank))
            self.saves[self.path(rank).name] = str(content.get("save"))
        return self._read[rank]


def _save(folder: Path, name: str, hooks: HookState, ranks: Ranks) -> bool:
    """Write all ranks' files; return False on every rank if another process has replaced some of them meanwhile."""
    save = ranks.first("name the save", lambda: uuid.uuid4().hex)
    own = RankFiles(folder, name).path(ranks.rank)
    part = own.with_suffix(f".{Writer.here().mark(save)}.part")
    try:
        ranks.each("save the hook's state", lambda: _write(part, hooks, save))
        written = ranks.each("put the hook's state in place", lambda: _put_in_place(part, own, name, ranks))
    finally:
        with contextlib.suppress(OSError):  # after a failure that is raised
            part.unlink()
    in_place = ranks.gather("look for other saves", lambda: _identity(own) == written)
    return len(set(in_place)) == 1  # if all are replaced, that save is newer, and will see to it that it is complete


def _write(part: Path, hooks: HookState, save: str) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)  # rank 0 may not have created it yet, or may have its own disk
    write_tensors(part, hooks.snapshot().as_dict() | {"save": save, "writer": str(Writer.here())}, flush=False)


def _put_in_place(part: Path, own: Path, name: str, ranks: Ranks) -> tuple[int, int] | None:
    """Give this rank's file its name, remove what other runs left in this folder, and return the file's identity."""
    written, now = _identity(part), part.stat().st_mtime
    files = RankFiles(own.parent, name)
    part.replace(own)
    if ranks.rank == 0:
        for number in files.numbers():
            if number >= ranks.world_size and _identity(own) == written:  # or they may be of another, newer save
                files.path(number).unlink(missing_ok=True)
    for left in own.parent.glob(f"{name}-rank*.part"):
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
