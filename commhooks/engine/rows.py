"""The input and the output of a reduce-scatter, as a bucket."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class RowsBucket:
    """The input and the output of a reduce-scatter, as a bucket of shards."""

    def __init__(self, rows: Tensor, output: Tensor, parameters: Sequence[Tensor], chunks: Sequence[int]) -> None:
        self._rows, self._output = rows, output
        self._parameters, self._chunks = [*parameters], [*chunks]

    def index(self) -> int:
        """Return 0: it is the only one of its step."""
        return 0

    def is_last(self) -> bool:
        """Return True."""
        return True

    def buffer(self) -> Tensor:
        """Return the gradients, [world size, width]; row r holds rank r's shards."""
        return self._rows

    def output(self) -> Tensor:
        """Return the memory for the mean of this rank's row, [width]."""
        return self._output

    def parameters(self) -> list[Tensor]:
        """Return tensors that stand for the parameters, in the order of the rows' parts."""
        return self._parameters

    def chunks(self) -> list[int]:
        """Return the number of elements that a row has of each parameter."""
        return self._chunks
