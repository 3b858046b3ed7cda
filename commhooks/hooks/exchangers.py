"""Several exchangers on one line, as one handle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Unpack

import torch.distributed as dist
from torch import Tensor

from commhooks.engine.resume import agreed, restore
from commhooks.errors import CheckpointError, SettingsError
from commhooks.hooks.exchanger import Exchanger
from commhooks.hooks.flat import InTurns
from commhooks.hooks.handle import complete
from commhooks.hooks.sockets import group_or_default
from commhooks.language.compressor import Compressor
from commhooks.scheduling.ledger import ParameterTraffic, Statistics, total
from commhooks.scheduling.line import Line, ProcessGroupLine
from commhooks.scheduling.policy import PolicyName
from commhooks.state.groups import Snapshots
from commhooks.state.memory import MemoryReport, added
from commhooks.state.snapshot import LoadOptions, LoadRules, refuse
from commhooks.state.table import ResidualStorage


class Exchangers(Mapping[str, Exchanger]):
    """Groups of named tensors, each averaged when its turn comes: an `Exchanger` for each, by its label.

    All share one thread and one private group. Each group has its own count of rounds, so that what depends on it, such
    as seeds and warm-up, does not depend on the other groups; no name may be in two of them. Every rank must name the
    same groups, and begin their rounds in one order. Errors name them as "round 3, <label>".

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
        self._exchangers = {
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

    def __getitem__(self, label: str) -> Exchanger:
        """Return a group's exchanger."""
        return self._exchangers[label]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the labels, in the order in which the groups were given."""
        return iter(self._exchangers)

    def __len__(self) -> int:
        return len(self._exchangers)

    def __str__(self) -> str:
        """Return a summary of each group."""
        return "\n".join(f"{label}: {exchanger}" for label, exchanger in self.items())

    def statistics(self) -> Statistics:
        """Return this rank's totals over all groups; its steps are the rounds of all of them."""
        return total(exchanger.statistics() for exchanger in self.values())

    def by_parameter(self) -> dict[str, ParameterTraffic]:
        """Return each tensor's share of this rank's totals, by name."""
        return {name: share for exchanger in self.values() for name, share in exchanger.by_parameter().items()}

    def memory_report(self) -> MemoryReport:
        """Return how many bytes are used, and for what; `gradients` are the tensors that are sent and received."""
        rooms = {memory.data_ptr(): memory for one in self.values() for memory in one.memories()}
        used = sum(memory.untyped_storage().nbytes() for memory in rooms.values())
        return added((exchanger.memory_report() for exchanger in self.values()), used)

    def replace(self, compressor: Compressor | str | Mapping[str, Compressor | str]) -> None:
        """Switch to another compressor from the next rounds on, in all groups or in those named; see `Handle.replace`.

        If it does not suit one of the groups on any rank, no group switches.
        """
        given = dict(compressor) if isinstance(compressor, Mapping) else dict.fromkeys(self, compressor)
        if unknown := given.keys() - self.keys():
            raise SettingsError(
                f"replace: there is no group {', '.join(sorted(unknown))}; there are {', '.join(self)}."
            )
        for label, one in given.items():  # the first error is raised in the first group, where all ranks learn of it
            try:
                self[label].checked(one)
            except SettingsError:
                self[label].replace(one)
        for label, one in given.items():
            self[label].replace(one)

    def snapshot(self, shared: Mapping[str, Any] | None = None) -> Snapshots:
        """Return the same as `state_dict`, with the tensors themselves; `shared` is added to it."""
        return Snapshots(groups={label: one.snapshot() for label, one in self.items()}, shared=dict(shared or {}))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all groups as plain data, once what is under way has ended; see `Handle.state_dict`."""
        groups = {label: exchanger.state_dict() for label, exchanger in self.items()}
        return Snapshots(groups={}, shared={}).as_dict() | {"groups": groups}

    def differences(self, snapshots: Snapshots, rules: LoadRules) -> list[str]:
        """List every difference between a state and this run that would cause an error on loading."""
        if snapshots.groups.keys() != self.keys():
            return [f"it has the groups {', '.join(snapshots.groups)}, and this run has {', '.join(self)}"]
        return [
            f"{label}: {fault}"
            for label, exchanger in self.items()
            for fault in exchanger.differences(snapshots.groups[label], rules)
        ]

    def load_state_dict(self, state: Mapping[str, Any] | CheckpointError, **rules: Unpack[LoadOptions]) -> None:
        """Restore what `state_dict` returned, in all groups or, if it does not match one on any rank, in none.

        See `Handle.load_state_dict`.
        """
        self.restore(read_groups(state), LoadRules(**rules))

    def restore(self, loaded: Snapshots | CheckpointError, rules: LoadRules) -> None:
        """Continue from a state; an error instead of it is raised on every rank, and nothing changes."""
        first = next(iter(self.values()))
        if not isinstance(loaded, CheckpointError) and (faults := self.differences(loaded, rules)):
            loaded = refuse(f"rank {first.rank_and_world_size[0]}: the checkpoint does not fit", faults)
        agreed(first._engine, loaded)
        if isinstance(loaded, CheckpointError):
            raise loaded
        for label, exchanger in self.items():
            restore(exchanger._engine, loaded.groups[label], rules, 0)

    def fail(self, what: str) -> NoReturn:
        """Raise `CompressorError` here, and fail the other ranks' rounds with it."""
        next(iter(self.values())).fail(what)

    def close(self) -> None:
        """Close all lanes; the thread stops with the line's last one. Later rounds fail."""
        for exchanger in self.values():
            exchanger.close()


def read_groups(state: Mapping[str, Any] | CheckpointError) -> Snapshots | CheckpointError:
    """Read a state_dict of several exchangers; return the error if it cannot be read, for the other ranks to learn."""
    if isinstance(state, CheckpointError):
        return state
    try:
        snapshots = Snapshots.from_dict(state)
        for one in state["groups"].values():
            complete(one)
    except CheckpointError as error:
        return error
    except Exception as error:  # whatever damaged data cause: the other ranks are waiting for an answer
        return CheckpointError(f"the state is damaged ({type(error).__name__}: {error}).")
    return snapshots
