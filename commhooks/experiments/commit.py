"""The commit of the code in a checkout."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

_HERE = Path(__file__)


@functools.cache
def commit_of_code(file: Path = _HERE) -> str | None:
    """Return the commit of the checkout that tracks this file, with "+changes" if tracked files differ from it.

    None for an installed package, even one in an environment inside somebody's checkout, and without git.
    """
    if _git(file, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _git(file, "rev-parse", "--short=12", "HEAD")
    return f"{commit}+changes" if commit and _git(file, "status", "--porcelain", "--untracked-files=no") else commit


def _git(file: Path, *words: str) -> str | None:
    """Return git's output in the folder of a file; None if it fails."""
    try:
        ended = subprocess.run(
            ["git", "-C", str(file.resolve().parent), *words], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None
