"""What the README and the documentation show is what the code does.

A fenced block marked ``python`` is run: all blocks of one page in one namespace, by each of two ranks. One whose
title is a file of this repository is an excerpt, and must stand in that file. One whose title is a file that does not
exist is a whole script, and runs under torchrun.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tiers import thorough
from tests.world import run_world

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")], key=lambda p: (len(p.parts), p)
)
FENCE = re.compile(
    r"^(?P<indent> *)```python(?: title=\"(?P<title>[^\"]*)\")?\n(?P<code>.*?)^(?P=indent)```", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """One fenced block of Python, and where it stands."""

    page: Path
    line: int
    title: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match["title"] or "", textwrap.dedent(match["code"]))
        for match in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
EXCERPTS = [block for block in BLOCKS if block.title and (ROOT / block.title).exists()]
SCRIPTS = [block for block in BLOCKS if block.title and not (ROOT / block.title).exists()]
PAGES_THAT_RUN = [page for page in PAGES if any(not block.title for block in blocks_of(page))]


def run_blocks(rank: int, blocks: list[Block], folder: str) -> None:
    os.chdir(folder)
    module = sys.modules["page"] = types.ModuleType("page")  # dataclasses look their own module up
    vars(module)["rank"] = rank
    for block in blocks:
        exec(compile(block.code, block.place, "exec", dont_inherit=True), vars(module))


@pytest.mark.parametrize("page", PAGES_THAT_RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_sample_on_the_page_runs_on_two_ranks(page: Path, tmp_path: Path) -> None:
    run_world(run_blocks, 2, [block for block in blocks_of(page) if not block.title], str(tmp_path))


@pytest.mark.parametrize("block", [SCRIPTS[0], *thorough(SCRIPTS[1:])], ids=lambda block: block.place)
def test_a_whole_script_runs_under_torchrun(block: Block, tmp_path: Path) -> None:
    (tmp_path / block.title).write_text(block.code, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", block.title]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize("block", EXCERPTS, ids=lambda block: block.place)
def test_an_excerpt_stands_in_the_file_that_it_names(block: Block) -> None:
    source = without_indent((ROOT / block.title).read_text(encoding="utf-8"))
    for part in re.split(r"^ *\.\.\.\n", block.code, flags=re.M):
        assert without_indent(part) in source, f"{block.place}: no longer in {block.title}:\n{part}"


def without_indent(text: str) -> str:
    """Return the text with white space at line starts and empty lines gone: an excerpt may be indented otherwise."""
    return "\n".join(["", *(line.strip() for line in text.splitlines() if line.strip()), ""])


def test_every_file_that_the_readme_links_to_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [target.split("#")[0] for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text)]
    assert not [target for target in targets if not (ROOT / target).exists()]
