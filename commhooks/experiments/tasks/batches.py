"""The contents of a user's batch, and the place of an error in a user's code, in words for messages."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NOT_THEIRS = str(Path(__file__).parent), str(Path(torch.__file__).parent)  # whose lines explain nothing to a user


def place_of(error: BaseException) -> str:
    """Return the file and line that raised the error, for the end of a message."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<", *_NOT_THEIRS))]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def leaves_of(batch: Any) -> Iterator[Any]:
    """Yield the tensors and other values in a batch, however nested."""
    if isinstance(batch, Mapping):
        batch = [part for pair in batch.items() for part in pair]
    if isinstance(batch, list | tuple):
        for part in batch:
            yield from leaves_of(part)
    elif isinstance(batch, Tensor | str | bytes | int | float):  # the text of other objects may hold their addresses
        yield batch


def batch_in_words(batch: Any) -> str:
    """Return the types and shapes of a batch's contents in words: 'a list of (32, 10) float32, (32,) int64'."""
    if isinstance(batch, Tensor):
        return f"{tuple(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, Mapping):
        return "a dict of " + ", ".join(f"{key!r}: {batch_in_words(value)}" for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of " + ", ".join(map(batch_in_words, batch))
    return type(batch).__name__
