"""A pytest plugin that gives a run the virtual device, and tests that are marked `gpu` a schedule.

`pytest -p tests.virtual_device.plugin --virtual-device=late,random:1 -m gpu` runs each such test once for each
schedule, in this process and in the ranks of `run_world`, and fails those during which there was a race.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.virtual_device import ranks
from tests.virtual_device.building import BuildError
from tests.virtual_device.device import begin, install, report

REQUIRED = "VIRTUAL_DEVICE_REQUIRED"
"""The variable with which a device that cannot be built is an error; without it, its tests are skipped."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--virtual-device", default="late", metavar="RUNS", help="schedules of tests marked gpu: late,random:SEED,eager"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Install the device before anything is collected, for `torch.cuda.is_available()` decides what is skipped."""
    try:
        install()
    except BuildError as error:
        if os.environ.get(REQUIRED):
            raise pytest.UsageError(str(error)) from error
        config.stash[_MISSING] = str(error).partition("\n")[0]
        return
    os.environ["WORLD_PRELOAD"] = ranks.__name__
    os.environ["COMMHOOKS_COMPILED"] = "off"  # a GPU has eager passes only, and is compared with them


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip everything where the device could not be built."""
    reason = config.stash.get(_MISSING, None)
    if reason is not None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests marked `gpu` once for each schedule."""
    if metafunc.definition.get_closest_marker("gpu"):
        runs = metafunc.config.getoption("--virtual-device").split(",")
        metafunc.parametrize("scheduled", runs, indirect=True)


@pytest.fixture(autouse=True)
def scheduled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Begin the run of a test marked `gpu`, here and in ranks; fail if there was a race."""
    run: str | None = getattr(request, "param", None)
    if run is None:
        yield
        return
    begin(*ranks.parse(run))
    with mock.patch.dict(os.environ, ranks.environment(run)):
        yield
    races = report().races
    begin("eager")
    assert not races, "races on the virtual device:\n" + "\n".join(races)


_MISSING = pytest.StashKey[str]()
