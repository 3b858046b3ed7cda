"""`compress` with Lightning Fabric's own objects: what it restores, what it refuses, and that it runs at all."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.strategies import DDPStrategy
from torch import nn

import commhooks
from commhooks.integrations.common import Compression
from commhooks.integrations.fabric import DDPCoreStrategy, compress
from tests.frameworks.launch import ROOT, raised, run_ranks
from tests.frameworks.lightning_in_worlds import digest, run_script, world_size
from tests.world import WorldError

pytestmark = pytest.mark.frameworks

logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

STEPS, SAVED = 12, 6
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16, accumulated, clipped": {"precision": "bf16-mixed", "accumulate": 2, "clip": 0.1},
    "fp16": {"plugins": lambda: MixedPrecision("16-mixed", "cpu")},
    "compiled": {"compiled": True},
    "ddp_core": {"strategy": DDPCoreStrategy, "accumulate": 2, "clip": 0.1},
}


class Run:
    """A model that is trained in one setting."""

    def __init__(
        self,
        *,
        compressed: bool = True,
        strategy: Callable[[], Any] = DDPStrategy,
        accumulate: int = 1,
        clip: float | None = None,
        compiled: bool = False,
        plugins: Callable[[], Any] | None = None,
        **options: Any,
    ) -> None:
        self.accumulate, self.clip = accumulate, clip
        self.fabric = Fabric(
            accelerator="cpu",
            devices=world_size(),
            strategy=strategy(),
            plugins=plugins() if plugins else None,
            **options,
        )
        self.fabric.launch()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        trained: Any = torch.compile(self.net, backend="eager") if compiled else self.net
        self.model, self.optimizer = self.fabric.setup(
            trained, torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        )
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "step": 0}
        if compressed:
            compressor = commhooks.make_compressor("powersgd", rank=1)
            self.state["hooks"] = compress(self.fabric, self.model, self.optimizer, compressor)

    @property
    def hooks(self) -> Compression:
        hooks: Compression = self.state["hooks"]
        return hooks

    def step(self) -> None:
        generator = torch.Generator().manual_seed(10 * self.state["step"] + self.fabric.global_rank)
        self.optimizer.zero_grad()
        for part in range(self.accumulate):
            inputs, labels = torch.randn(4, 32, generator=generator), torch.randint(8, (4,), generator=generator)
            with self.fabric.no_backward_sync(self.model, enabled=part < self.accumulate - 1):
                self.fabric.backward(nn.functional.cross_entropy(self.model(inputs), labels))
        if self.clip:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.clip)
        self.optimizer.step()
        self.state["step"] += 1

    def until(self, step: int) -> Run:
        while self.state["step"] < step:
            self.step()
        return self

    def outcome(self) -> dict[str, str]:
        """Return what must be the same whether a run was interrupted or not."""
        hooks = self.hooks.attachment
        assert hooks is not None and hooks.steps == self.state["step"], "one collective step for each optimizer step"
        state = hooks.gathered()
        return {
            "parameters": digest(self.net.state_dict()),
            "momentum": digest(self.optimizer.state_dict()["state"]),
            "residuals": digest(state["local"]),
            "bases": digest(state["replicated"]),
        }


def uninterrupted(rank: int) -> dict[str, dict[str, str]]:
    found = {}
    for setting, options in SETTINGS.items():
        run = Run(**options).until(STEPS)
        found[setting] = run.outcome()
        assert run.hooks.attachment is not None
        assert run.hooks.attachment.statistics().ratio > 10, setting
    return found


def interrupted(rank: int, folder: str) -> None:
    """Save every run after 6 steps, and kill the ranks two steps later."""
    for setting, options in SETTINGS.items():
        run = Run(**options).until(SAVED)
        run.fabric.save(Path(folder, setting), run.state)
        run.until(SAVED + 2)
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(rank: int, folder: str) -> dict[str, dict[str, str]]:
    found = {}
    for setting, options in SETTINGS.items():
        run = Run(**options)
        run.fabric.load(Path(folder, setting), run.state, weights_only=True)
        assert run.state["step"] == SAVED
        found[setting] = run.until(STEPS).outcome()
    # The file that Fabric writes for ddp_core's DDP fits PyTorch's.
    Run(strategy=DDPStrategy).fabric.load(Path(folder, "ddp_core"), {"model": Run().model}, strict=False)
    return found


class Local(DDPStrategy):
    """A strategy that leaves the model as it is."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        return module


