"""The output folder: results in it are kept, and removed only with --overwrite; other files never are."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from commhooks.experiments.commands.cli import app
from commhooks.experiments.report import writing
from commhooks.experiments.report.page import HEAD, PICTURES
from commhooks.experiments.runs import PARTIAL, RunSettings
from commhooks.experiments.sweeps import sweep
from commhooks.experiments.sweeps.execute import Listener, Made
from commhooks.experiments.sweeps.lock import LOCK, claimed
from commhooks.experiments.sweeps.output import prepare_folder
from commhooks.experiments.sweeps.store import write_failure
from tests.experiments.synthetic import result, results

ROOT = Path(__file__).parents[2]
KIND = next(iter(PICTURES))
OURS = result("bf16", task="digits").settings.name


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return a folder with the results of a comparison."""
    folder = tmp_path / "runs" / "demo"
    prepare_folder(folder)
    for one in results():
        one.write(folder / "results")
        log = folder / "tensorboard" / one.settings.log_folder / "events.out.tfevents.1.host"
        log.parent.mkdir(parents=True)
        log.write_bytes(b"a log")
        for name in (f"plots/{one.settings.task.name}.{KIND}.svg", f"tables/{one.settings.task.name}.tex"):
            (folder / name).write_bytes(b"a picture or a table")
    write_failure(folder, result("fp16", seed=5).settings, "it failed")
    (folder / "report.html").write_text(HEAD + "old</title>")
    return folder


def files(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Result, bool]:
    """Run `commhooks compare` with no ranks; return how it ended, and whether it would have trained."""
    trained: list[RunSettings] = []

    def execute(runs: Sequence[RunSettings], folder: Path, listener: Listener, **_: object) -> Made:
        trained.extend(runs)
        made = Made({settings: result("bf16", task="digits", seed=settings.seed) for settings in runs})
        for one in made.results.values():
            one.write(folder / "results")
        return made

    monkeypatch.setattr(sweep, "execute", execute)
    monkeypatch.setattr(sweep, "write", lambda found, folder, **_: (folder / "report.html").write_text(HEAD + "new"))
    same = ["--task", "digits", "--hook", "bf16", "--steps", "40"]
    return CliRunner().invoke(app, ["compare", *same, *words]), bool(trained)


