"""Buffers, such as the statistics of batch norms: rank 0's are copied to all ranks, or a buffer hook synchronises them.

Either happens in the forward pass, before or after the wrapped module runs; the futures of a buffer hook are awaited at
the end of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core.feature import Feature
from ddp_core.hooks import Pending

BufferHook = Callable[..., Any]


class Buffers(Feature):
    """The buffers of a module that are not ignored, and how ranks get the same."""

    def __init__(self, module: nn.Module, ignored: set[str], *, every_forward: bool) -> None:
        self._ignored = ignored
        self.every_forward = every_forward
        self.any = bool(self.named(module))  # a module may replace buffers later, but not gain its first
        self.hook: tuple[object, BufferHook] | None = None
        self.before_module = True  # and not after it
        self._futures: list[torch.futures.Future[Any]] = []

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_futures": []}

    def named(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the buffers, by name, as they are now: a module may replace them."""
        return {name: buffer for name, buffer in module.named_buffers() if name not in self._ignored}

    def synchronise(self, module: nn.Module, copy: Callable[[], None]) -> None:
        """Call the buffer hook or, without one, ``copy``."""
        if self.hook is None:
            copy()
        else:
            state, hook = self.hook
            self._futures += hook(state, self.named(module)) or []

    def finished(self, reducer: Any, in_flight: Sequence[Pending | None]) -> None:
        """Wait for what the buffer hook returned."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()
