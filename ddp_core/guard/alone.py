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
    if _said_by(group, "group_desc").startswith("mesh_") if is_meant is None else is_meant:
        return
    _told.add(group)
    name = _said_by(group, "group_name")
    warnings.warn(
        f"{what}: the process group{name and f' {name!r}'} has one rank, this one, of the {dist.get_world_size()} "
        "ranks that run: it averages with nobody, and each rank trains alone. Pass the group of the ranks that train "
        "one model; or ignore this warning, if something else averages between them.",
        stacklevel=3,
    )


_told: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""The groups of one rank that were warned of."""


def _said_by(group: dist.ProcessGroup, attribute: str) -> str:
    try:
        return str(getattr(group, attribute))
    except (RuntimeError, AttributeError):  # 'ProcessGroup name not set', or what a group written in Python raises
        return ""