def test_results_are_added_to_those_that_are_there(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (out / "thesis.tex").write_text("years of work")
    before = files(out)
    for seeds, trains in ("1", True), ("2", True), ("1", False):
        ended, trained = run(monkeypatch, "--out", str(out), "--seeds", seeds)
        assert (ended.exit_code, trained) == (0, trains), ended.output
    assert "1 of 1 runs are finished already" in ended.output
    after = files(out)
    assert after.pop("report.html") != before.pop("report.html")
    assert before.items() <= after.items()
    assert len(after) == len(before) + 2


def test_overwrite_replaces_them(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (out / "results" / "gpt.fp16.json.part").write_text('{\n "for')  # a process that was killed while it wrote
    log = out / "tensorboard" / "gpt/fp16/seed-9, ranks=4" / "events.out.tfevents.1.host"  # of an interrupted run
    log.parent.mkdir(parents=True)
    log.write_text("a log")
    ended, trained = run(monkeypatch, "--out", str(out), "--overwrite")
    assert (ended.exit_code, trained) == (0, True), ended.output
    assert set(files(out)) == {f"results/{OURS}.json", "report.html"}
    assert (out / "report.html").read_text() == HEAD + "new"


def holding_a_report(folder: Path) -> Path:
    (folder / "plots").mkdir()
    (folder / "plots" / f"digits.{KIND}.png").write_bytes(b"a picture")
    (folder / "report.html").write_text(HEAD + "old</title>")
    return folder


FOREIGN = {
    "results": (
        "thesis.tex", "report.html", "results/digits.mine.json.part", "results/notes.txt", "results/digits.json",
        "results/digits.fp16-put-by.json", "failures/mine.txt", "plots/digits.mine.png", "tables/mine.xls",
        "tensorboard/mine/events.out.tfevents.1.host", "tensorboard/digits/fp16/mine/events.out.tfevents.1.host",
        "tensorboard/digits/fp16/seed-0/notes.txt",
    ),
    "a report": ("thesis.tex", "plots/mine.png", "results/digits.json", "tensorboard/mine/events.out.tfevents.1.host"),
    # No result is there, so nothing says whose what has a comparison's names is.
    "nothing": (f"plots/digits.{KIND}.png", "tensorboard/digits.fp16/events.out.tfevents.1.host"),
}  # fmt: skip


@pytest.mark.parametrize(("there", "foreign"), [(there, one) for there, files in FOREIGN.items() for one in files])
def test_a_folder_with_other_files_is_left_alone(there: str, foreign: str, out: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    folder = {"results": out, "nothing": tmp_path / "other"}.get(there) or holding_a_report(tmp_path / "other")
    (folder / foreign).parent.mkdir(parents=True, exist_ok=True)
    ours = next((out / "results").glob("digits.fp16.*")).read_text()
    (folder / foreign).write_text(ours if "put-by" in foreign else '["years of work"]')
    before = files(folder)
    with pytest.raises(ValueError, match=rf"{folder} holds files of another kind \({re.escape(foreign)}\)"):
        prepare_folder(folder, overwrite=there != "a report")
    assert files(folder) == before


def test_a_folder_in_use_is_left_to_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed leaves its lock file, and no lock."""
    script = f"""
import time, pathlib
from commhooks.experiments.sweeps.lock import claimed
with claimed(pathlib.Path({str(tmp_path)!r})):
    print("claimed", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == b"claimed\n"
            ended, trained = run(monkeypatch, "--out", str(tmp_path))
            assert (ended.exit_code, trained) == (2, False)
            assert re.search(rf"is in use by process {other.pid} on \S+ since [\d-]+ [\d:]+; wait", ended.output)
        finally:
            other.send_signal(signal.SIGKILL)
    assert (tmp_path / LOCK).exists()
    with claimed(tmp_path), pytest.raises(ValueError, match=f"in use by process {os.getpid()} "), claimed(tmp_path):
        pass
    assert not (tmp_path / LOCK).exists()


def _make_a_pipe_among_results(path: Path) -> None:
    (path / "results").mkdir(parents=True)
    os.mkfifo(path / "results" / "digits.fp16.json")


@pytest.mark.parametrize(
    ("make", "below"),
    [
        (Path.touch, ""),
        (Path.touch, "below"),
        (lambda path: path.symlink_to(path.with_name("nowhere")), ""),
        (lambda path: (path / "report.html").mkdir(parents=True), ""),
        (_make_a_pipe_among_results, ""),
    ],
    ids=["a file", "inside a file", "a link to nothing", "a folder for a file", "a pipe for a result"],
)
def test_what_cannot_be_written_to_is_refused_before_training(
    make: Callable[[Path], object], below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "out")
    ended, trained = run(monkeypatch, "--out", str(tmp_path / "out" / below), "--overwrite")
    assert (ended.exit_code, trained) == (2, False)
    assert f"error: out: {tmp_path / 'out' / below} " in ended.output


@pytest.mark.parametrize("written", ["results", "failures", "report.html", "plots/a.step-time.pdf", "tables/a.csv"])
def test_a_file_for_which_the_disk_has_no_room_is_named(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = result("fp16", seed=5)
    monkeypatch.setattr(writing, "series_of", lambda settings: [])
    monkeypatch.setattr(writing, "names_of", lambda settings: ["a"] * len(settings))
    report = functools.partial(writing.write, [run], tmp_path, baseline=None, target_loss=None, command="commhooks")
    writes: dict[str, tuple[str, Callable[[], object]]] = {
        "results": (f"results/{run.file_name}", lambda: run.write(tmp_path / "results")),
        "failures": (f"failures/{run.settings.name}.txt", lambda: write_failure(tmp_path, run.settings, "it failed")),
    }
    name, write = writes.get(written, (written, report))
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    opened = path.with_suffix(PARTIAL) if written == "results" else path
    opened.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device \(\d+ bytes free\)") as caught:
        write()
    assert caught.value.filename == str(path)
    if written == "results":
        assert list(path.parent.iterdir()) == []  # what was begun takes no room
