"""Training with several workers in one process is training on the whole batch; what it counts; the guide's errors."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

import commhooks
from commhooks import Compressor, WithoutFeedback, make_compressor
from commhooks.compressors import AllReduceMean, TopK
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import LoadedTask, load_task
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Context, Exchange
from commhooks.lockstep import average_in_lockstep, lockstep_connections
from experiments.studies.leaderboard.contenders import DENSE, Contender
from experiments.studies.leaderboard.running import SIZE, load_sized
from experiments.studies.leaderboard.standings import Run, paired
from experiments.studies.lockstep import SCORES, train_in_lockstep, vnmse
from tests.flat_cost import two_hop_names
from tests.tiers import THOROUGH

STEPS, WORKERS = 12, 4


def digits(seed: int = 0) -> LoadedTask:
    return load_task("digits:size=tiny", seed)


def test_dense_workers_end_where_one_does_that_sees_all_their_images() -> None:
    lockstep, alone = digits(1), digits(1)
    train_in_lockstep(lockstep, AllReduceMean(), steps=STEPS, workers=WORKERS)
    optimizer = alone.optimizer()
    for step in range(STEPS):
        alone.set_learning_rate(optimizer, step, STEPS)
        batches = [alone.batch(step, rank, WORKERS) for rank in range(WORKERS)]
        optimizer.zero_grad()
        alone.loss(alone.model, [torch.cat(parts) for parts in zip(*batches, strict=True)]).backward()
        optimizer.step()
    for one, other in zip(lockstep.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_bytes_are_those_of_one_worker_and_step() -> None:
    elements = sum(p.numel() for p in digits().model.parameters())
    found = train_in_lockstep(digits(), AllReduceMean(), steps=3, workers=WORKERS)
    assert (found.payload_bytes, found.gradient_bytes) == (4 * elements, 4 * elements)
    assert found.moved_bytes == pytest.approx(4 * elements * 2 * 3 / 4)  # a ring of four


def test_a_residual_is_measured_where_there_is_one() -> None:
    plain, fed = WithoutFeedback(inner=TopK(ratio=0.1)), TopK(ratio=0.1)
    assert train_in_lockstep(digits(), plain, steps=3, workers=2).residual is None
    once = train_in_lockstep(digits(), fed, steps=1, workers=2).residual
    assert once is not None and math.sqrt(0.05) < once < math.sqrt(0.9)  # at least not nothing; at most 1 - k/n of |g|²


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alone(Compressor):
    """Exchange nothing."""

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        for tile in bucket.tiles:
            tile.write(tile.form())
        yield from ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exploding(AllReduceMean):
    """Write infinity from the third step on."""

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        yield from super().compress(bucket, context)
        if context.step >= 2:
            bucket.memory.fill_(math.inf)


def test_workers_that_end_with_other_means_are_refused_and_one_that_diverges_ends_early() -> None:
    with pytest.raises(ValueError, match="means of '1.weight' differ"):
        train_in_lockstep(digits(), Alone(), steps=2, workers=2)
    found = train_in_lockstep(digits(), Exploding(), steps=50, workers=2)
    assert found.diverged == 4  # the step after is the first whose loss is not finite
    assert math.isnan(found.loss)


def short_runs(text: str, feedback: bool) -> list[Run]:
    """Train with three seeds for a hundred steps: enough for effects of many points."""
    one = Contender(Spec.parse(text), feedback)
    tasks = [load_sized("digits", SIZE, seed) for seed in range(3)]
    return [
        Run("digits", one, task.seed, train_in_lockstep(task, one.make(task.seed), steps=100, workers=WORKERS))
        for task in tasks
    ]


@THOROUGH  # what is sent and what is owed add up, for every compressor: commhooks.testing
def test_error_feedback_makes_low_rank_as_accurate_as_dense_to_two_points_and_without_it_is_worse() -> None:
    fed, plain = (short_runs("powersgd:rank=2", feedback) for feedback in (True, False))
    points = SCORES["digits"].scale
    assert paired(fed, short_runs(DENSE, False), SCORES["digits"]).scaled(points).low > -2
    assert paired(plain, fed, SCORES["digits"]).scaled(points).high < -2
    assert all(run.trained.payload_bytes < 0.15 * run.trained.gradient_bytes for run in fed)


GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "hooks.md"
RANKS, ELEMENTS = 4, 1 << 17


def printed() -> dict[str, float]:
    """Return the last column of the guide's table of errors, by compressor."""
    rows = re.findall(r"^\| (`.+) \|$", GUIDE.read_text(encoding="utf-8"), re.M)
    found: dict[str, float] = {}
    for cells in (row.split(" | ") for row in rows):
        if len(cells) == 6:
            specs = re.findall(r"`([^`]+)`", cells[0])
            found |= dict(zip(specs, map(float, cells[-1].split(", ")), strict=True))
    return found


@pytest.mark.parametrize(("name", "figure"), printed().items())
def test_a_round_of_normal_gradients_has_the_error_that_the_guide_says(name: str, figure: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [{"w": torch.randn(ELEMENTS, generator=generator)} for _ in range(RANKS)]
    connections = lockstep_connections(RANKS)
    workers = [
        commhooks.Exchanger(gradients[0], make_compressor(name), connection=connection) for connection in connections
    ]
    means = [{"w": own["w"].clone()} for own in gradients]
    average_in_lockstep(workers, means)
    assert vnmse(means[0], gradients) == pytest.approx(figure, rel=0.06)  # as printed, with two digits


def test_every_code_of_the_guide_has_a_figure() -> None:
    assert {name.partition(":")[0] for name in printed()} == set(two_hop_names()) - {"signum"}


def test_the_error_of_a_round_is_of_all_parameters_together() -> None:
    gradients = [{"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([1.0])}, {"a": torch.zeros(2), "b": torch.ones(1)}]
    mean = {"a": torch.tensor([1.5, 0.0]), "b": torch.ones(1)}
    assert vnmse(mean, gradients) == 0
    # Off by (0.5, 1, 1), of (1.5, 0, 1).
    assert vnmse({"a": torch.tensor([1.0, 1.0]), "b": torch.zeros(1)}, gradients) == pytest.approx(2.25 / 3.25)
    nothing = [{"a": torch.zeros(2)}] * 2
    assert vnmse(nothing[0], nothing) == 0 and vnmse({"a": torch.ones(2)}, nothing) == math.inf


@pytest.mark.parametrize("feedback", [False, True])
def test_a_run_reports_that_of_its_first_step(feedback: bool) -> None:
    compressor = make_compressor("int4", block=32, stochastic=False, error_feedback=feedback)
    of_one, of_two = (train_in_lockstep(digits(), compressor, steps=steps, workers=2).vnmse for steps in (1, 2))
    assert of_one == of_two and 0.001 < of_one < 2 * 0.39
    assert train_in_lockstep(digits(), make_compressor("all-reduce"), steps=2, workers=2).vnmse < 1e-12
