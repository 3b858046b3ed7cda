"""The folder that a comparison's results go to; nothing in it is lost unasked."""

from __future__ import annotations

from pathlib import Path

from experiments.report.page import PICTURES
from experiments.runs import PARTIAL, RunResult
from experiments.tasks import task_names

REPORT = "report.html"
_FOLDERS = ("results", "tensorboard", "plots")
_EVENTS = "events.out.tfevents."  # how TensorBoard's writer names its files


def prepare_folder(out: Path, *, overwrite: bool = False) -> None:
    """Make the folder; with `overwrite`, remove from it what an earlier comparison wrote, and nothing else.

    Raises:
        ValueError: The folder holds results and `overwrite` is off, or it holds anything that no comparison wrote.

    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file; name a folder")
    written = _written(out) if out.exists() else []
    if written and not overwrite:
        raise ValueError(
            f"out: {out} holds results already ({_some(written, out)}); name another folder, or replace them with "
            "--overwrite"
        )
    for path in written:
        path.unlink()
        if path.parent.parent.name == "tensorboard" and not any(path.parent.iterdir()):
            path.parent.rmdir()
    for name in _FOLDERS:
        (out / name).mkdir(parents=True, exist_ok=True)


def _written(out: Path) -> list[Path]:
    """Return the files in `out`, all of which a comparison wrote; raise ValueError if some other thing is there."""
    strangers = [path for path in out.iterdir() if path.name not in (*_FOLDERS, REPORT) or path.is_symlink()]
    if not strangers:  # another folder, somebody's home for one, is not searched to its depths
        files = sorted(path for path in out.rglob("*") if path.is_symlink() or not path.is_dir())
        runs = {path.stem for path in files if _is_result(path)}
        strangers = [path for path in files if not _is_own(path, path.relative_to(out).parts, runs)]
    if strangers:
        raise ValueError(
            f"out: {out} holds files of another kind ({_some(strangers, out)}); name a new or empty folder"
        )
    return files


def _is_own(path: Path, parts: tuple[str, ...], runs: set[str]) -> bool:
    """Return whether a comparison wrote this file: its name says so, and a result's content too."""
    match parts:
        case (name,):
            return name == REPORT
        case ("results", name):
            return _is_result(path) or name.endswith(PARTIAL)
        case ("plots", name):
            return name in {f"{task}.{picture}.png" for task in task_names() for picture in PICTURES}
        case ("tensorboard", run, name):
            return run in runs and name.startswith(_EVENTS)
    return False


def _is_result(path: Path) -> bool:
    """Return whether a file is a result under its own name: a copy that somebody put by has another."""
    if path.parent.name != "results" or path.suffix != ".json" or path.is_symlink():
        return False
    try:
        return RunResult.read(path).file_name == path.name
    except (ValueError, KeyError, TypeError, AttributeError, OSError):  # whatever somebody else's JSON makes of it
        return False


def _some(paths: list[Path], out: Path) -> str:
    first, more = sorted(path.relative_to(out) for path in paths)[0], len(paths) - 1
    return f"{first} and {more} more" if more else str(first)
