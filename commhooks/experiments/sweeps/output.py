"""The folder for a command's results, in which nothing is lost unless you ask for it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from commhooks.experiments.report.page import HEAD as TITLE
from commhooks.experiments.report.page import PICTURES
from commhooks.experiments.runs import HEAD, PARTIAL, RunResult
from commhooks.experiments.sweeps.lock import LOCK, OWNER
from commhooks.experiments.sweeps.store import FAILURES, RESULTS
from commhooks.experiments.sweeps.store import HEAD as FAILURE
from commhooks.experiments.training.progress import PROGRESS, STOP

REPORT, PLOTS, TABLES, LOGS = "report.html", "plots", "tables", "tensorboard"
_DRAWN, _TABLES = (".png", ".svg", ".pdf"), (".csv", ".tex")  # suffixes of pictures, and of tables
_CHECKPOINTS = {".pt", ".json"}  # suffixes of their files
_EVENTS = "events.out.tfevents."  # the beginning of the names of TensorBoard's files
_RUN = re.compile(r".+\.seed-\d+\.[0-9a-f]{8}")  # the name of a run's files, without a suffix
_LOG = re.compile(r"[^/]+/[^/]+/seed-\d+(, [^/]+)?")  # the folder of a run's log


_FILES = {REPORT: TITLE, LOCK: OWNER}  # the beginning of each file's text
_FOLDERS = (RESULTS, FAILURES, PROGRESS, LOGS, PLOTS, TABLES)


def dated_folder() -> Path:
    """Return the folder of a command that names none: runs/<date-time>."""
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}"


def prepare_folder(out: Path, folders: Sequence[str] = _FOLDERS, *, overwrite: bool = False) -> None:
    """Create the folder; with `overwrite`, remove the files that the same command wrote there earlier, and no others.

    Raises:
        ValueError: With `overwrite`, the folder holds anything that this command has not written. Without it, anything
            that would be replaced and that this command has not written. Or the folder cannot be read or written.

    """
    try:
        _prepare(out, folders, overwrite)
    except OSError as error:
        raise ValueError(f"out: {out} cannot be used as a folder for results ({error}); name another one") from error


def _prepare(out: Path, folders: Sequence[str], overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file; name a folder")
    if overwrite:
        _remove_earlier(out)
    else:
        _refuse_to_replace(out, folders)
    for name in folders:
        if name not in {FAILURES, PROGRESS}:  # made when they are needed
            (out / name).mkdir(parents=True, exist_ok=True)


def _refuse_to_replace(out: Path, names: Sequence[str]) -> None:
    """Raise ValueError if a file or folder that is about to be written belongs to another program."""
    folders, files = [out / name for name in names], [out / name for name in _FILES]
    taken = [path for path in folders if path.is_symlink() or (path.exists() and not path.is_dir())]
    taken += [path for path in files if path.is_symlink() or (path.exists() and not path.is_file())]
    taken += [path for path in files if path not in taken and path.exists() and not begins(path, _FILES[path.name])]
    has_results = any(_is_result(path) for path in (out / RESULTS).glob("*.json"))
    if not taken and not has_results and any(any((out / folder).glob("*.*")) for folder in (PLOTS, TABLES)):
        taken = _strangers(out, names)
    if taken:
        raise ValueError(
            f"out: {out} holds files of another kind ({_some(taken, out)}), which are not replaced; name another folder"
        )


def _remove_earlier(out: Path) -> None:
    for path in _written(out) if out.exists() else []:
        if path.name != LOCK:  # it is held by this process
            path.unlink()
        for folder in list(path.relative_to(out).parents)[:-2]:  # all but the first and `out` itself
            if folder.parts[0] == LOGS and not any((out / folder).iterdir()):
                (out / folder).rmdir()
    shutil.rmtree(out / PROGRESS, ignore_errors=True)  # its files are among those removed


def _written(out: Path) -> list[Path]:
    """Return the files in `out`, all of which the command wrote; raise ValueError if anything else is there.

    Results come last: they identify the other files of a comparison, even after an interrupted removal.
    """
    if strangers := _strangers(out, _FOLDERS):
        raise ValueError(
            f"out: {out} holds files of another kind ({_some(strangers, out)}), so that nothing is removed there; name "
            "a new or empty folder"
        )
    paths = sorted(out.rglob("*"), key=lambda path: (path.parent == out / RESULTS, path))
    return [path for path in paths if path.is_file()]


def _strangers(out: Path, folders: Sequence[str]) -> list[Path]:
    """Return what is in `out` and not the command's."""
    known = (*folders, *_FILES)
    if strangers := [path for path in out.iterdir() if path.name not in known or path.is_symlink()]:
        return strangers  # another folder, such as somebody's home, is not searched completely
    paths = [*out.rglob("*")]
    runs = {path.stem for path in paths if _is_result(path)}
    return [path for path in paths if not _is_own(path, path.relative_to(out).parts, folders, runs)]


def _is_own(path: Path, parts: tuple[str, ...], folders: Sequence[str], runs: set[str]) -> bool:
    """Return whether the command wrote this file, judged by name and content, or created this folder."""
    if path.is_dir():
        return parts[0] in folders and len(parts) <= {LOGS: 4, PROGRESS: 3}.get(parts[0], 1)
    if path.is_symlink() or not path.is_file():
        return False
    match parts:
        case (name,):
            return name in _FILES and begins(path, _FILES[name])
        case ("results", name):
            return _is_result(path) or (name.endswith(PARTIAL) and begins(path, HEAD))
        case ("failures", name):
            return name.endswith(".txt") and begins(path, FAILURE)
        case ("plots" | "tables", name):
            ours = any(name.endswith(f".{one}{suffix}") for one in PICTURES for suffix in _DRAWN)
            ours |= parts[0] == TABLES and path.suffix in _TABLES
            return ours and bool(runs or _is_own(path.parents[1] / REPORT, (REPORT,), folders, runs))
        case ("tensorboard", *log, name):
            return bool(_LOG.fullmatch("/".join(log))) and name.startswith(_EVENTS)
        case ("progress", run, *_):
            return run == STOP or (_is_run(run, runs) and path.suffix in _CHECKPOINTS)
    return False


def _is_run(name: str, runs: set[str]) -> bool:
    return name in runs or _RUN.fullmatch(name) is not None


def begins(path: Path, text: str) -> bool:
    """Return whether the file begins with `text`, or ends before that: a process may have been killed."""
    with path.open("rb") as file:
        return text.encode().startswith(file.read(len(text.encode())))


def _is_result(path: Path) -> bool:
    """Return whether a file is a result under its own name: a copy made by a user has another name."""
    if path.parent.name != RESULTS or path.suffix != ".json" or path.is_symlink() or not path.is_file():
        return False
    try:
        return RunResult.read(path).file_name == path.name
    except (ValueError, KeyError, TypeError, AttributeError, OSError):  # whatever somebody else's JSON causes
        return False


def _some(paths: list[Path], out: Path) -> str:
    first, more = sorted(path.relative_to(out) for path in paths)[0], len(paths) - 1
    return f"{first} and {more} more" if more else str(first)
