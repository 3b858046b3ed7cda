"""CIFAR-10's files in their published forms: pickles for Python, or records of bytes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Images = tuple[Tensor, Tensor]  # N×3×32×32 bytes, and N labels

_PIXELS = 3 * 32 * 32
_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
_ELSEWHERE = "the task 'digits' needs no files"
_REMEDY = f"unpack the archive again (https://www.cs.toronto.edu/~kriz/cifar.html); {_ELSEWHERE}"


@cache
def read_folder(folder: Path | None) -> tuple[Images, Images]:
    """Return the images to train on, and the test images.

    Args:
        folder: A folder that contains the six files of either form, or a folder `cifar-10-batches-py` or
            `cifar-10-batches-bin` with them.

    Raises:
        ValueError: The folder is None, or a file is missing or damaged; the message says which.

    """
    if folder is None:
        raise ValueError(
            "it needs the folder of the unpacked archive: 'cifar10:folder=PATH/cifar-10-batches-py' (or "
            f"-bin); {_ELSEWHERE}"
        )
    if not folder.is_dir():
        what = "is a file; unpack it, and name the folder" if folder.is_file() else "does not exist"
        raise ValueError(f"folder {folder} {what}; {_ELSEWHERE}")
    for place in (folder, folder / "cifar-10-batches-py", folder / "cifar-10-batches-bin"):
        for suffix, read in (("", _read_pickle), (".bin", _read_records)):
            paths = [place / f"{name}{suffix}" for name in _BATCHES]
            if any(path.is_file() for path in paths):
                return _read_all(paths, read)
    raise ValueError(
        f"{folder} has neither data_batch_1 to data_batch_5 and test_batch (the form for Python) nor the same names "
        f"with .bin (the binary form); put the unpacked archive there, or name its folder; {_ELSEWHERE}"
    )


def _read_all(paths: list[Path], read: Callable[[bytes], tuple[Any, Any]]) -> tuple[Images, Images]:
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"{paths[0].parent} has no {', '.join(missing)}; {_REMEDY}")
    found = []
    for path in paths:
        try:
            found.append(_checked(*read(path.read_bytes())))
        except Exception as error:  # a damaged pickle raises almost anything
            raise ValueError(f"{path} is damaged: {error}; {_REMEDY}") from error
        if len(found[-1][1]) != len(found[0][1]):
            raise ValueError(
                f"{path} has {len(found[-1][1])} images, and {paths[0].name} has {len(found[0][1])}: "
                f"one of them is incomplete; {_REMEDY}"
            )
    *training, test = found
    images, labels = (torch.cat(parts) for parts in zip(*training, strict=True))
    return (images, labels), test


def _checked(images: Any, labels: Any) -> Images:
    """Return pixels and labels as tensors; raise ValueError unless they describe images of ten classes."""
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (_PIXELS,):
        raise ValueError(f"expected images of {_PIXELS:,} bytes each")
    labels = np.asarray(labels)
    if len(images) == 0 or labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise ValueError(f"expected a label for each of {len(images)} images (got {labels.size})")
    if wrong := [int(label) for label in labels if not 0 <= label <= 9]:
        raise ValueError(f"expected labels from 0 to 9 (got {wrong[0]})")
    return torch.tensor(images).view(-1, 3, 32, 32), torch.tensor(labels.astype(np.int64))


def _read_records(content: bytes) -> tuple[Any, Any]:
    """Return pixels and labels: each image is a byte with its label, then 3,072 of pixels."""
    if not content or len(content) % (1 + _PIXELS):
        raise ValueError(f"expected a multiple of {1 + _PIXELS:,} bytes (got {len(content):,})")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + _PIXELS)
    return records[:, 1:], records[:, 0]


def _read_pickle(content: bytes) -> tuple[Any, Any]:
    """Return pixels and labels of a pickled dictionary; its names are bytes, since Python 2 wrote it."""
    found = _OnlyArrays(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(found, dict) or not {b"data", b"labels"} <= found.keys():
        raise ValueError("expected a dictionary with b'data' and b'labels'")
    return found[b"data"], found[b"labels"]


def _bytes(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it encodes bytes as {encoding}")
    return text.encode("latin1")


_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _bytes,
}
"""The names that pickled arrays need; any other name in a pickle could run code."""


class _OnlyArrays(pickle.Unpickler):
    """Unpickles arrays, containers, numbers and text, and rejects everything else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which CIFAR-10's files do not")
        return _ALLOWED[module_name, global_name]
