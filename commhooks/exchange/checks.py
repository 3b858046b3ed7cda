"""Checks of compressors, before an exchange begins and when another one is to take over."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

from torch import Tensor

from commhooks.errors import SettingsError
from commhooks.exchange.options import Options
from commhooks.language.compressor import Compressor, check_compressor
from commhooks.language.place import Place
from commhooks.making import make_compressor, read_hook
from commhooks.native.library import in_use
from commhooks.scheduling.connection import Connection
from commhooks.wrappers.error_feedback import with_feedback
from commhooks.wrappers.hierarchical import is_hierarchical

_LARGE_SHARE = 0.25
"""More of a model's gradients than convolutional networks, recurrent ones and transformers send whole at low ranks."""


def read_text(caller: str, compressor: Compressor | str, options: Options) -> tuple[Compressor, Options]:
    """Return the compressor, and the options together with what the text of a hook says of them ("policy=fused")."""
    if not isinstance(compressor, str):
        return compressor, options
    hook = read_hook(compressor)
    if hook.gather is not None:
        raise SettingsError(
            f"{caller}({compressor!r}): gather is the form of a sharded model's parameters, for attach_sharded; here "
            "none are gathered: leave it out."
        )
    if hook.policy is None:
        return hook.compressor, options
    if options.get("policy", hook.policy) != hook.policy:
        raise SettingsError(f"{caller}({compressor!r}): policy is given twice, in the text and beside it.")
    return hook.compressor, Options(**options | {"policy": hook.policy})


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


def warn_of_whole(caller: str, sent: Iterable[tuple[Compressor, Place]]) -> None:
    """Warn if many of the gradients' bytes are in matrices that are sent whole although no setting asks for that."""
    total, whole = 0, list[tuple[int, Place, str]]()
    for compressor, place in sent:
        size = place.parameter.numel() * place.parameter.element_size()
        total += size
        why = compressor.why_whole(place) if size and place.parameter.dim() > 1 else None
        if why is not None:
            whole.append((size, place, why))
    share = sum(size for size, _, _ in whole) / max(total, 1)
    if share <= _LARGE_SHARE:
        return
    whole.sort(key=lambda one: one[0], reverse=True)
    largest = ", ".join(
        f"{place.name!r} of shape {tuple(place.parameter.shape)} ({size / total:.0%})" for size, place, _ in whole[:3]
    )
    more = f" and {len(whole) - 3} others" if len(whole) > 3 else ""
    warnings.warn(
        f"commhooks, {caller}: {share:.0%} of the gradients' bytes are sent uncompressed, as matrices are too small: "
        f"{largest}{more}. Of the first, {whole[0][2]}. Use lower ranks or smaller blocks, or PerParameter with "
        "another compressor for them.",
        stacklevel=2,
    )
