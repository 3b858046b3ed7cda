"""The compressor that `commhooks check` is told to check, and its findings as a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import commhooks
from commhooks.experiments.stored import write_text
from commhooks.importing import failures_in_words
from commhooks.language.compressor import Compressor
from commhooks.making import read_hook
from commhooks.testing import Finding, as_used


def compressor_named(text: str) -> Compressor:
    """Return the compressor of a hook's text as it is used: with error feedback if it keeps what it leaves out.

    Raises:
        ValueError: There is no such name, file or class, or a setting cannot work.

    """
    try:
        return as_used(read_hook(text).compressor)
    except ValueError:  # in words already
        raise
    except Exception:  # of the author's own code, such as `loss`
        with failures_in_words(f"compressor {text!r}"):
            raise


def write_findings(compressor: Compressor, findings: Sequence[Finding], file: Path) -> None:
    """Write the findings as JSON: a list of laws, each with verdict, reason and seconds."""
    laws = [dataclasses.asdict(one) for one in findings]
    content = {"compressor": str(compressor), "commhooks": commhooks.__version__, "laws": laws}
    write_text(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
