"""Groups of one rank, which pass for data parallelism."""

from __future__ import annotations

import warnings
import weakref

import torch.distributed as dist


def warn_of_one_rank(
    group: dist.ProcessGroup, what: str = "DistributedDataParallel", *, is_meant: bool | None = None
) -> None:
    """Warn, once for each group, that it has one rank of a larger world, unless that ``is_meant``.

    None: it is if the group is a dimension of a ``DeviceMesh``, which somebody laid out so.
    """
    if group.size() > 1 or group in _told or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    if _is_a_dimension(group) if is_meant is None else is_meant:
        return
    _told.add(group)
    warnings.warn(
        f"{what}: the process group{_named(group)} has one rank, this one, of the {dist.get_world_size()} ranks that "
        "run: it averages with nobody, and each rank trains alone. Pass the group of the ranks that train one model; "
        "or ignore this warning, if something else averages between them.",
        stacklevel=3,
    )


_told: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""The groups of one rank that were warned of."""


def _is_a_dimension(group: dist.ProcessGroup) -> bool:
    try:
        return str(group.group_desc).startswith("mesh_")
    except RuntimeError:  # of a group written in Python
        return False


def _named(group: dist.ProcessGroup) -> str:
    try:
        return f" {group.group_name!r}"
    except (RuntimeError, AttributeError):  # 'ProcessGroup name not set', or what a group written in Python raises
        return ""
