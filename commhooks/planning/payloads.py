"""What a compressor would send as one of many ranks: counted in this process, without another rank.

The compressor runs on the tensors that it is given, and every collective is answered at once with what was put in. So
kinds, payloads and rounds are right, and the means are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from commhooks.communicators.collective import Collective, Pending
from commhooks.hooks.exchanger import Exchanger, average_in_lockstep
from commhooks.language.compressor import Compressor
from commhooks.planning.profile import Sends
from commhooks.scheduling.lockstep import LockstepLine


def rounds_of(
    compressor: Compressor, gradients: Mapping[str, Tensor], ranks: int, policy: str = "fifo"
) -> tuple[Sends, ...]:
    """Return what one of so many ranks sends in each round for a bucket of these gradients, which are overwritten.

    Raises:
        ValueError: The compressor starts a collective among some of the ranks only, which the model does not know.

    """
    one = OneOfMany(ranks)
    exchanger = Exchanger(gradients, compressor, line=LockstepLine(one, policy))
    average_in_lockstep([exchanger], [gradients])
    return tuple(map(tuple, one.rounds))


def is_padded(rounds: Sequence[Sends]) -> bool:
    """Return whether a collective has a row for each rank: its padding depends on the ranks and on the whole bucket."""
    return any(kind in {"all-to-all", "reduce-scatter"} for sends in rounds for kind, _ in sends)


class OneOfMany:
    """A communicator that claims many ranks, answers with what it is given, and notes it by round.

    Unlike those of `PretendingCommunicator`, its answers take no memory, however many ranks there are.
    """

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.rounds: list[list[tuple[str, int]]] = []
        self._is_over = True  # an answer of the round was taken

    def start(self, collective: Collective) -> Pending:
        """Note the collective; those started before the next answer is taken belong to one round."""
        check_is_among_all(collective)
        if self._is_over:
            self.rounds.append([])
            self._is_over = False
        self.rounds[-1].append((collective.kind, collective.payload_bytes))
        return _Echo(collective, self)

    def end_round(self) -> None:
        """Let the next collective begin a round."""
        self._is_over = True


def check_is_among_all(collective: Collective) -> None:
    """Raise ValueError for a collective among some of the ranks, which the step-time model does not know."""
    if collective.group is not None:
        raise ValueError(
            f"the hook starts a collective among {collective.group.kind} ranks only, which is not modelled; "
            "give the compressor inside it, with the ranks of each host and the rate inside"
        )


class _Echo:
    def __init__(self, collective: Collective, one: OneOfMany) -> None:
        self._one = one
        tensor = collective.tensor
        self.result = {
            "all-gather": lambda: tensor.expand(one.world_size, *tensor.shape),
            "reduce-scatter": lambda: tensor[0],
        }.get(collective.kind, lambda: tensor)()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return: the answer is there."""
        self._one.end_round()
