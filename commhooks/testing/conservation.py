"""Laws of error feedback: what is not sent is kept, and is sent in the end."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from commhooks.compressors.two_hop import SERVER_ERROR
from commhooks.language.compressor import Compressor, loss_of_a_matrix
from commhooks.language.loss import Loss
from commhooks.testing.bounds import IN_FLOAT64, of_mean, unit_roundoff
from commhooks.testing.claims import SHAPES, Claims
from commhooks.testing.differences import difference
from commhooks.testing.exchange import where
from commhooks.testing.law import keeping_nothing, law, not_conserving
from commhooks.testing.workers import BrokenLawError, Workers, largest, mean_of, normal, zeros
from commhooks.wrappers import PerParameter

MOST_STEPS = 1000
"""A running mean that takes longer to converge is not waited for."""
_CAUSES = (
    "`loss` not overridden, so that there is no residual; `keep` not called, or called with something else than what "
    "was not sent, or after `room` or `write`; `form` called for the next slot before this one's `M` is used; what the "
    "wire rounds away, which `context.as_sent` tells"
)


class Balance:
    """Workers whose steps are checked: mean + residual must be what was to be sent, up to rounding."""

    def __init__(self, workers: Workers, claims: Claims) -> None:
        self.claims: Claims
        self.workers: Workers
        self.workers, self.claims = workers, claims
        self.indices: range = range(len(workers.parameters))

    def residuals(self) -> list[list[Tensor]]:
        """Return every worker's residuals, in float64."""
        ranks = range(self.workers.world_size)
        return [[self.workers.residual(rank, index).double() for index in self.indices] for rank in ranks]

    def step(
        self, gradients: list[list[Tensor]], dtype: torch.dtype | None = None, *, on_one_rank: bool = False
    ) -> None:
        """Make a step; raise `BrokenLawError` if mean + unsent is not what was to be sent.

        `dtype`: that of the gradients, if it is narrow, and so rounds means when they are written.
        """
        workers, step = self.workers, self.workers.step_number
        before, residuals = [workers.unsent(index) for index in self.indices], self.residuals()
        means = workers.step(gradients)
        allowed = self.claims.lost(gradients, residuals, on_one_rank=on_one_rank)
        for index in self.indices:
            to_send = mean_of(gradients, index) + self.claims.decay * before[index]
            off = largest(means[0][index].double() + workers.unsent(index) - to_send)
            if dtype is not None:
                written = 2 * unit_roundoff(dtype) * largest(means[0][index])
                allowed[index] += written + of_mean(3, dtype) * largest(*(own[index] for own in gradients))
            if off > allowed[index]:
                share = off / max(largest(to_send), 1e-300)
                how = self._how(index, means[0][index].double(), gradients, residuals)
                raise BrokenLawError(f"off by {share:.2g} of the largest element{how}: {where(workers, index, step)}")

    def _how(self, index: int, mean: Tensor, gradients: list[list[Tensor]], before: list[list[Tensor]]) -> str:
        """Return how the mean differs from that of what residuals say was sent; nothing if servers keep some."""
        after = [own[index] for own in self.residuals()]
        if largest(self.workers.unsent(index) - torch.stack(after).mean(0)) > IN_FLOAT64 * largest(*after):
            return ""
        formed = [g[index].double() + self.claims.decay * e[index] for g, e in zip(gradients, before, strict=True)]
        sent = [one - kept for one, kept in zip(formed, after, strict=True)]
        return f"; {difference(mean, sent, kept=after)}"


@law(
    "conservation",
    causes=_CAUSES,
    excuse=not_conserving,
)
def conservation(compressor: Compressor, claims: Claims) -> None:
    """Sent + residual = what was to be sent."""
    workers = Workers(compressor, 3, zeros(*claims.shapes(*SHAPES)))
    balance = Balance(workers, claims)
    for step in range(5):
        balance.step(normal(workers.parameters, 3, seed=step, scale=1.0 if claims.range or step != 3 else 1e3))


@law(
    "wire",
    causes=_CAUSES,
    excuse=keeping_nothing,
)
def wire(compressor: Compressor, claims: Claims) -> None:
    """On one rank, where nothing is summed, all that is rounded on the wire is kept."""
    workers = Workers(compressor, 1, zeros(*claims.shapes((24, 40), (12, 30))))
    balance = Balance(workers, claims)
    for step in range(5):
        balance.step(normal(workers.parameters, 1, seed=step), on_one_rank=True)


