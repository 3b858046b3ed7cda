"""Starting ranks, which most of these tests only need."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from experiments import launch
from tests.experiments.forked_ranks import ForkingContext


@pytest.fixture(scope="module", autouse=True)
def ranks_are_forked() -> Iterator[None]:
    """Fork ranks instead of spawning them, which is 2 to 3 s of imports each. test_launch.py has those of users."""
    forking = SimpleNamespace(**vars(multiprocessing) | {"get_context": lambda _: ForkingContext()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "multiprocessing", forking)
        yield
