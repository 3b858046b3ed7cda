"""A task of one's own: what a function may return, and that a mistake is an error in words."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from commhooks.experiments.tasks import load_task

ROOT = Path(__file__).parent.parent.parent
HEAD = """
import random
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from commhooks.experiments import Task

model = nn.Linear(4, 2)
data = TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))

def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

def adam(model):
    return torch.optim.Adam(model.parameters())

class Endless(IterableDataset):
    def __iter__(self): ...

class Broken(TensorDataset):
    def __init__(self, inner):
        super().__init__(*inner.tensors)
    def __getitem__(self, place):
        return {}["pixels"]

class Unmeasured(Dataset):
    def __getitem__(self, place): ...

class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)
    def forward(self, x):
        return self.used(x)

"""
A_TASK = "Task(model=model, data=data, loss=loss, "


@pytest.fixture(autouse=True)
def search_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    known = set(sys.modules)
    yield
    for name in sys.modules.keys() - known:
        if name.startswith(("commhooks_file_", "neighbour", "mine")):
            del sys.modules[name]


def write(folder: Path, body: str, name: str = "mine.py") -> str:
    """Write a file with a function `task`, and return the task's name."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(HEAD + body, encoding="utf-8")
    return f"{folder / name}:task"


def returning(expression: str) -> str:
    return f"def task():\n    return {expression}\n"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("model, data", r"expected a Task, or a tuple \(model, data, loss\) to be returned \(got a tuple of 2\)"),
        ("len, data, loss", "model must be a torch.nn.Module"),
        ("nn.LazyLinear(2), data, loss", "'weight' has no shape yet; pass one batch"),
        ("nn.Linear(2, 2, device='meta'), data, loss", "is on meta; return the model on the CPU"),
        ("model, DataLoader(data), loss", "is a DataLoader; return its dataset"),
        ("model, Endless(), loss", "is an IterableDataset, which cannot be divided"),
        ("model, Unmeasured(), loss", "define __len__ in Unmeasured"),
        ("model, data.tensors, loss", r"return torch.utils.data.TensorDataset\(\*tensors\)"),
        ("model, TensorDataset(torch.zeros(9)), loss", "data has 9 examples; expected at least 10"),
        (f"{A_TASK}held_out=data.tensors)", "held_out is a tuple of tensors"),
        (f"{A_TASK}batch_size=0)", "batch_size must be a whole number of at least 1"),
        (f"{A_TASK}optimizer=adam(model))", "optimizer must be a function .got Adam."),
        ("model, data, nn.CrossEntropyLoss()", r"loss is called as loss\(model, batch\), which CrossEntropyLoss"),
        ("model, data, undefined", r"its function failed: NameError: .*mine.py, line \d+\)"),
        ("model, data, lambda outputs, targets: F.cross_entropy(outputs, targets)", "a list of .32, 4. float32.*int64"),
        ("model, data, lambda model, batch: model(batch[0])", r"a scalar tensor.*\(got a tensor of shape \(32, 2\)\)"),
        ("model, data, lambda model, batch: loss(model, batch).detach()", "has no gradient"),
        (f"{A_TASK}evaluate=lambda m: 0.5)", "dict of numbers with 'loss' .got float."),
        (f"{A_TASK}evaluate=lambda m: 1 / 0)", "its evaluation failed: ZeroDivision"),
        (f"{A_TASK}optimizer=lambda m: m)", "must return a torch.optim.Optimizer"),
        (f"{A_TASK}schedule=lambda step: 1)", "its optimizer or schedule failed: Type"),
        (f"{A_TASK}batch_size=37)", "a step of 1 × 37 examples is more than the 36 there are"),
        ("model, Broken(data), loss", "its first batch failed: KeyError: 'pixels' .*mine.py, line"),
        ("Half(), data, loss", "does not depend on 2 of the model's parameters .unused.weight, unused.bias."),
        ("model, [torch.zeros(n) for n in range(40)], loss", "cannot be made into a batch .*a Task with `collate`"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value)[:40],
)
def test_what_cannot_be_a_task_is_refused_when_it_is_loaded_or_checked(
    expression: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_task(write(tmp_path, returning(expression))).check(1)


@pytest.mark.parametrize(
    "body",
    [
        returning("model, data, loss"),
        returning(f"{A_TASK}held_out=data, optimizer=adam)"),
        returning("model, list(data), loss"),
        returning("model, [{'x': x, 'y': y} for x, y in data], lambda m, b: F.cross_entropy(m(b['x']), b['y'])"),
        returning("model, lambda seed, step, rank, ranks: (torch.randn(3, 4), torch.zeros(3).long()), loss"),
        returning("nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)), data, loss"),
        "def task(width: int = 4):\n"
        "    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4), nn.Linear(4, 2))\n"
        "    model[1].weight = model[0].weight\n"
        "    return model, data, loss\n",
    ],
    ids=["a tuple", "a Task", "a list", "dicts", "a function", "batch norm and dropout", "tied weights"],
)  # fmt: skip
def test_what_works_trains(body: str, tmp_path: Path) -> None:
    task = load_task(write(tmp_path, body))
    task.check(1)
    assert task.evaluate()["loss"] > 0
    assert task.optimizer().param_groups
    assert task.model.training


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from . import other", "relative import.*import its neighbours by name"),
        ("import not_there", r"ModuleNotFoundError: No module named 'not_there' \(.*mine.py, line 1\)"),
        ("x = 1\ny = x / 0", r"ZeroDivisionError: division by zero \(.*mine.py, line 2\)"),
        ("raise SystemExit(3)", r"ended the program \(exit code 3\); put what a script runs under"),
        ("def task(width): ...", "needs width; write '.*mine.py:task:width=...'"),
        ("def task(x, /): ...", "must accept its arguments by name"),
    ],
)
def test_a_file_that_cannot_be_used_says_why_and_where(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_task(f"{tmp_path / 'mine.py'}:task")


def test_a_seed_decides_about_every_generator_and_leaves_them_as_they_were(tmp_path: Path) -> None:
    body = (
        "class Noisy(TensorDataset):\n"
        "    def __getitem__(self, place):\n"
        "        x, y = super().__getitem__(place)\n"
        "        return x + torch.rand(4) + random.random() + np.random.rand(), y\n"
        "def task():\n"
        "    kept = [*random.sample(range(40), 10), *np.random.permutation(40)[:10].tolist()]\n"
        "    noisy = Noisy(*(part[kept] for part in data.tensors))\n"
        "    return Task(model=nn.Linear(4, 2), data=noisy, loss=loss, batch_size=4)\n"
    )
    name = write(tmp_path, body)
    torch.manual_seed(9)
    expected = torch.rand(1)
    torch.manual_seed(9)
    tasks = [load_task(name, seed) for seed in (1, 1, 2)]
    found = [[*task.model.parameters(), task.batch(0, 0, 1)[0]] for task in tasks]
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(*pair) for pair in zip(found[0], found[1], strict=True))
    assert not any(torch.equal(*pair) for pair in zip(found[0], found[2], strict=True))
    prints = [task.fingerprint(1) for task in tasks]
    assert prints[0] == prints[1] != prints[2]  # ranks that would train on other data can be told apart


def test_the_example_in_the_documentation_learns() -> None:
    path = ROOT / "docs/examples/own_task.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 25
    task = load_task(f"{path}:task:width=32")
    task.check(2)
    optimizer, before = task.optimizer(), task.evaluate()["loss"]
    for step in range(60):
        task.loss(task.model, task.batch(step, 0, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert task.evaluate()["loss"] < 0.8 * before
    assert task.source
