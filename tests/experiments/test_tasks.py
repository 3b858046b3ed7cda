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


def test_the_tiny_digits_have_nothing_that_changes_without_a_gradient() -> None:
    assert not list(load_task("digits:size=tiny").model.buffers())


def test_every_digit_of_an_epoch_is_seen_once() -> None:
    task = load_task("digits:size=small")
    steps = 1437 // (2 * task.task.batch_size)
    seen = torch.cat([inputs(task, step, rank) for step in range(steps) for rank in range(2)])
    assert len(seen.flatten(1).unique(dim=0)) > 0.99 * len(seen)  # a few images of the set are twins


def test_more_digits_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="use fewer ranks or a smaller batch_size"):
        load_task("digits").batch(0, 0, 64)


def test_bits_per_byte_is_the_loss_in_bits() -> None:
    assert load_task("gpt:size=small").evaluate()["bits_per_byte"] == pytest.approx(8, rel=0.01)  # it knows nothing yet


def test_the_text_is_the_librarys_own_modules_in_order() -> None:
    files = source_files(Path(sysconfig.get_path("stdlib")))
    assert files == sorted(files)
    assert {"argparse.py", "typing.py"} <= {file.name for file in files}
    assert not [file for file in files if "site-packages" in file.parts or file.name.startswith("_sysconfigdata")]


def test_a_library_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected the source files of Python's standard library"):
        source_files(tmp_path)


def gpt_parameters(width: int, layers: int, context: int) -> int:
    """Return how many there are: in the blocks, in the two embeddings, in the last norm and in the head."""
    return layers * (12 * width**2 + 13 * width) + (256 + context) * width + 2 * width + 256 * width


def plain_parameters(c: int) -> int:
    """Return how many the plain network has: five convolutions in each of three stages, their norms, and the head."""
    weights = sum(9 * (before * width + 4 * width**2) for before, width in ((1, c), (c, 2 * c), (2 * c, 4 * c)))
    return weights + 2 * 5 * (c + 2 * c + 4 * c) + 10 * (4 * c + 1)


def residual_parameters(c: int) -> int:
    """Return how many the residual network has: a convolution, six blocks of two, two shortcuts, and the head."""
    weights = 9 * c + sum(9 * (before * width + 3 * width**2) for before, width in ((c, c), (c, 2 * c), (2 * c, 4 * c)))
    return weights + (c * 2 * c + 2 * c * 4 * c) + 2 * (c + 4 * c + 5 * 2 * c + 5 * 4 * c) + 10 * (4 * c + 1)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt", gpt_parameters(width=192, layers=4, context=64)),
        ("gpt:size=base", 4_096_768),
        ("gpt:width=256,layers=5,heads=8,context=64", gpt_parameters(width=256, layers=5, context=64)),
        ("lstm:width=40,layers=3", 3 * (8 * 40**2 + 8 * 40) + 256 * 40 + 256),
        ("digits:network=resnet18", 11_173_962 - 2 * 64 * 9),  # one input channel instead of three
        ("digits:network=resnet,channels=8", residual_parameters(8)),
        ("digits:network=vgg,channels=8", plain_parameters(8)),
    ],
)
def test_sizes_and_settings_decide_about_the_model(name: str, parameters: int) -> None:
    assert sum(p.numel() for p in load_task(name).model.parameters()) == parameters


@pytest.mark.parametrize("network", ["resnet18", "resnet", "vgg"])
def test_deep_networks_take_a_step_on_digits(network: str) -> None:
    task = load_task(f"digits:network={network},batch_size=2")
    task.check(1)
    assert task.model(inputs(task, 0, 0)).shape == (2, 10)
