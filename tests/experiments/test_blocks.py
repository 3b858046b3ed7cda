"""Blocks of a page: the same ones as Markdown, in the terminal and as pictures."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from commhooks.experiments.report.plots import DARK, LIGHT, Theme, canvas
from experiments.studies.blocks import Block, Picture, Table, circumstances, markdown, print_blocks, write_pictures


def draw(theme: Theme) -> Figure:
    return canvas("A curve", "step", 2.0, 1.0)[0]


CURVE = Picture("curve", "a curve", draw)
BLOCKS: list[Block] = ["## Found", Table("Times", ["hook", "ms"], [["`a|b`", "1"]]), CURVE, Table("", ["x"], [["y"]])]


def test_blocks_as_markdown_are_paragraphs_with_titles_only_where_there_are_some() -> None:
    assert markdown(BLOCKS, "there/").split("\n\n") == [
        "## Found",
        "**Times**",
        "| hook | ms |\n| --- | ---: |\n| `a\\|b` | 1 |",
        "![a curve](there/curve.png)",
        "| x |\n| --- |\n| y |\n",
    ]


def test_the_terminal_shows_everything_but_pictures_without_backticks() -> None:
    text = io.StringIO()
    print_blocks(BLOCKS, Console(file=text, width=80))
    assert "a|b" in text.getvalue() and "Times" in text.getvalue()
    assert "`" not in text.getvalue() and "curve" not in text.getvalue()


def test_a_picture_is_in_its_theme_s_colours_and_the_same_again(tmp_path: Path) -> None:
    write_pictures(BLOCKS, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]
    assert (tmp_path / "curve.png").read_bytes() == CURVE.png(LIGHT) != CURVE.png(DARK)


def test_circumstances_name_command_time_machine_and_versions() -> None:
    machine: dict[str, str | int | float] = {"processor": "a processor", "cores": 2, "load": 0.5}
    said = circumstances("it", 3.0, machine, {"torch": "2.13", "numpy": "2"}, more=", Linux", commit="abc")
    assert said == (
        "`it` took 3.00 s on a processor, 2 cores, Linux, with torch 2.13, numpy 2, at commit abc; 0.5 processes "
        "wanted to run in the minute before the end."
    )
    assert "commit" not in circumstances("it", 3.0, machine, {})
