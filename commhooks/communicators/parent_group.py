"""The name, store and backend of the process group that a hook works for, even if that group is user-defined.

Groups of `torch.distributed` know their name and store. A subclass of `ProcessGroup` written in Python (to manage ranks
that come and go, to count, to log) often knows neither; if it was created with `torch.distributed.new_group`, they are
in the tables of `torch.distributed`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from commhooks.errors import AttachError, CommHooksError

_REMEDY = (
    "pass attach(..., process_group=) a group of the same ranks that torch.distributed.new_group made (a hook without "
    "attach takes it as its state)"
)


def group_or_default(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the process group, or the default one if None; raise `CommHooksError` if there is none yet."""
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise CommHooksError("there is no process group; call torch.distributed.init_process_group first.")
    if not isinstance(group, dist.ProcessGroup):
        raise CommHooksError(
            f"expected a process group that this rank belongs to, or None for the default one (got {group!r})."
        )
    return group


def name_and_store(group: dist.ProcessGroup) -> tuple[str, Store]:
    """Return the name and the store under which the ranks of `group` find each other.

    Raises `AttachError` if the group has no name or store, if `torch.distributed` does not know all of its ranks, or if
    it is torchft's.
    """
    if type(group).__module__.startswith("torchft."):
        raise AttachError(
            f"{type(group).__qualname__} is torchft's, and its ranks come and go: give each replica a process group of "
            "its own, and call commhooks.integrations.torchft.compress(model, compressor, manager)."
        )
    tables = distributed_c10d._world
    name = _own_name(group) or tables.pg_names.get(group)
    own_store: Any = getattr(group, "get_group_store", None)  # torch 2.8 and older have none
    store: Store | None = own_store() if own_store is not None else None  # None for most groups written in Python
    if store is None and group in tables.pg_map:
        store = tables.pg_map[group][1]
        known = tables.pg_group_ranks.get(group, {})
        if len(known) != group.size():  # it manages ranks itself, and those unknown here would never use this store
            raise AttachError(
                f"{_describe(group)} has {group.size()} ranks, but torch.distributed knows {len(known)} of them, so "
                f"it has no store in which all could meet: {_REMEDY}."
            )
    if name is None or store is None:
        lacking = " and ".join(what for what, it in (("name", name), ("store", store)) if it is None)
        raise AttachError(f"{_describe(group)} has no {lacking} under which its ranks could meet: {_REMEDY}.")
    return name, store


def members_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return this rank's number, the group's size, and its ranks in the world, if `torch.distributed` knows them."""
    return group.rank(), group.size(), *distributed_c10d._world.pg_group_ranks.get(group, ())


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that `group` uses for `device`, such as "gloo"; for a Python group, its class."""
    if type(group) is not dist.ProcessGroup:
        return f"the Python class {type(group).__qualname__}"
    by_device = dict(part.split(":", 1) for part in str(dist.get_backend_config(group)).split(","))
    return by_device.get(device.type, "gloo")


def warn_of_bypass(group: dist.ProcessGroup, backend: str) -> None:
    """Warn that gradients will bypass `group` over a private Gloo group."""
    warnings.warn(
        f"commhooks: gradients travel over a private Gloo group that bypasses {_describe(group)} and its backend "
        f"({backend}). If that is what you want, pass a group explicitly with attach(..., process_group=), and this "
        "warning goes away; to route every request through a manager, pass attach(..., wrap_communicator=).",
        stacklevel=2,
    )


def _own_name(group: dist.ProcessGroup) -> str | None:
    try:
        return str(group.group_name)
    except (RuntimeError, AttributeError):  # 'ProcessGroup name not set', or an attribute of a getGroupName() in Python
        return None


def _describe(group: dist.ProcessGroup) -> str:
    name = _own_name(group) or distributed_c10d._world.pg_names.get(group)
    called = f" named {name!r}" if name is not None else ""
    return f"the process group {group.name()!r}{called} ({type(group).__qualname__})"
