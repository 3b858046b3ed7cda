"""The calls for which the host would wait on a GPU, and the lines that make them."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WAIT = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
    Tensor.__index__, Tensor.nonzero, Tensor.masked_select, Tensor.unique, torch.nonzero, torch.masked_select,
    torch.unique,
}  # fmt: skip
_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])


class Waits(TorchFunctionMode):
    """Notes the lines outside of this package that wait; this package's have other ways on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note the caller, if the host would wait."""
        if function in _WAIT or (function is Tensor.__getitem__ and _has_mask(args[1])):
            frame = inspect.currentframe()
            assert frame is not None and frame.f_back is not None, "a function has a caller"
            frame = frame.f_back
            while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
                frame = frame.f_back
            file, line = frame.f_code.co_filename, frame.f_lineno
            if not file.startswith(_OURS):
                self.places.append(f"{file}:{line}: {linecache.getline(file, line).strip()}")
        return function(*args, **(kwargs or {}))


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(one, Tensor) and one.dtype is torch.bool for one in parts)
