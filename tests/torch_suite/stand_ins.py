"""Answers to three of PyTorch's private questions, put on our classes while a test that asks them runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import torch
from torch import nn


def provide(ddp: type[nn.Module]) -> AbstractContextManager[Any]:
    """Put the answers on our classes; PyTorch's class has them already."""
    stack = ExitStack()
    if ddp.__module__.startswith("torch."):
        return stack
    from ddp_core.features.unused import UnusedParameters, UsedParameters
    from ddp_core.reducer import Reducer

    count = UsedParameters.count

    def remember_usage(self: Any, reducer: Any, used: Any) -> Any:
        reducer.usage_of_the_suite = count(self, reducer, used)
        return reducer.usage_of_the_suite

    def local_used_map(self: Any) -> torch.Tensor:
        """For test_ddp_control_flow_*: how many ranks used each parameter in the latest backward pass."""
        self.usage_of_the_suite.work.wait()
        return self.usage_of_the_suite.counts  # type: ignore[no-any-return]  # 'Returning Any from function'

    def graph_is_static(self: Any) -> bool:
        """For test_detect_ddp_is_actually_static: whether the same parameters were used every time."""
        searching = self.find(UnusedParameters)
        return searching is None or bool(searching.is_constant)

    def no_active_module(cls: type) -> None:
        """For test_ddp_compile_static_graph: dynamo asks whatever stands in for PyTorch's class; None is no DDP."""

    stack.enter_context(mock.patch.object(UsedParameters, "count", remember_usage))
    for owner, name, answer in (
        (Reducer, "_get_local_used_map", local_used_map),
        (Reducer, "_ddp_graph_static", graph_is_static),
        (ddp, "_get_active_ddp_module", classmethod(no_active_module)),
    ):
        stack.enter_context(mock.patch.object(owner, name, answer, create=True))
    return stack
