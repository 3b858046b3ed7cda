"""The output folder of a comparison: results in it are replaced only with --overwrite, and other files never."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from experiments import compare
from experiments.cli import app
from experiments.launch import Send
from experiments.output import prepare_folder
from experiments.report.page import HEAD
from experiments.report.tensorboard import write_logs
from experiments.runs import RunSettings
from experiments.worker import RunDone
from tests.experiments.synthetic import result, results

ROOT = Path(__file__).parents[2]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return a folder with the results of a comparison."""
    folder = tmp_path / "runs" / "demo"
    prepare_folder(folder)
    for one in results():
        one.write(folder / "results")
        write_logs(one, folder / "tensorboard")
        (folder / "plots" / f"{one.settings.task}.step-time.png").write_bytes(b"a picture")
    (folder / "report.html").write_text(HEAD + "old</title>")
    return folder


def files(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def _write_no_pictures(found: object, summaries: object, comparison: compare.Comparison) -> None:
    (comparison.out / "report.html").write_text("new")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Result, bool]:
    """Run `commhooks compare` with no ranks; return how it ended, and whether it would have trained."""
    trained = []

    def train(runs: Sequence[RunSettings], listener: Send) -> None:
        trained.append(runs)
        listener(RunDone(0, result("bf16", task="digits")))

    monkeypatch.setattr(compare, "_train", train)
    monkeypatch.setattr(compare, "write_report", _write_no_pictures)
    return CliRunner().invoke(app, ["compare", "--task", "digits", "--hook", "bf16", *words]), bool(trained)


def test_results_are_not_deleted_unasked(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(out)
    ended, trained = run(monkeypatch, "--out", str(out))
    assert (ended.exit_code, trained) == (2, False)
    assert f"error: out: {out} holds results already" in ended.output
    assert "--overwrite" in ended.output
    assert files(out) == before


def test_overwrite_replaces_them(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (out / "results" / "gpt.fp16.json.part").write_text('{\n "for')  # a process that was killed while it wrote
    ended, trained = run(monkeypatch, "--out", str(out), "--overwrite")
    assert (ended.exit_code, trained) == (0, True), ended.output
    assert [path.name for path in (out / "results").iterdir()] == ["digits.bf16.json"]
    assert [path.name for path in (out / "tensorboard").iterdir()] == ["digits.bf16"]
    assert not any((out / "plots").iterdir())
    assert (out / "report.html").read_text() == "new"


def test_the_demo_runs_a_second_time(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without what a make around this one hands on: it would have this one tell of its folders.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-n", "--no-print-directory", "demo"]
    recipe = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=20, check=True)
    words = shlex.split(recipe.stdout.splitlines()[-1])
    assert words[1] == "compare"
    monkeypatch.chdir(out.parents[1])
    ended, trained = run(monkeypatch, *words[2:])
    assert (ended.exit_code, trained) == (0, True), ended.output


@pytest.mark.parametrize(
    "foreign",
    [
        "thesis.tex",
        "report.html",
        "results/digits.mine.json.part",
        "results/notes.txt",
        "results/digits.fp16-put-by.json",
        "results/digits.json",
        "plots/digits.mine.png",
        "tensorboard/mine/events.out.tfevents.1.host",
        "tensorboard/digits.fp16/notes.txt",
    ],
)
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_folder_with_other_files_is_left_alone(
    foreign: str, overwrite: bool, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (out / foreign).parent.mkdir(exist_ok=True)
    if "put-by" in foreign:
        (out / foreign).write_text((out / "results" / "digits.fp16.json").read_text())
    else:
        (out / foreign).write_text('["years of work"]')
    before = files(out)
    ended, trained = run(monkeypatch, "--out", str(out), *(["--overwrite"] if overwrite else []))
    assert (ended.exit_code, trained) == (2, False)
    assert f"{out} holds files of another kind ({foreign})" in ended.output
    assert files(out) == before


def test_files_that_only_have_a_comparisons_names_are_left_alone(tmp_path: Path) -> None:
    """No result is there, so nothing says whose they are."""
    for name in ("plots/digits.step-time.png", "tensorboard/digits.fp16/events.out.tfevents.1.host"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("years of work")
        with pytest.raises(ValueError, match="files of another kind"):
            prepare_folder(tmp_path, overwrite=True)
        (tmp_path / name).unlink()


def test_a_removal_that_was_interrupted_can_be_gone_on_with(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink

    def removed_and_interrupted(path: Path) -> None:
        unlink(path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", removed_and_interrupted)
        for _ in range(len(files(out)) - 1):
            with pytest.raises(KeyboardInterrupt):
                prepare_folder(out, overwrite=True)
    prepare_folder(out, overwrite=True)
    assert not files(out)


def _make_a_dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def _make_a_pipe_among_results(path: Path) -> None:
    (path / "results").mkdir(parents=True)
    os.mkfifo(path / "results" / "digits.fp16.json")


def _make_a_folder_where_a_file_belongs(path: Path) -> None:
    (path / "report.html").mkdir(parents=True)


@pytest.mark.parametrize(
    "make", [Path.touch, _make_a_dangling_link, _make_a_pipe_among_results, _make_a_folder_where_a_file_belongs]
)
@pytest.mark.timeout(20)
def test_what_cannot_be_written_to_is_refused_before_training(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "out")
    for folder in (tmp_path / "out", *([tmp_path / "out" / "below"] if make is Path.touch else [])):
        ended, trained = run(monkeypatch, "--out", str(folder), "--overwrite")
        assert (ended.exit_code, trained) == (2, False)
        assert f"error: out: {folder} " in ended.output


@pytest.mark.parametrize("link", ["results", "report.html", "results/digits.fp16.json"])
def test_what_a_link_leads_to_is_left_alone(link: str, out: Path, tmp_path: Path) -> None:
    elsewhere = (out / link).rename(tmp_path / "elsewhere")
    (out / link).symlink_to(elsewhere)
    before = files(out)
    with pytest.raises(ValueError, match="files of another kind"):
        prepare_folder(out, overwrite=True)
    assert files(out) == before
