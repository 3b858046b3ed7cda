"""What the README and the documentation show is what the code does.

Fenced blocks marked ``python`` are run, all of a page in one namespace, by each of two ranks. One whose title is a file
of this repository must stand in that file; with a title that does not exist it is a script, and runs under torchrun.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import textwrap
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from commhooks.compressors import COMPRESSORS
from tests.structure import sources_of, words_of
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


def defined_in(path: Path) -> set[str]:
    """Return the functions and classes that a file defines, and ``Class.member``, which may be an attribute of self."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            fields = {part.target for part in node.body if isinstance(part, ast.AnnAssign)}
            members = {field.id for field in fields if isinstance(field, ast.Name)}
            members |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            stored = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
            members |= {part.attr for part in stored if ast.unparse(part).startswith("self.")}
            names |= {node.name, *(f"{node.name}.{member}" for member in members)}
    return names


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S))


def test_the_names_in_the_tour_exist() -> None:
    text = (ROOT / "docs/tour.md").read_text(encoding="utf-8")
    picture = (ROOT / "docs/figures/journey.svg").read_text(encoding="utf-8")
    sources = [*sources_of("ddp_core"), *sources_of("commhooks")]
    defined = {name for source in sources for name in defined_in(ROOT / source.path)}
    words = {word for source in sources for word in words_of(source)}
    spans = code_spans(text) + re.findall(r"class=\"title\"[^>]*>([^<]+)<", picture)
    unknown = []
    for span in spans:
        name = re.split(r"[^\w./]", span)[0]  # without arguments
        if "/" in name:
            known = (ROOT / name).exists()
        elif name[:1].isupper():
            known = name in defined
        else:  # of others' attributes, as in p.grad, we know nothing
            known = "." in name or "_" not in name or name in words
        unknown += [] if known else [span]
    assert not unknown


def test_the_table_from_pytorchs_names_leads_to_names_that_exist() -> None:
    text = (ROOT / "docs/guide/ddp_core-details.md").read_text(encoding="utf-8")
    table = text.partition("| PyTorch | ddp_core |")[2].partition("\n\n")[0]
    unknown, found = [], 0
    for row in table.splitlines():
        defined: set[str] = set()
        for span in code_spans(row.rpartition(" | ")[2]):
            if span.endswith(".py"):
                defined = defined_in(ROOT / span)
            else:
                found += 1
                unknown += [] if span in defined else [row]
    assert found, "the table is looked for in the wrong place"
    assert not unknown


def test_the_readme_has_no_relative_link_and_every_file_that_it_names_exists() -> None:
    """On an index, a relative link leads nowhere."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not re.findall(r"\]\((?!https?:)[^)]+\)", text)
    named = [span for span in code_spans(text) if re.fullmatch(r"docs/[\w./-]+|[A-Z]+\.(?:md|cff)", span)]
    assert named and not [name for name in named if not (ROOT / name).exists()]


def test_the_page_on_hooks_holds_the_catalogue_which_names_every_registered_compressor() -> None:
    catalogue = runpy.run_path(str(ROOT / "docs" / "catalogue.py"))
    page = (ROOT / "docs" / "guide" / "hooks.md").read_text(encoding="utf-8")
    table = catalogue["table"]()
    assert table in catalogue["on_page_markdown"](page)
    assert not [name for name in COMPRESSORS if f"`{name}`" not in table]
