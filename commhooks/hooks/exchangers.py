"""Several exchangers on one line, as one handle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor

from commhooks.errors import SettingsError
from commhooks.hooks.exchanger import Exchanger
from commhooks.hooks.flat import InTurns
from commhooks.hooks.grouped import Grouped
from commhooks.hooks.sockets import group_or_default
from commhooks.language.compressor import Compressor
from commhooks.scheduling.line import Line, ProcessGroupLine
from commhooks.scheduling.policy import PolicyName
from commhooks.state.memory import MemoryReport, added
from commhooks.state.table import ResidualStorage


class Exchangers(Grouped[Exchanger]):
    """Groups of named tensors, averaged separately: one `Exchanger` for each group, by label.

    All share one thread and one private group. Each group has its own count of rounds, so seeds and warm-up do not
    depend on the other groups; no name may be in two of them. Every rank must name the same groups, and begin their
    rounds in one order. Making them has no effect on other ranks; see `Exchanger` on which are paired. Errors name them
    as "round 3, <label>".

    `compressor` is one for all groups, or one for each by label; the other arguments are those of `Exchanger`.
    `in_turns`: no round begins before the last one's means are written or dropped, so the groups share their memory,
    which is that of the largest.
    """

    def __init__(
        self,
        groups: Mapping[str, Mapping[str, Tensor]],
        compressor: Compressor | str | Mapping[str, Compressor | str],
        *,
        process_group: dist.ProcessGroup | None = None,
        policy: PolicyName = "fused",
        hook_timeout: float | None = None,
        residuals: ResidualStorage = "fp32",
        atomic: bool = False,
        line: Line | None = None,
        weighted: bool = False,
        in_turns: bool = False,
    ) -> None:
        if not groups:
            raise SettingsError("Exchangers(groups={}): groups must have at least one group.")
        given = dict(compressor) if isinstance(compressor, Mapping) else dict.fromkeys(groups, compressor)
        if given.keys() != groups.keys():
            raise SettingsError(
                f"Exchangers: there must be a compressor for each group, by its label (got those of {', '.join(given)} "
                f"for {', '.join(groups)})."
            )
        seen: dict[str, str] = {}
        for label, tensors in groups.items():
            for name in tensors:
                if name in seen:
                    raise SettingsError(f"Exchangers: {name!r} is in two groups, {seen[name]} and {label}.")
                seen[name] = label
        if line is None:
            group = group_or_default(process_group)
            line = ProcessGroupLine(group, label="Exchangers", policy=policy, hook_timeout=hook_timeout)
        elif process_group is not None or hook_timeout is not None:
            raise SettingsError("Exchangers: process_group and hook_timeout belong to the line; pass them to it.")
        memory = InTurns() if in_turns else None
        if memory is not None:
            for tensors in groups.values():
                memory.reserve(tensors.values())
        self.line: Line = line
        """The line to the other ranks."""
        self._handles = {
            label: Exchanger(
                tensors,
                given[label],
                policy=policy,
                residuals=residuals,
                atomic=atomic,
                line=line,
                name=label,
                weighted=weighted,
                memory=memory,
            )
            for label, tensors in groups.items()
        }

    def memory_report(self) -> MemoryReport:
        """Return the bytes in use, by purpose; `gradients` are the tensors that are sent and received."""
        return memory_of(self.values())

    def fail(self, what: str) -> NoReturn:
        """Raise `CompressorError` here, and fail the other ranks' rounds with it."""
        next(iter(self.values())).fail(what)


def memory_of(exchangers: Iterable[Exchanger]) -> MemoryReport:
    """Return the bytes that exchangers use, by purpose; memory that several share counts once."""
    these = list(exchangers)
    rooms = {memory.data_ptr(): memory for one in these for memory in one.memories()}
    used = sum(memory.untyped_storage().nbytes() for memory in rooms.values())
    return added((one.memory_report() for one in these), used)
