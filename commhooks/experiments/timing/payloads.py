"""The payloads that a compressor sends as one of many ranks, counted in this process without other ranks.

The compressor runs on given tensors, and every collective returns its input at once. Kinds, payloads and rounds are
therefore right; the means are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from commhooks.communicators.collective import Collective
from commhooks.engine.engine import Engine
from commhooks.engine.rows import RowsBucket
from commhooks.errors import SettingsError
from commhooks.exchange.exchanger import Exchanger, average_in_lockstep
from commhooks.experiments.timing.link import HALF_SUM
from commhooks.experiments.timing.pretending import PretendingCommunicator
from commhooks.experiments.timing.step_time import Sends
from commhooks.language.compressor import Compressor
from commhooks.scheduling.lockstep import LockstepConnection, run_in_turns
from commhooks.scheduling.policy import PolicyName


def rounds_of(
    compressor: Compressor, gradients: Mapping[str, Tensor], ranks: int, policy: PolicyName = "fifo"
) -> tuple[Sends, ...]:
    """Return the payloads of each round for a bucket of these gradients, which are overwritten, as one of `ranks`.

    Raises:
        SettingsError: The compressor starts a collective among some of the ranks only, which the model does not know.

    """
    rounds = _Rounds()
    connection = LockstepConnection(PretendingCommunicator(0, ranks, rounds, in_place=True), policy)
    average_in_lockstep([Exchanger(gradients, compressor, connection=connection)], [gradients])
    return tuple(map(tuple, rounds.sends))


def rounds_of_shards(compressor: Compressor, gradients: Mapping[str, Tensor], ranks: int) -> tuple[Sends, ...]:
    """Return the payloads of each round if each of `ranks` gets its shard of these gradients' means.

    Raises:
        SettingsError: The compressor cannot return shards.

    """
    if not compressor.scatters:
        raise SettingsError(f"{compressor} averages whole gradients, of which no rank can return its shard alone")
    rounds = _Rounds()
    connection = LockstepConnection(PretendingCommunicator(0, ranks, rounds, in_place=True))
    engine = Engine(compressor, connection, may_join=False, is_sharded=True)
    engine.bind(list(gradients.items()))
    done = engine.run(bucket_of_shards(gradients, [*gradients.values()], ranks))
    run_in_turns([connection])
    done.wait()
    engine.stop()
    return tuple(map(tuple, rounds.sends))


def bucket_of_shards(gradients: Mapping[str, Tensor], parameters: Sequence[Tensor], ranks: int) -> RowsBucket:
    """Return gradients as FSDP2 hands them to a rank's reduce-scatter; the engine knows them by these parameters."""
    rows = [rows_of(gradient, ranks) for gradient in gradients.values()]
    chunks = [row.shape[1] for row in rows]
    return RowsBucket(torch.cat(rows, dim=1), rows[0].new_empty(sum(chunks)), parameters, chunks)


def rows_of(gradient: Tensor, ranks: int) -> Tensor:
    """Return [ranks, chunk]: what each rank keeps, a part of the first dimension, with zeros up to the largest part."""
    whole = gradient if gradient.dim() else gradient.view(1)
    padding = -len(whole) % ranks
    return torch.cat([whole, whole.new_zeros(padding, *whole.shape[1:])]).view(ranks, -1)


class _Rounds:
    """The collectives started in each round: all that start before the next answer is taken belong to one round."""

    def __init__(self) -> None:
        self.sends: list[list[tuple[str, int]]] = []
        self._is_over = True

    def starting(self, collective: Collective) -> None:
        if self._is_over:
            self.sends.append([])
            self._is_over = False
        is_half = collective.kind == "all-reduce" and collective.tensor.dtype == torch.float16
        self.sends[-1].append((HALF_SUM if is_half else collective.kind, collective.payload_bytes))

    def has_started(self) -> None:
        pass

    def answered(self) -> None:
        self._is_over = True
