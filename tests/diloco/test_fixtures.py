"""Values that others have computed for DiLoCo: bit-equal where they are dyadic, and thus exact in fp32."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from commhooks import DiLoCo
from commhooks.lockstep import lockstep_connections, step_in_lockstep


class TwoWeights(nn.Module):
    """Two fragments of one weight each, 1.0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(1)) for _ in range(2))


PLAIN_RATE_2 = functools.partial(torch.optim.SGD, lr=2.0)


# torchft's regression fixtures ("mocked updates"): 2 workers, every inner step subtracts 2, H = 6, P = 2.
@pytest.mark.parametrize(
    ("delay", "mixing", "local", "outer"),
    [
        (0, 0.0, ([-11, -35, -59], [-23, -47]), ([-11, -35], [-23, -47])),
        (0, 0.5, ([-8, -24.5, -40.25], [-17, -32]), ([-11, -29], [-23, -35])),
        (1, 0.0, ([-7, -27, -47], [-19, -39]), ([-7, -27], [-19, -39])),
    ],
)
def test_mocked_updates_give_the_published_values(
    delay: int, mixing: float, local: tuple[list[float], list[float]], outer: tuple[list[float], list[float]]
) -> None:
    models = [TwoWeights() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    team = [
        DiLoCo(
            model, optimizer, every=6, fragments=["first", "second"], delay=delay, mixing=mixing, outer=PLAIN_RATE_2,
            connection=connection,
        )
        for model, optimizer, connection in zip(models, optimizers, lockstep_connections(2), strict=True)
    ]  # fmt: skip
    found: dict[str, list[float]] = {name: [] for name in ("first", "second", "outer first", "outer second")}
    for step in range(1, 16):
        for model, optimizer in zip(models, optimizers, strict=True):
            for weight in model.parameters():
                weight.grad = torch.full((1,), 2.0)
            optimizer.step()
        step_in_lockstep(team)
        turn = {3: "first", 0: "second"}.get(step % 6)
        if turn is not None:
            copies = {name: copy for one in team[0]._fragments for name, copy in one.outer.items()}
            found[turn].append(getattr(models[0], turn).item())
            found[f"outer {turn}"].append(copies[turn].item())
        assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert (found["first"], found["second"]) == (list(map(float, local[0])), list(map(float, local[1])))
    assert found["outer first"][: len(outer[0])] == list(map(float, outer[0]))
    assert found["outer second"] == list(map(float, outer[1]))
