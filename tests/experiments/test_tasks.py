"""The tasks: real data, the same for everyone, and models that learn from it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from commhooks.experiments.tasks import load_task
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
    def test_the_same_seed_gives_the_same_model_and_batch(self, name: str) -> None:
        one, other = load_task(name, 3), load_task(name, 3)
        states = one.model.state_dict(), other.model.state_dict()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        assert torch.equal(inputs(one, 7, 1), inputs(other, 7, 1))

    def test_another_seed_step_or_rank_gives_another_batch(self, name: str) -> None:
        task, other = load_task(name, 3), load_task(name, 4)
        first = inputs(task, 7, 0)
        assert not any(
            torch.equal(first, found) for found in (inputs(other, 7, 0), inputs(task, 8, 0), inputs(task, 7, 1))
        )

    def test_loading_leaves_the_global_random_state_alone(self, name: str) -> None:
        torch.manual_seed(5)
        expected = torch.rand(1)
        torch.manual_seed(5)
        load_task(name, 3)
        assert torch.equal(torch.rand(1), expected)

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
