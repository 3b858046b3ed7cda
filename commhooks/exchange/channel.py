"""One channel of an exchange: an engine's compressor, counts and state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commhooks.engine.engine import Engine
from commhooks.engine.resume import differences, lay_out, restore, snapshot_of
from commhooks.errors import AttachError, CheckpointError, SettingsError
from commhooks.language.compressor import Compressor, check_compressor
from commhooks.making import make_compressor
from commhooks.native.library import in_use
from commhooks.scheduling.ledger import ParameterTraffic, Statistics
from commhooks.scheduling.line import Line
from commhooks.state.memory import MemoryReport
from commhooks.state.snapshot import LoadRules, Snapshot
from commhooks.state.table import StateTable
from commhooks.wrappers.hierarchical import is_hierarchical

if TYPE_CHECKING:
    from commhooks.exchange.feed import Feed


class Channel:
    """One engine of an exchange: its compressor, counts, memory and state."""

    def __init__(self, label: str, engine: Engine, feed: Feed) -> None:
        self.label = label
        """Its name in the handle, and in saved state if there are several."""
        self.engine = engine
        """What averages its buckets."""
        self._feed = feed

    def __str__(self) -> str:
        """Return a summary: the compressor, the ranks, any failure, and the statistics so far."""
        engine = self.engine
        where = f"rank {engine.line.rank} of {engine.line.world_size}, policy {engine.policy!r}"
        failure = engine.failure()
        state = f"\nended by: {failure}" if failure is not None else "\nclosed" if engine.lane.is_closed else ""
        return f"{engine.compressor}\n{where}{state}\n{self.statistics()}"

    @property
    def name(self) -> str:
        """Its name in errors."""
        return self.engine.lane.title

    @property
    def compressor(self) -> Compressor:
        """The compressor in use."""
        return self.engine.compressor

    @property
    def state(self) -> StateTable:
        """The compressor's state, by parameter."""
        return self.engine.state

    @property
    def steps(self) -> int:
        """The number of steps, or rounds, begun so far."""
        return self.engine.step

    def statistics(self) -> Statistics:
        """Return this rank's totals so far."""
        return self.engine.statistics()

    def last_step(self) -> Statistics:
        """Return this rank's counts for the last complete step."""
        return self.engine.lane.ledger.last_step()

    def by_parameter(self) -> dict[str, ParameterTraffic]:
        """Return each parameter's share of this rank's totals so far, by name."""
        return self.engine.lane.ledger.by_parameter()

    def memory(self) -> MemoryReport:
        """Return the bytes in use on this rank, by purpose."""
        return self.engine.memory()

    def open(self) -> None:
        """Connect to the other ranks now; raise `AttachError` if they disagree."""
        self.engine.open(self._device, self.refusal_of(self.compressor))

    @property
    def _device(self) -> torch.device:
        return next(iter(self.engine.state.named().values())).device

    def refusal_of(self, compressor: Compressor) -> SettingsError | None:
        """Return why a compressor cannot average these tensors on this rank; None if it can."""
        try:
            check_compressor_for(compressor, self.engine.state.named(), self.engine.line)
        except SettingsError as error:
            return error
        return self._feed.refusal_of(compressor)

    def candidate(self, compressor: Compressor | str) -> tuple[Compressor, SettingsError | None]:
        """Return the compressor, and the error if this rank cannot switch to it, for all ranks to learn of."""
        if self.engine.lane.is_closed:
            raise AttachError(f"replace: {self._feed.ended}.")
        if not self.engine.state.named():
            raise AttachError("replace: the parameters' names are not known yet; see PowerSGDState.bind.")
        try:
            candidate = checked_compressor("replace", compressor)
        except SettingsError as refusal:
            return self.compressor, refusal
        return candidate, self.refusal_of(candidate)

    def replace(self, compressor: Compressor | str) -> None:
        """Switch to another compressor from the next step on; see `Handle.replace`."""
        candidate, refusal = self.candidate(compressor)
        self.engine.replace(candidate, self._device, refusal)

    def snapshot(self) -> Snapshot:
        """Return the state, with the tensors themselves."""
        # Allocate now everything that the state will ever hold: torch.distributed.checkpoint loads only into existing
        # tensors, and may be given the state_dict of a run that has taken no step. And after `replace`, what the next
        # step would start from scratch is saved as it will be.
        lay_out(self.engine, self._feed.sparse)
        return snapshot_of(self.engine, self._feed.bucket_plan())

    def differences(self, snapshot: object, rules: LoadRules) -> list[str]:
        """List every difference between a snapshot and this run that would cause an error on loading."""
        if not isinstance(snapshot, Snapshot):
            return ["hooks: it was saved with the state of several channels, such as DiLoCo's"]
        return differences(self.engine, snapshot, rules)

    def restore(self, snapshot: Snapshot | CheckpointError, rules: LoadRules) -> None:
        """Restore a snapshot; if it does not match, or is an error, raise on every rank and change nothing."""
        restore(self.engine, snapshot, rules, self._feed.uncut_steps)
        if isinstance(snapshot, Snapshot):
            self._feed.load_bucket_plan(snapshot.bucket_plan)


def checked_compressor(caller: str, compressor: Compressor | str) -> Compressor:
    """Return the compressor, making it if a name is given; raise `SettingsError` for anything else."""
    if isinstance(compressor, str):
        compressor = make_compressor(compressor)
    check_compressor(caller, compressor)
    return compressor


def check_compressor_for(compressor: Compressor, named: Mapping[str, Tensor], line: Line) -> None:
    """Raise `SettingsError` for settings that do not suit these parameters, the ranks on this line or this process."""
    compressor.check(named, line.world_size)
    (device, *_) = (parameter.device for parameter in named.values())
    if device.type == "cpu":
        in_use()  # raises for a wrong environment variable, before the other ranks wait for this one's messages
    if is_hierarchical(compressor) and not line.carries_groups(device):
        raise SettingsError(
            f"{compressor!r} needs groups of some of the ranks, which NCCL does not support yet; use a Gloo group, "
            'with process_group=torch.distributed.new_group(backend="gloo").'
        )


def inventory_of(state: Mapping[str, Any], rank: str) -> list[str]:
    """List the names of everything in a state_dict that belongs to one rank."""
    parts = {"replicated": state["replicated"], "local": state["local"][rank]}
    held = [f"{part}.{name}.{entry}" for part, entries in parts.items() for name in entries for entry in entries[name]]
    return sorted(held + [f"{part}.{name}" for part in ("settings", "shapes") for name in state[part]])


def complete(state: object) -> Snapshot:
    """Read a state_dict; raise `CheckpointError` if something that was saved is missing from it.

    `torch.distributed.checkpoint.load` reads into the tensors of another state_dict, and silently skips everything that
    has no place there.
    """
    read = Snapshot.from_dict(state)
    assert isinstance(state, Mapping), "from_dict takes nothing else"
    inventory = state.get("inventory", {})
    for rank in state["local"].keys() & inventory.keys():
        lost = sorted(set(inventory[rank]) - set(inventory_of(state, rank)))
        if lost:
            more = f" and {len(lost) - 8} more" if len(lost) > 8 else ""
            raise CheckpointError(
                f"the state was read without {', '.join(lost[:8])}{more}, which it held when it was saved: it was "
                "edited, or read into a state that had no place for this; read it with commhooks.load_distributed."
            )
    return read
