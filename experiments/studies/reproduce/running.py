"""Running a reproduction: measures, or takes what is measured already, and writes everything into a folder."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from commhooks.experiments.cluster import why_not
from commhooks.experiments.launch import torchrun_world
from commhooks.experiments.machine import machine, versions
from commhooks.experiments.sweeps.lock import LOCK, claimed
from commhooks.experiments.sweeps.output import begins
from commhooks.units import unknown
from experiments.studies.blocks import Block, markdown, write_pictures
from experiments.studies.reproduce import load_reproduction, notes, results
from experiments.studies.reproduce.notes import PARTS, Notes
from experiments.studies.reproduce.results import MEASURED, RESULTS, Reproduction, Results, page, print_page

KINDS = ("hosts", "emulated")
_MOST_SEEDS = 1000


@dataclass(frozen=True, kw_only=True)
class Request:
    """The reproduction to run, and the place of its results."""

    name: str
    out: Path | None = None  # None: runs/reproduce/<name>
    size: str = "default"
    seeds: int | None = None  # None: those of the size
    link: str | None = None  # the kind of the links; None: that of the size
    docs: Path | None = None  # the documentation's folder of reproductions, which receives tables and pictures
    overwrite: bool = False  # measure again what is finished already

    @property
    def command(self) -> str:
        """The command that measures the same."""
        options = {"size": None if self.size == "default" else self.size, "seeds": self.seeds, "link": self.link}
        given = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
        return shlex.join(["python", "-m", "experiments.studies", "reproduce", self.name, *given])

    @property
    def folder(self) -> Path:
        """The folder of the results."""
        return Path("runs") / "reproduce" / self.name if self.out is None else self.out


def reproduce(request: Request, console: Console) -> Results:
    """Measure what is asked for, unless the folder has it already; write and print tables, findings and pictures.

    Raises:
        ValueError: There is no such reproduction or size, the settings do not fit it, hosts are needed and cannot be
            had, or the folder holds something else.

    """
    reproduction = load_reproduction(request.name)
    settings = settings_of(reproduction, request)
    folder = request.folder
    if request.docs is not None and not request.docs.is_dir():
        raise ValueError(f"docs: there is no folder {request.docs}; name the documentation's: docs/reproductions")
    if request.overwrite or not (folder / RESULTS).exists():
        _check_place(reproduction, settings)  # before the folder is touched
    with claimed(folder):
        _check_folder(folder)
        finished = None if request.overwrite else _finished(folder, request, settings, console)
        found = finished or _measure(reproduction, request, settings, console)
        try:
            blocks = reproduction.show(settings, found.measured)
            _write(reproduction, found, blocks, folder, "")
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            if finished is None:
                raise
            raise ValueError(
                f"{folder / RESULTS} does not hold what {request.name} shows ({type(error).__name__}: {error}): it was "
                "edited, or written by another version; measure again with --overwrite, or name another folder"
            ) from error
    print_page(reproduction, blocks, console)
    places = [folder]
    if request.docs is not None:
        places.append(request.docs / reproduction.name)
        _write(reproduction, found, blocks, places[-1], f"{reproduction.name}/")
        found.write(places[-1])
    for place in places:
        console.print(f"\nresults, tables and pictures  {place}", highlight=False, soft_wrap=True, markup=False)
    return found


def settings_of(reproduction: Reproduction, request: Request) -> Any:
    """Return the settings of the size, with what the request changes; see `reproduce` for errors."""
    if request.size not in reproduction.sizes:
        raise ValueError(unknown(f"{reproduction.name}: size", request.size, reproduction.sizes))
    if request.link not in {None, *KINDS}:
        raise ValueError(f"link {request.link!r}: the kind of the links must be one of {', '.join(KINDS)}")
    if request.seeds is not None and request.seeds < 2:
        raise ValueError(f"seeds must be at least 2, for an interval (got {request.seeds})")
    if request.seeds is not None and request.seeds > _MOST_SEEDS:
        raise ValueError(f"seeds must be at most {_MOST_SEEDS:,}; more would take weeks (got {request.seeds:,})")
    settings = reproduction.sizes[request.size]
    changes = {"seeds": request.seeds, "kind": request.link}
    for field, value in changes.items():
        if value is None:
            continue
        if not hasattr(settings, field):
            option = "--seeds" if field == "seeds" else "--link"
            known = ", ".join(each.name for each in dataclasses.fields(settings)) or "no settings"
            raise ValueError(f"{reproduction.name} takes no {option}: its settings are {known}")
        settings = dataclasses.replace(settings, **{field: value})
    return settings


def _check_place(reproduction: Reproduction, settings: Any) -> None:
    """Raise ValueError if this process cannot start the ranks that are needed."""
    if torchrun_world() is not None:
        raise ValueError(f"{reproduction.name} starts the processes that it needs: run it without torchrun")
    if getattr(settings, "kind", None) == "hosts" and (reason := why_not()):
        raise ValueError(f"{reproduction.name} measures between hosts: {reason}")


def _check_folder(folder: Path) -> None:
    """Raise ValueError if the folder belongs to another program; a killed process may leave half a file."""
    files = [path for path in folder.iterdir() if path.name != LOCK]
    known = {RESULTS: results.BEGINNING, PARTS: notes.BEGINNING}

    def is_own(path: Path) -> bool:
        if path.suffix in {".png", ".md", ".part"} or path.name.startswith(f".{RESULTS}."):
            return True
        is_plain = path.is_file() and not path.is_symlink()
        return is_plain and path.name in known and begins(path, known[path.name])

    strangers = [path.name for path in files if not is_own(path)]
    if strangers or (files and not any(path.name in known for path in files)):
        first = sorted(strangers or [path.name for path in files])[0]
        raise ValueError(f"out: {folder} holds files of another kind ({first}); name a new or empty folder")


def _finished(folder: Path, request: Request, settings: Any, console: Console) -> Results | None:
    """Return the results that the folder has already, and say so; None if it has none."""
    if not (folder / RESULTS).exists():
        return None
    found = Results.read(folder / RESULTS)
    asked = Results.of_settings(settings)
    if (found.reproduction, found.settings) != (request.name, asked):
        raise ValueError(
            f"out: {folder} holds the results of {found.reproduction}{_difference(found, request.name, asked)}; name "
            "another folder, or replace them with --overwrite"
        )
    (folder / PARTS).unlink(missing_ok=True)  # a process that was killed at the end may have left them
    text = f"{request.name} is finished already ({folder / RESULTS}); --overwrite measures it again"
    if found.versions != versions():
        other = ", ".join(f"{name} {number}" for name, number in found.versions.items())
        text = f"{text}, for it was measured with other versions: {other}"
    console.print(text, highlight=False, soft_wrap=True, markup=False)
    return found


def _difference(found: Results, name: str, asked: Mapping[str, Any]) -> str:
    """Return by which settings the results differ from what is asked for."""
    if found.reproduction != name:
        return f", not of {name}"
    keys = [key for key in {**found.settings, **asked} if found.settings.get(key) != asked.get(key)]
    return " with other settings: " + "; ".join(
        f"{key} {found.settings.get(key)}, not {asked.get(key)}" for key in keys
    )


def _measure(reproduction: Reproduction, request: Request, settings: Any, console: Console) -> Results:
    """Measure, and keep the results; results to be overwritten are removed once the file of parts exists."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    written = Results.of_settings(settings)
    head = {"name": reproduction.name, "settings": written, "versions": versions()}
    if request.overwrite:
        (request.folder / PARTS).unlink(missing_ok=True)
    kept = Notes(request.folder, head, say)
    (request.folder / RESULTS).unlink(missing_ok=True)
    measured = reproduction.measure(settings, kept)
    made = Results(
        reproduction=reproduction.name,
        size=request.size,
        settings=written,
        versions=versions(),
        machine=machine(),
        command=request.command,
        seconds=kept.seconds,
        measured=measured,
    )
    path = made.write(request.folder)
    (request.folder / PARTS).unlink()
    return Results.read(path)  # shown is what the file has


def _write(
    reproduction: Reproduction, found: Results, blocks: list[Block], folder: Path, pictures_from_page: str
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = markdown(page(reproduction, found, blocks), pictures_from_page)
    (folder / MEASURED).write_text(text, encoding="utf-8")
    write_pictures(blocks, folder)
