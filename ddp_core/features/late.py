"""Gradients after the reduction, which stay on their rank: a second backward pass through one forward pass."""

from __future__ import annotations

import warnings

from torch.nn import Parameter

from ddp_core.errors import late
from ddp_core.feature import Feature
from ddp_core.lifecycle import Phase
from ddp_core.reducer import Reducer


class LateGradients(Feature):
    """One warning, that names a parameter."""

    def __init__(self, named: list[tuple[str, Parameter]]) -> None:
        self._names = {id(parameter): name for name, parameter in named}
        self.has_warned = False

    def added(self, reducer: Reducer) -> None:
        """Warn again."""
        self.has_warned = False

    def on_local(self, reducer: Reducer, parameter: Parameter) -> None:
        """Warn of a gradient that came late."""
        if reducer.iteration.phase is Phase.REDUCED and not reducer.paused and not self.has_warned:
            self.has_warned = True
            warnings.warn(late(self._names[id(parameter)]), stacklevel=2)
