"""Links to pages that stay in the repository only are shown on the site as the file's name.

In the repository they stay links, which a forge follows. What is unpublished is listed in mkdocs.yml (exclude_docs).
"""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\[\]]+)\]\((?P<path>[\w./-]+\.(?:md|json))(?:#[\w-]+)?\)")


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: object) -> str:
    """Replace the links to files that are not published. MkDocs calls this for every page before it is rendered."""
    folder = posixpath.dirname(page.file.src_uri)

    def shown(link: re.Match[str]) -> str:
        there = posixpath.normpath(posixpath.join(folder, link["path"]))
        found = files.get_file_from_path(there)
        if found is None or not found.inclusion.is_excluded():
            return link[0]
        return f"{link['text']} (`docs/{there}`)"

    return _LINK.sub(shown, markdown)
