"""Sets how much a page counts in the site's search, by its folder; a page's own `search: boost:` takes precedence.

Decisions and reproductions use every word of the guide, and there are more of them; without this they come first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

BOOSTS = {"guide": 2.0, "reference": 0.2, "benchmarks": 0.2, "decisions": 0.05, "reproductions": 0.05}
"""Factors of a page's score, by the first folder of its path; pages elsewhere count once."""


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Set the page's boost. MkDocs calls this for every page before it is rendered."""
    page.meta["search"] = {"boost": BOOSTS.get(page.file.src_uri.split("/")[0], 1.0)} | page.meta.get("search", {})
    return markdown
