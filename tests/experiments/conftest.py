"""Starting ranks, which most of these tests only need."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from matplotlib.figure import Figure

from commhooks.experiments import launch
from tests.experiments.forked_ranks import forking

# What ranks of these tests would each import for themselves: half a second for the digits alone.
os.environ["WORLD_PRELOAD"] = (
    f"{os.environ.get('WORLD_PRELOAD', '')} sklearn.datasets " + "commhooks.experiments.training.worker"
)


@pytest.fixture(scope="module", autouse=True)
def ranks_are_forked() -> Iterator[None]:
    """Fork ranks instead of spawning them, which is 2 to 3 s of imports each. test_launch.py has those of users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "multiprocessing", forking())
        yield


@pytest.fixture
def pictures_are_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes nine tenths of a report's time; test_report.py looks at the pictures."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: file.write(b"no picture"))
