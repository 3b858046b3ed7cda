"""The tasks: real data, the same for everyone, and models that learn from it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from commhooks.experiments.tasks import load_task
from commhooks.experiments.tasks.skew import Skewed
from commhooks.experiments.tasks.task import LoadedTask
from commhooks.experiments.tasks.text import source_files

SMALL = ["digits:size=small", "gpt:size=small", "lstm:size=small"]


def inputs(task: LoadedTask, step: int, rank: int, ranks: int = 2) -> torch.Tensor:
    """Return the inputs of a built-in task's batch."""
    found = task.batch(step, rank, ranks)[0]
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("name", SMALL)
class TestEveryTask:
    def test_the_same_seed_gives_the_same_model_and_batch_whatever_the_global_random_state(self, name: str) -> None:
        torch.manual_seed(5)
        expected = torch.rand(1)
        torch.manual_seed(5)
        one = load_task(name, 3)
        assert torch.equal(torch.rand(1), expected), "which is left alone"
        other = load_task(name, 3)
        states = one.model.state_dict(), other.model.state_dict()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        assert torch.equal(inputs(one, 7, 1), inputs(other, 7, 1))

    def test_another_seed_step_or_rank_gives_another_batch(self, name: str) -> None:
        task, other = load_task(name, 3), load_task(name, 4)
        first = inputs(task, 7, 0)
        assert not any(
            torch.equal(first, found) for found in (inputs(other, 7, 0), inputs(task, 8, 0), inputs(task, 7, 1))
        )

    def test_a_few_steps_of_training_lower_the_held_out_loss(self, name: str) -> None:
        task = load_task(name)
        optimizer = task.optimizer()
        before = task.evaluate()
        for step in range(30):
            task.set_learning_rate(optimizer, step, 30)
            task.loss(task.model, task.batch(step, 0, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        after = task.evaluate()
        assert after["loss"] < before["loss"]
        assert after["accuracy"] > before["accuracy"]
        assert task.model.training


def test_every_digit_of_an_epoch_is_seen_once() -> None:
    task = load_task("digits:size=small")
    steps = 1437 // (2 * task.task.batch_size)
    seen = torch.cat([inputs(task, step, rank) for step in range(steps) for rank in range(2)])
    assert len(seen.flatten(1).unique(dim=0)) > 0.99 * len(seen)  # a few images of the set are twins


def test_the_text_is_the_librarys_own_modules_in_order() -> None:
    files = source_files(Path(sysconfig.get_path("stdlib")))
    assert files == sorted(files)
    assert {"argparse.py", "typing.py"} <= {file.name for file in files}
    assert not [file for file in files if "site-packages" in file.parts or file.name.startswith("_sysconfigdata")]


WORKERS = 4


def labels(task: LoadedTask, rank: int, steps: int) -> torch.Tensor:
    return torch.cat([task.batch(step, rank, WORKERS)[1] for step in range(steps)])


def skewed(count: int, skew: float, batch_size: int = 2) -> Skewed:
    return Skewed(torch.arange(count), torch.arange(count) % 10, skew=skew, batch_size=batch_size)


@pytest.mark.parametrize("skew", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("count", [40, 41, 43])
def test_every_image_is_one_ranks_own_and_no_rank_has_too_few(skew: float, count: int) -> None:
    shares = [skewed(count, skew).share(5, rank, WORKERS) for rank in range(WORKERS)]
    assert torch.cat(shares).sort().values.tolist() == list(range(count))
    assert min(map(len, shares)) >= count // WORKERS


def test_sorted_data_gives_each_rank_its_own_classes_and_half_sorted_data_more_of_them() -> None:
    task = load_task("digits:size=small,skew=1.0")
    own = [set(labels(task, rank, 22).tolist()) for rank in range(WORKERS)]
    assert own[0] <= {0, 1, 2} and own[3] <= {7, 8, 9}
    assert sum(len(a & b) for n, a in enumerate(own) for b in own[n + 1 :]) <= WORKERS - 1  # a class cut in two

    half = labels(load_task("digits:size=small,skew=0.5"), 0, 22)
    assert set(half.tolist()) == set(range(10))
    assert 0.5 < (half <= 2).double().mean() < 0.8


def test_a_rank_sees_each_of_its_images_once_in_an_epoch_and_in_another_order_in_the_next() -> None:
    data = skewed(40, 1.0)
    epochs = [torch.cat([data(3, step, 1, WORKERS)[0] for step in range(5 * n, 5 * n + 5)]) for n in range(2)]
    assert epochs[0].sort().values.tolist() == data.share(3, 1, WORKERS).sort().values.tolist()
    assert epochs[0].tolist() != epochs[1].tolist()
    assert sorted(epochs[0].tolist()) == sorted(epochs[1].tolist())
