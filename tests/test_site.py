"""The site, built without the reference: its search, run in QuickJS, finds guide pages first, and no link is broken."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import quickjs
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.tiers import THOROUGH

ROOT = Path(__file__).parent.parent
WORKER = """
var self = globalThis, said = [], heard = [];
globalThis.console = {warn: () => {}};
var addEventListener = (name, listener) => heard.push(listener);
var postMessage = message => said.push(message);
"""


class Search:
    """The theme's search, over the index of a built site."""

    def __init__(self, site: Path) -> None:
        text = (site / "search/search_index.js").read_text(encoding="utf-8")
        index = json.loads(text[text.index("{") : text.rindex("}") + 1])
        (script,) = (site / "assets/javascripts/workers").glob("search.*.min.js")
        self._context = quickjs.Context()
        self._context.eval(WORKER)
        self._context.eval(script.read_text(encoding="utf-8"))
        self._tell({"type": 0, "data": {"config": index["config"], "docs": index["docs"], "options": {}}})

    def pages(self, query: str) -> list[str]:
        """Return the pages that are found, best first."""
        found = self._tell({"type": 2, "data": query})["data"]["items"]
        return [sections[0]["location"].split("#")[0] for sections in found]

    def _tell(self, message: dict[str, Any]) -> Any:
        self._context.eval("said.length = 0")
        self._context.eval(f"heard.forEach(listener => listener({{data: {json.dumps(message)}}}))")
        while self._context.execute_pending_job():
            pass
        return json.loads(self._context.eval("JSON.stringify(said[0])"))


pytestmark = THOROUGH


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    plugins = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "  - mkdocstrings:" in plugins
    del config.plugins["mkdocstrings"]
    build(config)
    return folder


@pytest.fixture(scope="module")
def search(site: Path) -> Search:
    return Search(site)


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("does it pay", "guide/does-it-pay.html"),
        ("1 Gbit", "guide/does-it-pay.html"),
        ("which hook", "guide/choosing.html"),
        ("out of memory", "guide/troubleshooting.html"),
        ("resume", "guide/checkpoints.html"),
        ("own model", "guide/own-model.html"),
        ("leaderboard", "guide/leaderboard.html"),
        ("own compressor", "guide/compressors.html"),
        ("save and load", "guide/checkpoints.html"),
        ("slow network", "guide/does-it-pay.html"),
        ("multi node ethernet", "guide/does-it-pay.html"),
        ("wifi", "guide/does-it-pay.html"),
        ("two offices", "guide/diloco.html"),
        ("how much faster", "guide/does-it-pay.html"),
        ("gradient compression GPU", "guide/gpu.html"),
        ("accuracy loss", "guide/choosing.html"),
        ("wandb", "guide/comparison.html"),
        ("FSDP", "guide/sharded.html"),
        ("HSDP", "guide/hsdp.html"),
        ("MoE", "guide/powersgd.html"),
        ("LoRA", "guide/adapters.html"),
    ],
)
def test_a_newcomers_question_finds_the_page_that_answers_it_first(query: str, page: str, search: Search) -> None:
    assert search.pages(query)[0] == page


@pytest.mark.parametrize("query", ["1", "2", "10", "100", "1.3"])
def test_numbers_are_found(query: str, search: Search) -> None:
    assert search.pages(query)


def test_what_is_unpublished_is_named_instead_of_linked(site: Path, search: Search) -> None:
    text = (site / "architecture.html").read_text(encoding="utf-8")
    assert "<code>docs/decisions/0038-one-exchange.md</code>" in text
    assert not (site / "decisions").exists()
    assert not [page for page in search.pages("decision") if page.startswith("decisions/")]


def test_a_page_warns_if_what_it_measures_was_changed_since(tmp_path: Path) -> None:
    note = runpy.run_path(str(ROOT / "docs/measured.py"))["note"]
    (tmp_path / "code.py").write_text("1", encoding="utf-8")
    (tmp_path / "page.md").write_text("1", encoding="utf-8")
    assert note(tmp_path, ["HEAD"], ["code.py"]) == ""  # no repository

    def commit(changed: str, date: str) -> None:
        (tmp_path / changed).write_text(date, encoding="utf-8")
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        dated = {**os.environ, "GIT_COMMITTER_DATE": f"{date}T12:00:00Z"}
        subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
        subprocess.run(["git", *who, "commit", "-qm", "c"], cwd=tmp_path, check=True, env=dated)

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit("code.py", "2026-01-01")
    commit("page.md", "2026-01-02")
    assert note(tmp_path, ["HEAD"], ["code.py"]).startswith("Measured at commit `HEAD` on 2026-01-02.")
    commit("code.py", "2026-01-03")
    found = note(tmp_path, ["HEAD", "HEAD~1"], ["code.py"])
    assert "measured at commit `HEAD~1` on 2026-01-02. Since then 1 commit changed `code.py`, the last on" in found
    assert "2026-01-03: figures may differ today" in found
    with pytest.raises(ValueError, match=r"gone\.py does not exist"):
        note(tmp_path, ["HEAD"], ["gone.py"])


class Links(HTMLParser):
    """What a page points to, and the places in it that can be pointed to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.places |= {name for key in ("id", "name") if (name := found.get(key))}
        self.targets += [target for key in ("href", "src") if (target := found.get(key))]


def test_every_link_and_picture_of_the_site_leads_somewhere(site: Path) -> None:
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    broken = []
    for page, links in pages.items():
        for target in links.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            there = (page.parent / unquote(url.path)).resolve() if url.path else page
            # names of the reference have no places without mkdocstrings
            known = there not in pages or "reference" in there.parts or url.fragment in {"", *pages[there].places}
            if not (there.exists() and known):
                broken.append(f"{page.relative_to(site)}: {target}")
    assert broken == []
