"""Ray Train: a run that loses a worker resumes from Ray's checkpoint, bit for bit."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.frameworks import ray_in_workers as on_every_worker
from tests.frameworks.launch import QUIET, ROOT

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TRAIN_V2_ENABLED", "1")
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80_000_000,
            _node_ip_address="127.0.0.1",
            runtime_env={"env_vars": {**QUIET, "PYTHONPATH": str(ROOT)}},
        )
        yield
        ray.shutdown()


def run(folder: Path, *, dies: bool) -> Path:
    """Run a trainer that puts what its workers end with into a folder; Ray restarts it once."""
    folder.mkdir()
    trainer = TorchTrainer(
        on_every_worker.train,
        train_loop_config={"folder": str(folder), "dies": dies},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "storage"), failure_config=FailureConfig(max_failures=1)),
    )
    metrics = trainer.fit().metrics
    assert metrics is not None and metrics["commhooks/compression_ratio"] > 10, metrics
    return folder


def test_a_run_that_loses_a_worker_ends_as_one_that_does_not(tmp_path: Path) -> None:
    """After training each worker tries what cannot work, too."""
    whole, killed = run(tmp_path / "whole", dies=False), run(tmp_path / "killed", dies=True)
    assert (killed / "killed").exists()
    ends = [[torch.load(folder / f"rank{rank}.pt") for rank in range(2)] for folder in (whole, killed)]
    assert [end.pop("began") for one in ends for end in one] == [0, 0, 6, 6]
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)


def test_the_example_trains(tmp_path: Path) -> None:
    example = runpy.run_path(str(ROOT / "docs" / "examples" / "ray_ddp.py"))
    trainer = TorchTrainer(
        example["train_loop"],
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    result = trainer.fit()
    assert result.metrics is not None and result.metrics["loss"] < 2, result.metrics
    assert (Path(result.checkpoint.path) / "commhooks.pt").exists()
