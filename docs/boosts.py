"""Three changes to the site's search: pages count by their folder, have words of newcomers, and numbers are found.

A page's own `search: boost:` takes precedence over its folder's. Studies and the reference use every word of the
guide, and there are more of them; without a factor they come first.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

BOOSTS = {"guide": 2.0, "reference": 0.2, "benchmarks": 0.2, "reproductions": 0.05}
"""Factors of a page's score, by the first folder of its path; pages elsewhere count once."""
WORDS = {
    "guide/does-it-pay.md": ["slow network", "multi node ethernet", "wifi", "faster"],
    "guide/checkpoints.md": ["resume"],
    "guide/comparison.md": ["wandb"],
    "guide/diloco.md": ["two offices"],
    "guide/gpu.md": ["GPU"],
    "guide/sharded.md": ["FSDP"],
    "guide/hsdp.md": ["HSDP"],
    "guide/powersgd.md": ["MoE"],
    "guide/adapters.md": ["LoRA"],
}
"""Words that newcomers type, by the page that answers them. Keep to words of one topic."""
_AMBIGUOUS = "e=e+s+o.id"  # in the theme's script: a node's edges as text


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Set the page's boost and words. MkDocs calls this for every page before it is rendered."""
    page.meta["search"] = {"boost": BOOSTS.get(page.file.src_uri.split("/")[0], 1.0)} | page.meta.get("search", {})
    if words := WORDS.get(page.file.src_uri):
        page.meta["tags"] = words
    return markdown


def on_post_build(*, config: MkDocsConfig, **_: object) -> None:
    """Mend the search script, which on some sites finds nothing for a number such as "1". MkDocs calls this at the end.

    lunr 2.3.9 recognises equal nodes of its tree of words by labels and numbers written without anything in between. If
    words are numbers, different nodes may look the same, and a search that meets such a node fails.
    """
    scripts = [*Path(config.site_dir, "assets/javascripts/workers").glob("search.*.min.js")]
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        if text.count(_AMBIGUOUS) != 1:
            logging.getLogger("mkdocs.hooks.boosts").warning(
                "%s is not the search script that can be mended", script.name
            )
        script.write_text(text.replace(_AMBIGUOUS, f'{_AMBIGUOUS}+","'), encoding="utf-8")
