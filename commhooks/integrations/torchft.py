"""torchft: replicas that come and go exchange compressed gradients through a `torchft.Manager`.

Each replica is a separate run with one rank. torchft's manager knows which replicas take part in a step, and averages
over those.

manager = Manager(pg=ProcessGroupGloo(), ..., use_async_quorum=False)
model = DistributedDataParallel(module, find_unused_parameters=True)  # PyTorch's or ddp_core's
attachment = compress(model, "powersgd", manager, optimizers=[optimizer])
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from commhooks.communicators import Collective, Communicator, Pending
from commhooks.errors import AttachError, CollectiveError, SettingsError
from commhooks.exchange.feed import Channel
from commhooks.exchange.handle import Handle
from commhooks.hooks.attach import attach
from commhooks.hooks.facts import searches_for_unused
from commhooks.integrations.common import require
from commhooks.language.compressor import Compressor
from commhooks.saving.parts import shared_part
from commhooks.scheduling.policy import PolicyName
from commhooks.state.loss_scale import Scaler
from commhooks.state.table import ResidualStorage
from commhooks.unwrapping import find_ddp

require("torchft", at_least="0.2")

from torchft.manager import Manager  # noqa: E402  # after the check, whose error says what to install

STATE_KEY = "commhooks"
"""The key under which the manager passes a hook's state to replicas that join."""


def compress(
    model: Module,
    compressor: Compressor | str,
    manager: Manager,
    *,
    optimizers: Iterable[object],
    policy: PolicyName = "fifo",
    hook_timeout: float | None = None,
    scaler: Scaler | None = None,
    residuals: ResidualStorage = "fp32",
) -> Handle[Channel]:
    """Average the gradients of `model` over the replicas of `manager`, with a compressor that only sums.

    `model` is a DistributedDataParallel over a process group of one rank, PyTorch's or ddp_core's, made with
    `find_unused_parameters=True`: its buckets must be the same on a replica that has just joined. Compressors that
    only sum are PowerSGD, random-k, the casts and the all-reduce; others raise `CollectiveError` in the first step.

    A step in which a replica is lost changes no state, and its means are NaN; `manager.should_commit()` is False for
    it, so no optimizer uses them. A replica that joins gets the shared state from another one, through the manager, and
    begins with an empty residual.

    `optimizers`, those that train the model, are watched: a step on gradients that bypassed the compressor raises
    `NotAveragedError`. See `attach` for `policy`, `hook_timeout`, `scaler` and `residuals`.

    Raises `SettingsError` if the manager's quorum is asynchronous, and `AttachError` if the model is not as described.
    """
    if manager._use_async_quorum:
        raise SettingsError(
            "compress: the manager must be made with use_async_quorum=False, so that a replica that joins gets the "
            "hook's state before its first step and not in the middle of it."
        )
    ddp = find_ddp("compress", model)
    if not searches_for_unused(ddp) or ddp.static_graph:
        raise AttachError(
            "compress: the DistributedDataParallel must be made with find_unused_parameters=True, and without "
            "static_graph: it then keeps its first buckets, which a replica that joins later has too."
        )
    attachment = attach(
        model,
        compressor,
        policy=policy,
        wrap_communicator=functools.partial(ManagedCommunicator, manager),
        hook_timeout=hook_timeout,
        scaler=scaler,
        residuals=residuals,
        atomic=True,
    )
    try:
        attachment.watch(*optimizers)
    except AttachError:
        attachment.close()
        raise
    manager.register_state_dict_fn(
        STATE_KEY, functools.partial(_load_shared, attachment), functools.partial(_shared_state, attachment)
    )
    return attachment


def _shared_state(attachment: Handle[Channel]) -> dict[str, Any]:
    """Return the state that all replicas share, without residuals, which stay with their replica."""
    return shared_part(attachment.state_dict())


def _load_shared(attachment: Handle[Channel], state: Mapping[str, Any]) -> None:
    attachment.load_state_dict(state, world_size="reset")


class ManagedCommunicator:
    """A communicator that sends each all-reduce through a torchft `Manager`, which averages over the step's replicas.

    Use it as `attach(..., wrap_communicator=functools.partial(ManagedCommunicator, manager), atomic=True)`; see
    `compress`.
    """

    def __init__(self, manager: Manager, inner: Communicator) -> None:
        self._manager = manager
        self.rank: int = inner.rank
        self.world_size: int = inner.world_size
        if self.world_size != 1:
            raise AttachError(
                f"torchft: each replica must be one rank (this one has {self.world_size}): the manager averages over "
                "replicas, and the hook over one replica's ranks."
            )

    def start(self, collective: Collective) -> Pending:
        """Start an all-reduce; raise `CollectiveError` for any other collective."""
        if collective.kind != "all-reduce" or collective.group is not None or collective.tensor.is_sparse:
            raise CollectiveError(
                f"torchft's manager averages dense tensors and nothing else; this compressor asks for: "
                f"{collective.kind}. Use one that only sums, such as PowerSGD, random-k or a cast."
            )
        return _ManagedPending(self._manager, collective.tensor)


class _ManagedPending:
    """An average over replicas under way; NaN if a replica is lost, so that nothing is committed."""

    def __init__(self, manager: Manager, tensor: Tensor) -> None:
        self._manager = manager
        self._work = manager.allreduce(tensor)
        self.result = tensor

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when the average is ready; the manager's own timeout limits the wait."""
        self._work.wait()
        if self._manager.errored() is not None:
            self.result.fill_(math.nan)
