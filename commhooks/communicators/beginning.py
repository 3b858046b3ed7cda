"""An equal beginning of all ranks: their arguments are compared, and rank 0's tensors are copied."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.communicators.disagreement import describe, refusal_as_fingerprint
from commhooks.errors import CommHooksError, SettingsError
from commhooks.tensors import bytes_of


def agree(
    caller: str,
    group: dist.ProcessGroup | None,
    fingerprint: str | Exception,
    error: type[CommHooksError] = SettingsError,
) -> None:
    """Raise the error that is passed on this rank, or `error` if other ranks pass errors or fingerprints differ.

    An error that is not one of commhooks' own is also raised as `error`. Without a group, nothing is compared.
    """
    if isinstance(fingerprint, Exception) and not isinstance(fingerprint, CommHooksError):
        fingerprint = error(f"{caller}: {fingerprint!r}")
    text = fingerprint if isinstance(fingerprint, str) else refusal_as_fingerprint(fingerprint)
    told = [text] * (1 if group is None else dist.get_world_size(group))
    if group is not None:
        dist.all_gather_object(told, text, group=group)
    if not isinstance(fingerprint, str):
        raise fingerprint
    if len(set(told)) > 1:
        raise error(f"{caller}: ranks disagree: {describe(told)}")


@torch.no_grad()
def share_from_rank_0(
    caller: str,
    tensors: Mapping[str, Tensor],
    caches: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    error: type[CommHooksError] = SettingsError,
) -> None:
    """Overwrite tensors with the group's rank 0's, byte by byte; without a group, leave them.

    `caches` are overwritten, too, if they have memory, and the same shape and dtype on all ranks; others stay as they
    are. All are sent from the first tensor's device. Raises `error` on every rank if ranks have other tensors.
    """
    if group is None:
        return
    facts = [f"parameter or buffer {name}: shape {tuple(one.shape)}, {one.dtype}" for name, one in tensors.items()]
    agree(caller, group, "\n".join(facts), error)
    own = {name: (tuple(cache.shape), str(cache.dtype)) for name, cache in caches.items() if not cache.is_meta}
    everyone = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    alike = sorted(name for name in own if all(other.get(name) == own[name] for other in everyone))
    source = dist.get_global_rank(group, 0)
    device = next(iter(tensors.values())).device
    for tensor in (*tensors.values(), *(caches[name] for name in alike)):
        # As bytes: Gloo sends no int16, unsigned integers or fp8. From one device: NCCL sends nothing of the host's.
        sent = bytes_of(tensor).to(device)
        dist.broadcast(sent, source, group=group)
        tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))
