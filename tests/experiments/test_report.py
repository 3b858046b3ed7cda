"""What a person gets to see: table, pictures, logs, page."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from experiments.compare import Comparison, write_report
from rich.console import Console

from commhooks.units import bytes_in_words
from experiments.output import prepare_folder
from experiments.report.table import summary_tables
from experiments.report.tensorboard import write_logs
from experiments.report.words import percent, seconds_in_words, times
from experiments.runs import RunSettings
from experiments.summary import summarise
from tests.experiments.synthetic import results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    prepare_folder(out)
    found = results()
    write_report(
        found, summarise(found), Comparison(runs=(RunSettings(task="gpt"),), out=out, command="commhooks compare <x>")
    )
    return out


class Links(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in {"src", "href", "srcset"}]


def test_the_page_needs_nothing_but_itself(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = Links()
    page.feed(text)
    assert len(page.fetched) == 2 * 2 * 3  # tasks, themes, pictures
    assert all(link.startswith("data:image/png;base64,") for link in page.fetched)
    assert not re.search(r"url\(|@import|<script", text)


def test_the_page_names_every_hook_defines_its_terms_and_says_how_to_get_it_again(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    for words in (
        "powersgd:rank=4",
        "100 Mbit/s",
        "compute + compression + waiting = the step",
        "commhooks compare &lt;x&gt;",
    ):
        assert words in text


def test_the_pictures_are_files_too(folder: Path) -> None:
    names = {path.name for path in (folder / "plots").iterdir()}
    assert names == {
        f"{task}.{what}.png" for task in ("digits", "gpt") for what in ("step-time", "loss-bytes", "loss-time")
    }


def test_every_file_of_a_report_is_known_again(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    for one in results():
        one.write(copy / "results")
        write_logs(one, copy / "tensorboard")
    prepare_folder(copy, overwrite=True)
    assert [path for path in copy.rglob("*") if path.is_file()] == []


def test_the_tables_hold_what_was_asked_for_and_fit_a_terminal() -> None:
    out = StringIO()
    Console(file=out, width=100).print(*summary_tables(summarise(results())[:3], "digits"))
    text = out.getvalue()
    rows = "".join(line for line in text.splitlines() if "powersgd:rank=4" in line)
    assert "…" not in text
    for cell in ("2.129 (+1.1 %)", "2.65 s", "8.00 MB", "20.0×", "52.0 / 10.0 / 16.0"):
        assert cell in rows


@pytest.mark.parametrize("loss", [0.0, -1.0, float("nan"), float("inf")])
def test_a_target_that_no_loss_reaches_is_refused(loss: float) -> None:
    with pytest.raises(ValueError, match="expected a finite loss above zero"):
        Comparison(runs=(RunSettings(task="gpt"),), out=Path("runs"), target_loss=loss)


def test_numbers_read_well() -> None:
    assert [bytes_in_words(n) for n in (12, 4_200, 72_600_000, 1.5e9)] == ["12 B", "4.20 kB", "72.6 MB", "1.50 GB"]
    assert [seconds_in_words(s) for s in (0.0981, 65.2, None)] == ["98.1 ms", "65.2 s", "—"]
    assert (times(7.123), times(float("inf")), percent(0.975)) == ("7.12×", "nothing moved", "97.5 %")
