"""Says on a page when its tables were measured, and warns if what they measure was changed since.

A page says so in its front matter: `measured:` is the commit of its tables (several: the oldest counts), `measures:`
the paths of the code. The note stands below the page's heading, or in place of `<!-- measured -->`. Without git, and in
a clone without these commits, there is none.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

PLACE = "<!-- measured -->"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Put the note in its place. MkDocs calls this for every page before it is rendered."""
    if "measured" not in page.meta:
        return markdown
    commits = page.meta["measured"]
    commits = commits if isinstance(commits, list) else [commits]
    found = note(Path(config.docs_dir).parent, [str(one) for one in commits], page.meta["measures"])
    if PLACE in markdown:
        return markdown.replace(PLACE, found)
    heading = next(line for line in markdown.splitlines() if line.startswith("# "))
    return markdown.replace(heading, f"{heading}\n\n{found}", 1)


def note(root: Path, commits: list[str], paths: list[str]) -> str:
    """Return when the oldest of these commits was made, with a warning if the paths were changed since; "" without git.

    Raises:
        ValueError: One of the paths is not in the repository.

    """
    if missing := [path for path in paths if not (root / path).exists()]:
        raise ValueError(f"measures: {missing[0]} does not exist in {root}: expected paths from the repository's root")
    dates = {one: _git(root, "show", "-s", "--format=%cI %cs", one.partition("+")[0]) for one in commits}
    if not all(dates.values()):
        return ""
    oldest = min(commits, key=lambda one: dates[one])
    measured = f"at commit `{oldest[:8]}` on {dates[oldest].split()[1]}"
    since = _git(root, "log", "--format=%cs", f"{oldest.partition('+')[0]}..HEAD", "--", *paths).splitlines()
    if not since:
        return f"Measured {measured}.\n{{ .caption }}\n"
    names = ", ".join(f"`{path}`" for path in paths)
    changed = "1 commit" if len(since) == 1 else f"{len(since)} commits"
    return (
        '!!! warning "Measured before the code changed"\n\n'
        f"    The oldest table was measured {measured}. Since then {changed} "
        f"changed {names}, the last on {since[0]}: figures may differ today.\n"
    )


def _git(root: Path, *arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
