"""The compressor that `commhooks check` is told to check, and its findings as a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import commhooks
from commhooks.language.compressor import Compressor
from commhooks.making import kind_of, make_compressor
from commhooks.testing import Finding, as_used

from .stored import write_text
from .tasks.importing import failures_in_words, import_module


def compressor_named(text: str) -> Compressor:
    """Return the compressor, as it is used: a codec in two hops, with error feedback if it keeps what it leaves out.

    Args:
        text: A name of the registry, "package.module:Class" or "folder/file.py:Class", and settings after a colon.

    Raises:
        ValueError: There is no such name, file or class, or a setting cannot work.

    """
    where, _, rest = text.partition(":")
    if rest[:1].isupper():
        where = import_module(where, f"compressor {text!r}").__name__
        text = f"{where}:{rest}"
        name = f"{where}:{rest.partition(':')[0]}"
    elif where.endswith(".py"):
        raise ValueError(f"compressor {text!r}: name the class in the file too, '{where}:Class'")
    else:
        name = where
    kind = kind_of(name)
    is_codec = isinstance(kind.make, type) and issubclass(kind.make, commhooks.codecs.Codec)
    try:
        return as_used(make_compressor(f"TwoHop:codec=({text})" if is_codec else text))
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
