"""`commhooks.integrations.accelerate` under the real library: two ranks, Gloo, processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import commhooks
from tests.frameworks.huggingface import die, differences, settle_in, what_it_became
from tests.world import run_world, run_world_outcomes

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(180)]

STEPS, SAVED_AT, BATCH = 12, 6, 4
PLAIN: dict[str, Any] = {"compressor": "powersgd"}
AS_PEOPLE_TRAIN = {"compressor": "top-k", "accumulate": 2, "clip": 0.5, "precision": "bf16"}
OF_DDP_CORE = {"compressor": "powersgd", "ddp_core": True, "accumulate": 2, "clip": 0.5, "precision": "bf16"}


class Run:
    """A script that trains with Accelerate."""

    def __init__(self, *, compressor: str | None, ddp_core: bool = False, accumulate: int = 1, clip: float = 0.0,
                 precision: str = "no", kwargs: list[Any] | None = None, **options: Any) -> None:  # fmt: skip
        from accelerate import Accelerator

        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision, kwargs_handlers=kwargs
        )
        self.accumulate, self.clip = accumulate, clip
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        samples = torch.randn(2 * BATCH * accumulate * STEPS, 64)
        labels = torch.randint(8, (len(samples),))
        loader: Any = DataLoader(TensorDataset(samples, labels), batch_size=BATCH)
        model: nn.Module
        if ddp_core:
            from ddp_core import DistributedDataParallel

            model = DistributedDataParallel(self.accelerator.prepare_model(self.module, evaluation_mode=True))
        else:
            model = self.accelerator.prepare(self.module)
        self.model = model
        self.optimizer, self.loader = self.accelerator.prepare(optimizer, loader)
        self.attachment: commhooks.Attachment | None = None
        if compressor is not None:
            from commhooks.integrations.accelerate import compress

            self.attachment = compress(self.accelerator, self.model, compressor, **options)

    def train(self, begin: int, end: int) -> None:
        """Make the steps from `begin` to `end`."""
        loader = self.accelerator.skip_first_batches(self.loader, begin * self.accumulate)
        for number, (samples, labels) in enumerate(loader, begin * self.accumulate):
            if number == end * self.accumulate:
                break
            self.step(self.model, samples, labels)

    def step(self, model: nn.Module, samples: Tensor, labels: Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(nn.functional.cross_entropy(model(samples), labels))
            if self.clip and self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def became(self) -> dict[str, Any]:
        assert self.attachment is not None
        return what_it_became(self.module, self.attachment)


def uninterrupted(rank: int, settings: dict[str, Any]) -> tuple[dict[str, Any], float, int]:
    settle_in(rank)
    run = Run(**settings)
    run.train(0, STEPS)
    assert run.attachment is not None
    counted = run.attachment.statistics()
    return run.became(), counted.ratio, run.attachment.steps


def killed_after_saving(rank: int, folder: str, settings: dict[str, Any]) -> None:
    settle_in(rank)
    run = Run(**settings)
    run.train(0, SAVED_AT)
    run.accelerator.save_state(folder)
    run.train(SAVED_AT, SAVED_AT + 1)
    die()


def resumed(rank: int, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    settle_in(rank)
    run = Run(**settings)
    run.accelerator.load_state(folder)
    run.train(SAVED_AT, STEPS)
    return run.became()


@pytest.mark.parametrize(
    "settings", [PLAIN, AS_PEOPLE_TRAIN, OF_DDP_CORE], ids=["plain", "as-people-train", "ddp_core"]
)
def test_a_killed_run_goes_on_bit_for_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = run_world(uninterrupted, 2, settings)
    died = run_world_outcomes(killed_after_saving, 2, str(tmp_path / "saved"), settings)
    assert [outcome.exit_code for outcome in died] == [-9, -9], [outcome.describe() for outcome in died]
    again = run_world(resumed, 2, str(tmp_path / "saved"), settings)
    for (expected, ratio, steps), got in zip(whole, again, strict=True):
        assert differences(expected, got) == []
        assert steps == STEPS
        assert ratio > 10
    assert differences(whole[0][0]["model"], whole[1][0]["model"]) == []
    residuals = [outcome[0]["hook"]["local"] for outcome in whole]
    assert residuals[0].keys() == {"rank0"} and residuals[1].keys() == {"rank1"}
