"""What the tests of guards run on every rank."""

from __future__ import annotations

import torch

import commhooks
from commhooks import StartAfter, make_compressor
from tests.cases import LowRankBytes, dense_bytes
from tests.commhooks.dynamic_in_worlds import BRANCHES, SHAPES, Branches
from tests.commhooks.models import wrap
from tests.commhooks.workers import normal, zeros


def counts_of_unused_parameters(rank: int) -> None:
    """Assert no counts in messages while nothing is remembered, and protection from the first state on."""
    for kind in ("core", "torch"):
        for policy in ("fifo", "fused"):
            model = wrap(kind, Branches(), find_unused_parameters=True, **BRANCHES)
            hooks = commhooks.attach(
                model, StartAfter(steps=2, inner=make_compressor("powersgd", rank=2)), policy=policy
            )
            parameters = list(model.parameters())
            kept: dict[str, torch.Tensor] = {}
            for step in range(6):
                used = {0, 1, 3} if step in (1, 5) else {0, 1, 2, 3}  # first without state, then with it
                gradients = normal(zeros(*SHAPES), 2, seed=step)[rank]
                before = {name: one.clone() for name, one in hooks.state.of(parameters[2]).tensors.items()}
                model.zero_grad()
                model({number: gradients[number] for number in sorted(used)}).backward()
                kept = hooks.state.of(parameters[2]).tensors
                counts = 4 * len(SHAPES) if step >= 2 else 0
                expected = (LowRankBytes(rank=2) if step >= 2 else dense_bytes)(parameters, step, 2)
                assert hooks.last_step().payload_bytes == expected + counts, (kind, policy, step)
                unchanged = "residual" in before and torch.equal(before["residual"], kept["residual"])
                assert unchanged is (step == 5), (kind, policy, step)
            assert kept["residual"].abs().max() > 0.1
            hooks.detach()
