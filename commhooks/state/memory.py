"""The memory that an attachment takes, by purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from commhooks.devices import runs_later
from commhooks.language.bucket import BucketView, Slot
from commhooks.state.table import StateTable
from commhooks.units import bytes_in_words, counted, in_columns

_PARAMETERS_TO_PRINT = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Memory in bytes, on this rank. Memory that several things share is counted once, under the first of them."""

    gradients: int
    """The DDP's buckets of the last step; not part of the total, since they exist without a hook too."""
    residuals: int
    """State that each rank keeps for itself, such as residuals, on the gradients' own device."""
    residuals_on_host: int
    """The same in the host's memory, with residuals="host"."""
    bases: int
    """All other state, such as PowerSGD's Q."""
    copies: int
    """The second copy of the state, with atomic=True."""
    working: int
    """Factors, messages and scratch memory, kept between steps."""
    by_parameter: dict[str, int]
    """The state of each parameter, by name."""
    not_compressed: int = 0
    """Whole gradients that FSDP2 reduces itself, see `Handle.not_compressed`; not part of the total."""

    @property
    def total(self) -> int:
        """Everything that the hook uses."""
        return self.residuals + self.residuals_on_host + self.bases + self.copies + self.working

    def __str__(self) -> str:
        """Return a short table, which names only the parameters with the most state."""
        rows = [
            ("memory of the hook", bytes_in_words(self.total), f"beside {bytes_in_words(self.gradients)} of gradients")
        ]
        rows += [
            (f"  {name.replace('_', ' ')}", bytes_in_words(size), "")
            for name in ("residuals", "residuals_on_host", "bases", "copies", "working")
            if (size := getattr(self, name))
        ]
        largest = sorted(self.by_parameter.items(), key=lambda item: -item[1])[:_PARAMETERS_TO_PRINT]
        left_out = len(self.by_parameter) - len(largest)
        if self.not_compressed:
            rows.append(("not compressed", bytes_in_words(self.not_compressed), "of gradients that FSDP2 reduces"))
        rows += [(f"of {name}", bytes_in_words(size), "") for name, size in largest]
        return in_columns(rows) + (f"\nand of {counted(left_out, 'parameter')} more" if left_out else "")


def memory_report(
    table: StateTable, views: Sequence[BucketView], copies: Sequence[Tensor], messages: Sequence[Tensor]
) -> MemoryReport:
    """Add up state, the buckets' plans, the undo log's copies, and messages."""
    counter, states = _Counter(), table.states()
    own = [kept for one in states for kept in one.of_kind("residual", "private", "share").values()]
    return MemoryReport(  # in this order: memory that is shared counts for the first
        gradients=counter.add(view.memory for view in views),
        residuals_on_host=counter.add(kept for kept in own if table.storage == "host" and not runs_later(kept)),
        residuals=counter.add(own),
        bases=counter.add(kept for one in states for kept in one.of_kind("replicated").values()),
        copies=counter.add(copies),
        working=counter.add(_tensors_within([view.plans for view in views])) + counter.add(messages),
        by_parameter={one.key: one.memory_bytes() for one in states},
    )


def added(reports: Iterable[MemoryReport], gradients: int) -> MemoryReport:
    """Return the sum of several reports; `gradients` are the bytes of all their buckets together."""
    sums: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(MemoryReport)} | {"by_parameter": {}}
    for report in reports:
        for name, value in vars(report).items():
            sums[name] = sums[name] | value if isinstance(value, dict) else sums[name] + value
    return MemoryReport(**sums | {"gradients": gradients})


class _Counter:
    """Adds up the bytes of tensors' memory, counting each range only once."""

    def __init__(self) -> None:
        self._counted: set[tuple[str, int]] = set()

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of the tensors' memory not counted so far."""
        added = 0
        for tensor in tensors:
            if tensor.is_sparse:
                added += self.add((tensor._indices(), tensor._values()))
                continue
            storage = tensor.untyped_storage()
            key = (str(tensor.device), storage.data_ptr())
            if key not in self._counted:
                self._counted.add(key)
                added += storage.nbytes()
        return added


def _tensors_within(root: Any) -> Iterator[Tensor]:
    """Yield every tensor held by a structure of lists, dictionaries and objects of this package."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, Slot):
            waiting.append(value.gradient)  # its parameter is the model's, and its state is counted separately
        elif type(value).__module__.startswith("commhooks."):
            waiting += vars(value).values()