def refusals(rank: int, folder: str) -> dict[str, str]:
    """Return the error of everything that cannot work."""
    run = Run(compressed=False)
    ended = compress(run.fabric, run.model, [run.optimizer], "powersgd")
    ended.end()
    saved = Path(folder, "saved")
    run.until(1).fabric.save(saved, run.state)  # without the hook
    started_anew = Run()
    started_anew.fabric.load(saved, started_anew.state, strict=False)
    assert started_anew.until(3).hooks.attachment is not None
    run = Run(loggers=CSVLogger(folder, "log", flush_logs_every_n_steps=1)).until(1)
    if rank == 0:
        assert run.hooks.attachment is not None
        run.hooks.attachment.log_to(run.fabric.logger, 1)
        assert "commhooks/compression_ratio" in next(Path(folder).rglob("metrics.csv")).read_text()

    def train_what_is_inside() -> None:
        run.net(torch.ones(1, 32)).sum().backward()
        run.optimizer.step()

    return {
        "not set up": raised(lambda: compress(run.fabric, run.net, run.optimizer, "powersgd")),
        "not DDP": raised(lambda: Run(strategy=Local)),
        "saved without": raised(lambda: Run().fabric.load(saved, Run().state)),
        "did not run": raised(train_what_is_inside),
        "after end": raised(ended.state_dict),
    }


# --- tests ------------------------------------------------------------------------------------------------------------

EXAMPLE = ROOT / "docs" / "examples" / "fabric_ddp.py"
ERRORS = {
    "not set up": "AttachError: .*expected what fabric.setup.* returned.* \\(got Sequential and DDPStrategy\\)",
    "not DDP": "AttachError: .*\\(got _FabricModule around Sequential and Local\\); pass Fabric\\(strategy=",
    "saved without": "KeyError: .*'hooks' that does not exist in the loaded checkpoint",
    "did not run": "NotAveragedError: SGD is about to take a step on gradients of",
    "after end": "CheckpointError: .*nothing is attached",
    "alone": "AttachError: .*this run has one process",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, dict[str, str]], ...]]:
    """Return for each rank how 12 steps end without interruption, and after a kill and a resume."""
    folder = str(tmp_path_factory.mktemp("fabric"))
    with pytest.raises(WorldError) as killed:
        run_ranks(interrupted, 2, folder)
    assert {outcome.exit_code for outcome in killed.value.outcomes} == {-9}, str(killed.value)
    return list(zip(run_ranks(uninterrupted, 2), run_ranks(resumed, 2, folder), strict=True))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_resumed_run_ends_as_an_uninterrupted_one_bit_for_bit(
    runs: list[tuple[dict[str, dict[str, str]], ...]], setting: str
) -> None:
    for uninterrupted, resumed in runs:
        assert resumed[setting] == uninterrupted[setting]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return rank 0's error for everything that cannot work."""
    folder = str(tmp_path_factory.mktemp("refusals"))
    return {**run_ranks(refusals, 2, folder)[0], "alone": raised(Run)}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_work_says_what_to_do(errors: dict[str, str], case: str) -> None:
    assert re.match(ERRORS[case], errors[case], re.S), errors[case]


def test_the_example_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    for epochs in ("2", "4"):
        run_ranks(run_script, 2, str(EXAMPLE), epochs, str(tmp_path))
    end = torch.load(tmp_path / "checkpoints" / "fabric_ddp" / "last.ckpt", weights_only=True)
    assert end["epoch"] == 4 and end["hooks"]["local"].keys() == {"rank0", "rank1"}
