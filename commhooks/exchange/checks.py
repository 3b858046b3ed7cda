"""Checks of compressors, before an exchange begins and when another one is to take over."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from commhooks.errors import SettingsError
from commhooks.language.compressor import Compressor, check_compressor
from commhooks.making import make_compressor
from commhooks.native.library import in_use
from commhooks.scheduling.connection import Connection
from commhooks.wrappers.error_feedback import with_feedback
from commhooks.wrappers.hierarchical import is_hierarchical


def checked_compressor(caller: str, compressor: Compressor | str) -> Compressor:
    """Return the compressor as it is used, making it if a name is given; raise `SettingsError` for anything else."""
    if isinstance(compressor, str):
        compressor = make_compressor(compressor)
    check_compressor(caller, compressor)
    return with_feedback(compressor)


def check_compressor_for(compressor: Compressor, named: Mapping[str, Tensor], connection: Connection) -> None:
    """Raise `SettingsError` for settings that do not suit these parameters, a connection's ranks or this process."""
    compressor.check(named, connection.world_size)
    (device, *_) = (parameter.device for parameter in named.values())
    if device.type == "cpu":
        in_use()  # raises for a wrong environment variable, before the other ranks wait for this one's messages
    if is_hierarchical(compressor) and not connection.carries_groups(device):
        raise SettingsError(
            f"{compressor!r} needs groups of some of the ranks, which NCCL does not support yet; use a Gloo group, "
            'with process_group=torch.distributed.new_group(backend="gloo").'
        )
