"""The folder for a command's results, in which nothing is lost unless you ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .report.page import HEAD as TITLE
from .report.page import PICTURES
from .runs import HEAD, PARTIAL, RunResult

REPORT = "report.html"
_EVENTS = "events.out.tfevents."  # how TensorBoard's writer names its files


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a command writes into its folder."""

    files: Mapping[str, str]  # the beginning of each file's text, by name
    folders: tuple[str, ...]
    pictures: tuple[str, ...]  # in plots/, for each task: <task>.<picture>.png
    tasks: tuple[str, ...] = ()  # tasks that may have pictures, besides those of the existing results


COMPARISON = Contents(files={REPORT: TITLE}, folders=("results", "tensorboard", "plots"), pictures=PICTURES)


def prepare_folder(out: Path, contents: Contents = COMPARISON, *, overwrite: bool = False) -> None:
    """Create the folder; with `overwrite`, remove what the same command wrote there earlier, and nothing else.

    Raises:
        ValueError: The folder holds results and `overwrite` is off, or it holds anything that this command has not
            written, or it cannot be read or written.

    """
    try:
        _prepare(out, contents, overwrite)
    except OSError as error:
        raise ValueError(f"out: {out} cannot be used as a folder for results ({error}); name another one") from error


def _prepare(out: Path, contents: Contents, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file; name a folder")
    written = _written(out, contents) if out.exists() else []
    if written and not overwrite:
        raise ValueError(
            f"out: {out} holds results already ({_some(written, out)}); name another folder, or replace them with "
            "--overwrite"
        )
    for path in written:
        path.unlink()
        if path.parent.parent.name == "tensorboard" and not any(path.parent.iterdir()):
            path.parent.rmdir()
    for name in contents.folders:
        (out / name).mkdir(parents=True, exist_ok=True)


def _written(out: Path, contents: Contents) -> list[Path]:
    """Return the files in `out`, all of which the command wrote; raise ValueError if anything else is there.

    Results come last: they identify the other files of a comparison, even after an interrupted removal.
    """
    known = (*contents.folders, *contents.files)
    strangers = [path for path in out.iterdir() if path.name not in known or path.is_symlink()]
    if not strangers:  # another folder, such as somebody's home, is not searched completely
        paths = sorted(out.rglob("*"), key=lambda path: (path.parent == out / "results", path))
        runs = {path.stem for path in paths if _is_result(path)}
        strangers = [path for path in paths if not _is_own(path, path.relative_to(out).parts, contents, runs)]
    if strangers:
        raise ValueError(
            f"out: {out} holds files of another kind ({_some(strangers, out)}); name a new or empty folder"
        )
    return [path for path in paths if path.is_file()]


def _is_own(path: Path, parts: tuple[str, ...], contents: Contents, runs: set[str]) -> bool:
    """Return whether the command wrote this file, judged by name and content, or created this folder."""
    if path.is_dir():
        return parts[0] in contents.folders and len(parts) <= (2 if parts[0] == "tensorboard" else 1)
    if path.is_symlink() or not path.is_file():
        return False
    match parts:
        case (name,):
            return name in contents.files and _begins(path, contents.files[name])
        case ("results", name):
            return _is_result(path) or (name.endswith(PARTIAL) and _begins(path, HEAD))
        case ("plots", name):
            tasks = {run.partition(".")[0] for run in runs}.union(contents.tasks)
            return name in {f"{task}.{picture}.png" for task in tasks for picture in contents.pictures}
        case ("tensorboard", run, name):
            return run in runs and name.startswith(_EVENTS)
    return False


def _begins(path: Path, text: str) -> bool:
    """Return whether the file begins with `text`, or ends before that: a process may have been killed."""
    with path.open("rb") as file:
        return text.encode().startswith(file.read(len(text.encode())))


def _is_result(path: Path) -> bool:
    """Return whether a file is a result under its own name: a copy made by a user has another name."""
    if path.parent.name != "results" or path.suffix != ".json" or path.is_symlink() or not path.is_file():
        return False
    try:
        return RunResult.read(path).file_name == path.name
    except (ValueError, KeyError, TypeError, AttributeError, OSError):  # whatever somebody else's JSON causes
        return False


def _some(paths: list[Path], out: Path) -> str:
    first, more = sorted(path.relative_to(out) for path in paths)[0], len(paths) - 1
    return f"{first} and {more} more" if more else str(first)
