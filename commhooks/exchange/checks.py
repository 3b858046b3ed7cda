"""Checks of compressors, before an exchange begins and when another one is to take over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from commhooks.errors import CheckpointError, SettingsError
from commhooks.language.compressor import Compressor, check_compressor
from commhooks.making import make_compressor
from commhooks.native.library import in_use
from commhooks.scheduling.line import Line
from commhooks.state.snapshot import Snapshot
from commhooks.wrappers.error_feedback import with_feedback
from commhooks.wrappers.hierarchical import is_hierarchical


def checked_compressor(caller: str, compressor: Compressor | str) -> Compressor:
    """Return the compressor as it is used, making it if a name is given; raise `SettingsError` for anything else."""
    if isinstance(compressor, str):
        compressor = make_compressor(compressor)
    check_compressor(caller, compressor)
    return with_feedback(compressor)


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
