"""The frame of reproductions, each of them at its tiny size, and the pages with what was measured."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

import experiments.studies.reproduce as registry
from commhooks.experiments.machine import versions
from experiments.studies.blocks import Block, Picture, Table, markdown
from experiments.studies.reproduce import MODULES, Reproduction, load_reproduction
from experiments.studies.reproduce.notes import PARTS, Notes
from experiments.studies.reproduce.results import MEASURED, RESULTS, Results, page
from experiments.studies.reproduce.running import Request, reproduce
from tests.tiers import thorough

ROOT = Path(__file__).parent.parent.parent
PAGES = ROOT / "docs" / "reproductions"
OF_EACH_WAY = ("feedback-and-optimizers", "control-link", "sharded-loss")
"""Reproductions that between them count, train, time, simulate, and shard."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of the made-up reproduction."""

    parts: tuple[int, ...] = (1, 2)
    kind: str = "emulated"
    seeds: int = 3


class MadeUp:
    """A reproduction whose parts are counted, and the second of which may fail."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.fails = False

    def reproduction(self) -> Reproduction:
        return Reproduction(
            name="made-up",
            title="A made-up table",
            source="Nobody, table 1",
            said=("Two is more than one.",),
            sizes={"default": Settings(), "tiny": Settings(parts=(1,))},
            measure=self.measure,
            show=self.show,
        )

    def measure(self, settings: Settings, notes: Notes) -> dict[str, Any]:
        return {"values": [notes.once(f"part {part}", partial(self.make, part)) for part in settings.parts]}

    def make(self, part: int) -> float:
        if part == 2 and self.fails:
            raise KeyboardInterrupt
        self.made.append(part)
        return float("inf") if part == 2 else part / 3

    def show(self, settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
        rows = [[str(part), f"{value:.3f}"] for part, value in zip(settings.parts, measured["values"], strict=True)]
        return [Table("Values", ["part", "value, s"], rows), "Found.", Picture("curve", "a curve", lambda _: Figure())]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    fake = MadeUp()
    known = load_reproduction
    monkeypatch.setitem(MODULES, "made-up", "")
    for module in (registry, __import__("experiments.studies.reproduce.running", fromlist=["running"])):
        monkeypatch.setattr(
            module, "load_reproduction", lambda name: fake.reproduction() if name == "made-up" else known(name)
        )
    return fake


def run(out: Path, **changes: Any) -> str:
    text = io.StringIO()
    reproduce(Request(name="made-up", out=out, **changes), Console(file=text, width=200))
    return text.getvalue()


def test_what_was_measured_is_shown_kept_and_not_measured_twice(made_up: MadeUp, tmp_path: Path) -> None:
    out, docs = tmp_path / "out", tmp_path / "docs"
    docs.mkdir()
    assert "0.333" in run(out)
    assert {path.name for path in out.iterdir()} == {RESULTS, MEASURED, "curve.png"}
    assert Results.read(out / RESULTS).measured == {"values": [1 / 3, float("inf")]}
    again = run(out, docs=docs)
    assert "finished already" in again and "other versions" not in again and "0.333" in again
    assert made_up.made == [1, 2]
    assert "![a curve](made-up/curve.png)" in (docs / "made-up" / MEASURED).read_text()
    assert (docs / "made-up" / "curve.png").is_file()
    run(out, overwrite=True)
    assert made_up.made == [1, 2, 1, 2]


def test_an_interrupted_one_continues_and_other_settings_do_not_take_its_parts(made_up: MadeUp, tmp_path: Path) -> None:
    run(tmp_path, size="tiny")
    made_up.fails = True
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, overwrite=True)
    made_up.fails = False
    parts = (tmp_path / PARTS).read_text()
    for damaged in ("nonsense", '["part 1", 1]', '["part 1", 1, "soon"]', '[["part 1"], 1, 2]'):
        (tmp_path / PARTS).write_text(f"{parts.splitlines()[0]}\n{damaged}\n")
        with pytest.raises(ValueError, match=r"parts\.jsonl, line 2: expected a key.*--overwrite"):
            run(tmp_path)
    (tmp_path / PARTS).write_text(parts + '["part 2", 0.')  # half a line, as of a process that was killed
    with pytest.raises(ValueError, match="other settings or versions"):
        run(tmp_path, seeds=4)
    assert "1 part finished already" in run(tmp_path)
    assert made_up.made == [1, 1, 2] and not (tmp_path / PARTS).exists()
    with pytest.raises(ValueError, match=r"with other settings: parts \[1, 2\], not \[1\];"):
        run(tmp_path, size="tiny")


def test_results_of_another_version_are_shown_with_a_note_and_edited_ones_are_rejected(
    made_up: MadeUp, tmp_path: Path
) -> None:
    run(tmp_path)
    file = tmp_path / RESULTS
    dataclasses.replace(Results.read(file), versions=versions() | {"torch": "1.0"}).write(tmp_path)
    assert "other versions" in run(tmp_path) and made_up.made == [1, 2]
    good = json.loads(file.read_text())
    changes: list[tuple[dict[str, Any], str]] = [
        ({"format": 99}, "its format is 99, not 1"),
        ({"measured": {}}, r"does not hold what made-up shows \(KeyError: 'values'\).*--overwrite"),
        ({"measured": {"values": ["many", None]}}, "does not hold what made-up shows.*--overwrite"),
        ({"machine": {}}, "does not hold what made-up shows.*--overwrite"),
        ({"seconds": None}, r"expected <class 'float'> \(got None\).*--overwrite"),
        ({"versions": "none"}, r"expected .*Mapping\[str, str\] \(got 'none'\).*--overwrite"),
    ]
    for change, said in changes:
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in (good | change).items())
        file.write_text(f"{{\n{lines}\n}}\n")
        with pytest.raises(ValueError, match=said):
            run(tmp_path)
    assert "0.333" in run(tmp_path, overwrite=True)


def test_what_cannot_work_is_rejected_before_anything_is_measured(
    made_up: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = tmp_path / "letters"
    stranger.mkdir()
    (stranger / "letter.txt").write_text("Dear ...")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    asked: dict[str, Any] = {"out": tmp_path / "new"}
    for changes, said in (
        ({"size": "huge"}, "default, tiny"),
        ({"link": "real"}, "hosts, emulated"),
        ({"link": "hosts"}, "needs root.*--link emulated"),
        ({"seeds": 1}, "at least 2"),
        ({"seeds": 10**9}, "at most 1,000"),
        ({"docs": tmp_path / "missing"}, "there is no folder"),
        ({"out": stranger, "overwrite": True}, "another kind"),
    ):
        with pytest.raises(ValueError, match=said):
            run(**asked | changes)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="without torchrun"):
        run(tmp_path / "new", overwrite=True)
    assert made_up.made == [] and (stranger / "letter.txt").is_file() and not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", thorough(MODULES, unless=lambda name: name in OF_EACH_WAY))
def test_every_reproduction_runs_at_its_tiny_size(name: str, tmp_path: Path) -> None:
    found = reproduce(Request(name=name, size="tiny", out=tmp_path), Console(quiet=True))
    blocks = load_reproduction(name).show(load_reproduction(name).sizes["tiny"], found.measured)
    assert any(isinstance(block, str) for block in blocks), "a finding in a sentence"
    tables = [block for block in blocks if isinstance(block, Table)]
    assert any(block.rows for block in tables)
    assert all({len(row) for row in block.rows} == {len(block.columns)} for block in tables)
    assert len(list(tmp_path.glob("*.png"))) == sum(isinstance(block, Picture) for block in blocks)


@pytest.mark.parametrize("name", MODULES)
def test_every_reproduction_has_a_page_with_the_numbers_of_a_run_that_was_made(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert f'--8<-- "docs/reproductions/{name}/{MEASURED}"' in text

    reproduction, made = load_reproduction(name), Results.read(PAGES / name / RESULTS)
    settings = reproduction.sizes[made.size]
    assert made.size == "default"
    assert made.settings == Results.of_settings(settings)
    assert made.command == Request(name=name, size=made.size).command
    assert f"```\n{made.command}\n```" in text
    blocks = reproduction.show(settings, made.measured)
    shown = markdown(page(reproduction, made, blocks), f"{name}/")
    assert (PAGES / name / MEASURED).read_text(encoding="utf-8") == shown
    for block in blocks:
        if isinstance(block, Picture):
            assert (PAGES / name / f"{block.name}.png").is_file()
