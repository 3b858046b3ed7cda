"""Laws of state: it is declared, saved and resumed, and carries over to another number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from commhooks.language.compressor import Compressor
from commhooks.saving.resumption import lay_out
from commhooks.saving.rules import LoadRules
from commhooks.saving.saved import SavedChannel
from commhooks.state.table import StateTable
from commhooks.testing.bounds import unit_roundoff
from commhooks.testing.claims import SHAPES, Claims
from commhooks.testing.exchange import require_alike, require_equal, where
from commhooks.testing.law import keeping_nothing, law, sharing
from commhooks.testing.workers import BrokenLawError, Workers, largest, normal, zeros

SIZES = ((4, 2), (2, 4), (3, 2), (2, 5), (4, 1))
"""Numbers of workers before and after a run is resumed."""


def odd_parameters(claims: Claims) -> list[Tensor]:
    """Return parameters of which one has its dimensions in another order in memory."""
    channels_last = torch.zeros(12, 8, 3, 3, dtype=torch.float32, device="cpu").contiguous(
        memory_format=torch.channels_last
    )
    return [*zeros(*claims.shapes(*SHAPES)), channels_last]


def bytes_of(table: StateTable) -> bytes:
    """Return all that a table holds, as bytes."""
    return b"".join(
        f"{name} {entry}".encode() + tensor.contiguous().numpy().tobytes()
        for part in table.export()
        for name, kept in sorted(part.items())
        for entry, tensor in sorted(kept.items())
    )


def names_in(table: StateTable) -> dict[str, list[str]]:
    """Return the names of the entries that a table holds, by parameter."""
    replicated, local = table.export()
    return {name: sorted({*replicated.get(name, {}), *local.get(name, {})}) for name in {*replicated, *local}}


@law(
    "declared",
    causes="a `state` that depends on something else than the settings and the place; `loss` that is None at first",
    excuse=sharing,
)
def declared(compressor: Compressor, claims: Claims) -> None:
    """All state is declared before the first step, and only that is kept."""
    workers = Workers(compressor, 2, odd_parameters(claims))
    lay_out(workers.engines[0], set())
    made = names_in(workers.states[0])
    for step in range(4):
        workers.step(normal(workers.parameters, 2, seed=step))
    now = names_in(workers.states[0])
    if made != now:
        index = next(i for i, name in enumerate(workers.names) if made.get(name) != now.get(name))
        name = workers.names[index]
        raise BrokenLawError(f"declared are {made.get(name)}, and kept {now.get(name)}, of {where(workers, index)}")
    if claims.error_feedback and not any(made.values()):
        raise BrokenLawError("no parameter has a residual")


@law(
    "resume",
    causes="state outside of what `state` declares; random numbers that are not seeded by `context.step`",
)
def resume(compressor: Compressor, claims: Claims) -> None:
    """A run resumed from a file goes on bit for bit as if it had not been interrupted."""
    for policy in ("fifo", "fused"):
        ran_through, interrupted, resumed = (
            Workers(compressor, 3, odd_parameters(claims), buckets=3, policy=policy) for _ in range(3)
        )
        for step in range(3):
            for workers in (ran_through, interrupted):
                workers.step(normal(workers.parameters, 3, seed=step))
        resumed.resume(interrupted.saved())
        for step in range(3, 6):
            gradients = normal(ran_through.parameters, 3, seed=step)
            for ours, theirs in zip(resumed.step(gradients), ran_through.step(gradients), strict=True):
                require_equal(resumed, step, ours, theirs, f'after a resume, under "{policy}", the means differ')
        if [*map(bytes_of, resumed.states)] != [*map(bytes_of, ran_through.states)]:
            raise BrokenLawError(f'what is remembered differs after a resume, under "{policy}"')


@law(
    "moved",
    causes="state of a bucket; seeding by `bucket.index`",
    excuse=sharing,
)
def moved(compressor: Compressor, claims: Claims) -> None:
    """State follows its parameter into other buckets."""
    parameters = [parameter.double() for parameter in odd_parameters(claims)]
    ran_through, resumed = (Workers(compressor, 2, parameters, buckets=buckets) for buckets in (3, 1))
    for step in range(3):
        ran_through.step(normal(parameters, 2, seed=step))
    resumed.resume(ran_through.saved())
    for step in range(3, 6):
        gradients = normal(parameters, 2, seed=step)
        # At two ranks a sum's bits do not depend on where it lies.
        require_alike(claims, resumed, step, resumed.step(gradients)[0], ran_through.step(gradients)[0])


@law(
    "workers",
    causes="a residual of your own that is declared as another kind of state",
    excuse=keeping_nothing,
)
def other_workers(compressor: Compressor, claims: Claims) -> None:
    """When the number of workers changes, what is unsent is kept.

    That is the sum over the ranks, or the mean. Shares are computed in float64, and each is rounded once.
    """
    for one, other in SIZES:
        before = Workers(compressor, one, odd_parameters(claims))
        for step in range(3):
            before.step(normal(before.parameters, one, seed=step))
        snapshot = SavedChannel(
            step=3, world_size=one, policy="fifo", grad_scale=1.0, settings={}, shapes={}, bucket_plan={},
            kinds=before.states[0].kinds(), replicated=before.states[0].export()[0],
            local={rank: table.export()[1] for rank, table in enumerate(before.states)},
        )  # fmt: skip
        rules = {"spread": one / other, "spread-mean": 1.0}
        for how, ratio in rules.items():
            after = Workers(compressor, other, odd_parameters(claims))
            for rank, table in enumerate(after.states):
                own = snapshot.entries_for(rank, other, LoadRules(world_size=how))
                table.load(snapshot.replicated, own, snapshot.kinds)
            for index in range(len(before.parameters)):
                now = after.unsent(index)
                held = [after.residual(rank, index) for rank in range(other)]
                rounded = unit_roundoff(torch.float32) * (largest(now) + 2 * sum(map(largest, held)))
                if largest(now - before.unsent(index) * ratio) > rounded:
                    raise BrokenLawError(f"{how!r} from {one} workers keeps something else: {where(after, index)}")
            after.step_number = before.step_number
            means = after.step(normal(after.parameters, other, seed=9))
            if not all(torch.isfinite(mean).all() for mean in means[0]):
                raise BrokenLawError(f"the means after going from {one} to {other} workers are not finite")


LAWS = (declared, resume, moved, other_workers)
"""The laws of this file, in the order in which they are tried."""
