"""The benchmark suite: verdicts, the gate, the pages, exponents, and a tiny section from its ranks to its rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commhooks.experiments.results.summary import Spread
from commhooks.native import compiled, library
from experiments.studies.app import app
from experiments.studies.bench import codecs, powersgd
from experiments.studies.bench.copies import EAGER, Worked
from experiments.studies.bench.gate import BETTER, GONE, NEW, SAME, WORSE, changes
from experiments.studies.bench.page import pages
from experiments.studies.bench.results import Measured, Results, read, write
from experiments.studies.bench.rows import MET, MISSED, WITHIN, Row, compared
from experiments.studies.bench.sections import SECTIONS

DOCS = Path(__file__).parents[2] / "docs"


def row(name: str, median: float, width: float = 0.02, target: float | None = None, slack: float = 0.0) -> Row:
    spread = Spread(median, median - width / 2, median + width / 2)
    return Row(name=name, quantity="step time", spread=spread, target=target, slack=slack)


def measured(*rows: Row, processor: str = "a processor", torch: str = "2.13") -> Measured:
    here: dict[str, str | int | float] = {"processor": processor, "cores": 2, "system": "Linux", "load": 0.5}
    return Measured(rows=rows, command="it", commit="abc", seconds=3.0, machine=here, versions={"torch": torch})


def kinds(stored: Results, found: Results) -> dict[str, str]:
    return {change.key.split(":")[0]: change.kind for change in changes(stored, found)}


def test_a_median_at_the_target_meets_it_and_the_slack_counts_only_above_it() -> None:
    verdicts = [row("a", median, target=1.0, slack=0.05).verdict for median in (0.9, 1.0, 1.05, 1.06)]
    assert verdicts == [MET, MET, WITHIN, MISSED]
    assert row("a", 1.06, target=1.0).verdict == MISSED
    assert row("a", 1.06).verdict == ""


def test_ours_is_compared_round_by_round_with_both_turns_of_the_peer() -> None:
    seconds = {"ours": [2.0, 6.0], "theirs": [1.0, 2.0], "again": [3.0, 4.0]}
    spread, noise = compared(seconds)
    assert spread.median == pytest.approx((2 / 2 + 6 / 3) / 2)
    assert noise.median == pytest.approx((3 / 1 + 4 / 2) / 2)


def test_only_a_change_beyond_both_spreads_counts() -> None:
    stored = {"ddp": measured(row("worse", 1.0), row("better", 1.0), row("within", 1.0), row("wide", 1.0, width=0.4))}
    now = {"ddp": measured(row("worse", 1.05), row("better", 0.95), row("within", 1.03), row("wide", 1.3))}
    assert kinds(stored, now) == {"worse": WORSE, "better": BETTER, "within": SAME, "wide": SAME}


def test_an_exact_count_that_the_file_rounded_has_not_changed(tmp_path: Path) -> None:
    now = {"hooks": measured(row("two thirds", 2 / 3, width=0.0), row("one third", 1 / 3, width=0.0))}
    write(tmp_path / "stored.json", now)
    assert set(kinds(read(tmp_path / "stored.json"), now).values()) == {SAME}


def test_rows_that_are_missing_on_either_side_are_named_and_other_sections_are_left_alone() -> None:
    stored = {"ddp": measured(row("old", 1.0)), "hooks": measured(row("not measured", 1.0))}
    assert kinds(stored, {"ddp": measured(row("fresh", 1.0))}) == {"old": GONE, "fresh": NEW}


def test_a_file_that_was_written_reads_the_same_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.json"
    results = {"ddp": measured(row("a", 1.0, target=1.0), dataclasses.replace(row("b", 2.0), noise=Spread(1, 1, 1)))}
    write(path, results)
    assert read(path) == results
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match="expected results of the benchmarks, of format 1"):
        read(path)


def test_what_must_be_moved_is_counted_in_copies() -> None:
    square = [(512, 512)]
    floors = {}
    for text in ("all-reduce", "fp16", "int8", "powersgd:rank=1"):
        worked = Worked(text, square, 8)
        worked.step(EAGER)
        floors[text] = worked.floor()
    assert floors["all-reduce"] == 1.0
    assert floors["fp16"] == (8 + 2 * 2) / 8
    code = 1 + 4 / 128  # bytes of an element, with its share of the block's scale
    assert floors["int8"] == pytest.approx((8 + 12 + 12 / 8 + (3 + 1 / 8) * code) / 8)
    assert floors["powersgd:rank=1"] == pytest.approx(28 / 8, abs=0.02)


@pytest.mark.skipif(not compiled().levels, reason=str(compiled()))
def test_the_compressors_that_are_measured_in_two_forms_are_those_with_compiled_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called, found, function = list[str](), set(), library.function

    def seeing(name: str, *others: Any) -> Any:
        called.append(name)
        return function(name, *others)

    monkeypatch.setattr(library, "function", seeing)
    for text in codecs.names():
        called.clear()
        Worked(text, [(128, 128), (4096,)], 2).step(compiled().levels[0])
        found |= {text.partition(":")[0]} if called else set()
    assert found == codecs.COMPILED


def test_the_pages_in_the_repository_are_those_of_their_file() -> None:
    found = {
        path.relative_to(DOCS).as_posix(): text
        for path in [DOCS / "benchmarks.md", *(DOCS / "benchmarks").iterdir()]
        if "\nFrozen: measured at commit " not in (text := path.read_text(encoding="utf-8"))
    }
    assert found == pages(read(DOCS / "benchmarks.json"), "benchmarks")


def test_a_tiny_section_comes_back_from_its_rank_as_rows() -> None:
    told: list[str] = []
    rows = powersgd.measure(True, told.append)
    eager = [one.key for one in rows if one.quantity == "eager"]
    assert eager == [f"rank 4, tiny, {buckets}: eager" for buckets in ("1 bucket", "4 buckets")]
    assert all(one.spread.low > 0 for one in rows)
    assert told


def test_a_check_fails_if_a_ratio_got_worse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "benchmarks.json"
    section = dataclasses.replace(SECTIONS["ddp"], measure=lambda quick, tell: [row("a", 1.5)])
    monkeypatch.setitem(SECTIONS, "ddp", section)
    for median, code in ((1.0, 1), (1.49, 0)):
        write(path, {"ddp": measured(row("a", median))})
        assert CliRunner().invoke(app, ["bench", "ddp", "--check", str(path)]).exit_code == code


def test_sections_that_are_measured_again_replace_only_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "benchmarks.json"
    section = dataclasses.replace(SECTIONS["ddp"], measure=lambda quick, tell: [row("new", 1.5)])
    monkeypatch.setitem(SECTIONS, "ddp", section)
    write(path, {"ddp": measured(row("old", 1.0)), "hooks": measured(row("kept", 1.0))})
    assert CliRunner().invoke(app, ["bench", "ddp", "--results", str(path)]).exit_code == 0
    found = json.loads(path.read_text())["sections"]
    assert [found[name]["rows"][0]["name"] for name in ("ddp", "hooks")] == ["new", "kept"]
    for name, text in pages(read(path), "benchmarks").items():
        assert (tmp_path / name).read_text() == text