@law(
    "narrow",
    causes=f"{_CAUSES}. Narrow gradients are formed in memory that all slots share",
    excuse=not_conserving,
)
def narrow(compressor: Compressor, claims: Claims) -> None:
    """For fp16 and bf16 gradients too, sent + residual = what was to be sent, up to the rounding of the mean."""
    compressors = [compressor]
    if not loss_of_a_matrix(compressor).of_bucket:
        compressors.append(PerParameter(rules=(("layer[013]", compressor),)))  # some of a bucket's parameters
    for one in compressors:
        for dtype in (torch.float16, torch.bfloat16):
            workers = Workers(one, 3, zeros((24, 40), (12, 30), (7,), *claims.shapes((9, 16)), dtype=dtype))
            balance = Balance(workers, claims)
            for step in range(4):
                balance.step(normal(workers.parameters, 3, seed=step), dtype)


@law(
    "tiny",
    causes="values that become 0 in fp16 and are taken to be sent: what is sent is `context.as_sent(value)`",
    excuse=not_conserving,
)
def tiny(compressor: Compressor, claims: Claims) -> None:
    """What is too small for the wire stays in the residual: gradients of 1e-8 over 40 steps."""
    parameters = zeros(*claims.shapes((24, 40), (12, 30)))
    workers = Workers(compressor, 2, parameters)
    balance, gradients = Balance(workers, claims), normal(parameters, 2, seed=3, scale=1e-8)
    sent = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    allowed = [0.0] * len(parameters)
    for _ in range(40):
        before = balance.residuals()
        for index in balance.indices:
            sent[index] += (1 - claims.decay) * workers.unsent(index)  # faded
        for index, lost in enumerate(claims.lost(gradients, before)):
            allowed[index] += lost
        for index, mean in enumerate(workers.step(gradients)[0]):
            sent[index] += mean.double()
    for index, total in enumerate(sent):
        off = largest(total + workers.unsent(index) - 40 * mean_of(gradients, index))
        if off > allowed[index]:
            share = off / (40 * largest(mean_of(gradients, index)))
            raise BrokenLawError(f"{share:.2g} of what was to be sent is lost: {where(workers, index)}")


def endless(compressor: Compressor, claims: Claims) -> str:
    """Excuse a compressor without residuals, or whose residual takes very long to be sent."""
    if reason := not_conserving(compressor, claims):
        return reason
    parameters = zeros(*claims.shapes((24, 40), (12, 30)))
    losses = [compressor.loss(f"layer{index}", parameter) for index, parameter in enumerate(parameters)]
    horizon = claims.horizon(max((loss.contraction for loss in losses if loss), default=0.0))
    if horizon > MOST_STEPS:
        return f"by its `loss` it takes over {MOST_STEPS} steps to send everything; try settings that send more"
    return ""


@law(
    "convergence",
    causes="a `loss` that is too small: the true one is what `commhooks check` measures under the law 'loss'; a "
    "residual that grows, which a decay below 1 or a damping factor bounds; elements that are never sent",
    excuse=endless,
)
def convergence(compressor: Compressor, claims: Claims) -> None:
    """With error feedback the running mean converges to the mean of the gradients, as fast as `loss` says.

    What is unsent is bounded, so the distance falls as 1/steps; or to what a residual loses in each, if it fades.

    If a step gets through at least the part 1 - error of what is to be sent, in squared norms, no more than
    2/(1 - decay²·error) norms are unsent (Karimireddy et al., "Error feedback fixes SignSGD", 2019, lemma 3, with the
    decay beside each residual); a server is given means that are no larger than what ranks have to send, and has as
    much. The same holds of largest magnitudes, which are the measure if the norm is no bound.
    """
    parameters = zeros(*claims.shapes((24, 40), (12, 30)))
    workers = Workers(compressor, 2, parameters)
    named = zip(workers.names, parameters, strict=True)
    losses = [compressor.loss(name, parameter) or Loss(0.0) for name, parameter in named]
    contraction = max(loss.contraction for loss in losses)
    kept, horizon = 1 - claims.decay**2 * contraction, claims.horizon(contraction)
    order = 2 if all(loss.error < 1 for loss in losses) else math.inf
    gradients = normal(parameters, 2, seed=3)
    total = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    for step in range(horizon):
        if step == horizon - 1:
            unsent = Balance(workers, claims).residuals()
        for index, mean in enumerate(workers.step(gradients)[0]):
            total[index] += mean.double()
    floors = claims.lost(gradients, unsent)
    for index, parameter in enumerate(parameters):
        distance = float((total[index] / horizon - mean_of(gradients, index)).norm(order))
        norm = max(float(own[index].double().norm(order)) for own in gradients)
        hops = 2 if SERVER_ERROR in workers.kinds()[workers.names[index]] else 1
        lost = 1 / horizon + 1 - claims.decay
        allowed = hops * 2 / kept * norm * lost + floors[index] * parameter.numel() ** 0.5
        if distance > allowed:
            raise BrokenLawError(
                f"after {horizon} steps the running mean is {distance / norm:.2g} norms away, and may be "
                f"{allowed / norm:.2g}: {where(workers, index)}"
            )


LAWS = (conservation, wire, narrow, tiny, convergence)
"""The laws of this file, in the order in which they are tried."""
