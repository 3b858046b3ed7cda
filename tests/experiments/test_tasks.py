"""The tasks: real data, the same for everyone, and models that learn from it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from experiments.tasks import make_task, task_names
from experiments.tasks.gpt import source_files


@pytest.mark.parametrize("name", task_names())
class TestEveryTask:
    def test_the_same_seed_gives_the_same_model_and_batch(self, name: str) -> None:
        task = make_task(name, "small")
        one, other = task.model(3).state_dict(), task.model(3).state_dict()
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert torch.equal(task.batch(3, 7, 1, 2).inputs, task.batch(3, 7, 1, 2).inputs)

    def test_another_seed_step_or_rank_gives_another_batch(self, name: str) -> None:
        task = make_task(name, "small")
        first = task.batch(3, 7, 0, 2).inputs
        for seed, step, rank in ((4, 7, 0), (3, 8, 0), (3, 7, 1)):
            assert not torch.equal(first, task.batch(seed, step, rank, 2).inputs)

    def test_a_model_leaves_the_global_random_state_alone(self, name: str) -> None:
        torch.manual_seed(5)
        expected = torch.rand(1)
        torch.manual_seed(5)
        make_task(name, "small").model(3)
        assert torch.equal(torch.rand(1), expected)

    def test_a_few_steps_of_training_lower_the_held_out_loss(self, name: str) -> None:
        task = make_task(name, "small")
        model = task.model(0)
        optimizer = task.optimizer(model)
        before = task.evaluate(model)
        for step in range(30):
            for group in optimizer.param_groups:
                group["lr"] = task.learning_rate(step, 30)
            batch = task.batch(0, step, 0, 1)
            task.loss(model(batch.inputs), batch.targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        after = task.evaluate(model)
        assert after.loss < before.loss
        assert after.accuracy > before.accuracy
        assert model.training

    def test_a_size_that_does_not_exist_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="size 'huge' .* expected one of tiny, small, medium, large"):
            make_task(name, "huge")


def test_a_task_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of digits, gpt"):
        make_task("imagenet")


def test_the_tiny_digits_have_nothing_that_changes_without_a_gradient() -> None:
    assert not list(make_task("digits", "tiny").model(0).buffers())


def test_every_digit_of_an_epoch_is_seen_once() -> None:
    task = make_task("digits", "small")
    steps = 1437 // (2 * task.batch_size)
    seen = torch.cat([task.batch(0, step, rank, 2).inputs for step in range(steps) for rank in range(2)])
    assert len(seen.flatten(1).unique(dim=0)) > 0.99 * len(seen)  # a few images of the set are twins


def test_more_digits_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="use fewer ranks or a smaller size"):
        make_task("digits").batch(0, 0, 0, 64)


def test_bits_per_byte_is_the_loss_in_bits() -> None:
    task = make_task("gpt", "small")
    found = task.evaluate(task.model(0))
    assert found.bits_per_byte == pytest.approx(8, rel=0.01)  # it knows nothing yet
    assert make_task("digits", "small").evaluate(make_task("digits", "small").model(0)).bits_per_byte is None


def test_the_text_is_the_librarys_own_modules_in_order() -> None:
    files = source_files(Path(sysconfig.get_path("stdlib")))
    assert files == sorted(files)
    assert {"argparse.py", "typing.py"} <= {file.name for file in files}
    assert not [file for file in files if "site-packages" in file.parts or file.name.startswith("_sysconfigdata")]


def test_a_library_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected the source files of Python's standard library"):
        source_files(tmp_path)


def test_the_medium_gpt_has_a_few_million_parameters() -> None:
    assert 1.5e6 < sum(p.numel() for p in make_task("gpt").model(0).parameters()) < 5e6
