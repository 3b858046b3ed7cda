"""A forked process must not destroy its parent's process groups.

A fork has only the thread that forked. The destructor of a Gloo group joins the group's threads, so a forked process
that destroyed one, even at its own `sys.exit()`, would hang or crash.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from torch.distributed import distributed_c10d


def keep_groups(private: Iterable[object]) -> None:
    """Leak torch.distributed's groups, and `private` ones, so that this forked process never destroys them."""
    for group in (*distributed_c10d._world.pg_map, *private):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
