"""A process that is forked while a compressor is attached, as a data loader or a subprocess may do it."""

from __future__ import annotations

import torch

import commhooks
from tests.commhooks.models import Given, wrap
from tests.commhooks.ranks import exit_code_of_a_fork
from tests.commhooks.told import told_by
from tests.world import on_ranks

SHAPES = [(40, 40)] * 3


class Training:
    """A model with a compressor attached."""

    def __init__(self, kind: str) -> None:
        self.model = wrap(kind, Given(*SHAPES), bucket_cap_mb=0.005)
        self.attachment = commhooks.attach(self.model, commhooks.make_compressor("powersgd", rank=2))
        self.gradients = [torch.randn(shape) for shape in SHAPES]
        self.codes: list[int] = []

    def step(self) -> None:
        self.model(*self.gradients).backward()

    def step_and_drop(self) -> None:
        """Be told that a fork does not train, and let go of everything."""
        told = told_by(self.step).text
        assert "rank 0, step 3, bucket 0" in told and "this process was forked" in told
        self.attachment.close()
        del self.model, self.attachment

    def fork_once(self, _: torch.Tensor) -> None:
        if not self.codes:
            self.codes.append(-1)
            self.codes = [exit_code_of_a_fork()]


@on_ranks(1, check_exit=True)
def test_a_forked_process_ends_as_it_wants_to_and_does_not_train_with_its_parent_s_line(rank: int) -> None:
    core, torchs = Training("core"), Training("torch")
    for _ in range(3):
        core.step()
        torchs.step()
    assert exit_code_of_a_fork(core.step_and_drop) == 7
    next(torchs.model.parameters()).register_hook(torchs.fork_once)
    torchs.step()
    assert torchs.codes == [7]
    for training in (core, torchs):
        training.step()
