"""Digits whose classes are spread unevenly over the ranks."""

from __future__ import annotations

import pytest
import torch

from commhooks.experiments.tasks import load_task
from commhooks.experiments.tasks.skew import Skewed
from commhooks.experiments.tasks.task import LoadedTask

RANKS = 4


def labels(task: LoadedTask, rank: int, steps: int) -> torch.Tensor:
    return torch.cat([task.batch(step, rank, RANKS)[1] for step in range(steps)])


def skewed(count: int, skew: float, batch_size: int = 2) -> Skewed:
    return Skewed(torch.arange(count), torch.arange(count) % 10, skew=skew, batch_size=batch_size)


@pytest.mark.parametrize("skew", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("count", [40, 41, 43])
def test_every_image_is_one_ranks_own_and_no_rank_has_too_few(skew: float, count: int) -> None:
    shares = [skewed(count, skew).share(5, rank, RANKS) for rank in range(RANKS)]
    assert torch.cat(shares).sort().values.tolist() == list(range(count))
    assert min(map(len, shares)) >= count // RANKS


def test_sorted_data_gives_each_rank_its_own_classes_and_half_sorted_data_more_of_them() -> None:
    task = load_task("digits:size=small,skew=1.0")
    own = [set(labels(task, rank, 22).tolist()) for rank in range(RANKS)]
    assert own[0] <= {0, 1, 2} and own[3] <= {7, 8, 9}
    assert sum(len(a & b) for n, a in enumerate(own) for b in own[n + 1 :]) <= RANKS - 1  # a class cut in two

    half = labels(load_task("digits:size=small,skew=0.5"), 0, 22)
    assert set(half.tolist()) == set(range(10))
    assert 0.5 < (half <= 2).double().mean() < 0.8


def test_a_rank_sees_each_of_its_images_once_in_an_epoch_and_in_another_order_in_the_next() -> None:
    data = skewed(40, 1.0)
    epochs = [torch.cat([data(3, step, 1, RANKS)[0] for step in range(5 * n, 5 * n + 5)]) for n in range(2)]
    assert epochs[0].sort().values.tolist() == data.share(3, 1, RANKS).sort().values.tolist()
    assert epochs[0].tolist() != epochs[1].tolist()
    assert sorted(epochs[0].tolist()) == sorted(epochs[1].tolist())
