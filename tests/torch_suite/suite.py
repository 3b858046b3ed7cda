"""Find PyTorch's DDP tests, and run one of them in a rank."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.torch_suite import adapt, stand_ins

os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", "")
adapt.ask_for_no_gpu()

from torch.testing._internal import common_distributed, common_utils  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

BASE: type = distributed_test.DistributedTest._DistTestBase
OURS = ("ddp_core", "commhooks")  # they tell the two classes apart
CONSTRUCTS_DDP = re.compile(r"\b(DistributedDataParallel|DDP)\(")
CALLS_HELPER = re.compile(r"\bself\.(_\w+)\b")
SKIP_MESSAGES = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}


class Suite(distributed_test.TestDistBackend, BASE):  # type: ignore[misc]  # "subclass ... of type Any": PyTorch's tests are untyped
    """PyTorch's tests on one backend, as PyTorch assembles them."""


def ddp_tests() -> list[str]:
    """List the tests that wrap a model in DDP, themselves or through a helper method."""
    return [name for name in dir(BASE) if name.startswith("test") and _constructs_ddp(name, set())]


def _constructs_ddp(name: str, seen: set[str]) -> bool:
    seen.add(name)
    try:
        source = inspect.getsource(getattr(BASE, name))
    except (AttributeError, TypeError, OSError):
        return False
    if CONSTRUCTS_DDP.search(source):
        return True
    return any(_constructs_ddp(helper, seen) for helper in CALLS_HELPER.findall(source) if helper not in seen)


def put_in_place(ddp: type[nn.Module]) -> None:
    """Let every module but our own that holds PyTorch's DDP under some name hold `ddp` there."""
    theirs = torch.nn.parallel.DistributedDataParallel
    others = [module for name, module in sys.modules.items() if name.partition(".")[0] not in OURS]
    for module in others:
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is theirs:
                setattr(module, name, ddp)


def ddp_class(which: str) -> type[nn.Module]:
    """Return the class under test: "ours" or "torch"."""
    if which == "torch":
        return torch.nn.parallel.DistributedDataParallel
    import ddp_core

    return ddp_core.DistributedDataParallel


def run_test(rank: int, name: str, which: str, folder: str) -> tuple[str, str]:
    """Run one test in this rank; return "passed" or "skipped" and why. A failure is raised."""
    os.environ["RANK"] = str(rank)
    ddp = ddp_class(which)
    put_in_place(ddp)
    suite = Suite(name)
    suite.rank = rank
    suite.file_name = str(Path(folder, "init"))
    common_utils.set_rng_seed()
    suite._barrier()
    try:
        with stand_ins.provide(ddp), adapt.cuda_is_cpu(ddp):
            getattr(suite, name)()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as leaving:
        if leaving.code not in SKIP_MESSAGES:
            raise
        return "skipped", SKIP_MESSAGES[leaving.code]
    suite._barrier()
    return "passed", ""


@contextlib.contextmanager
def patient_temp_file() -> Iterator[str]:
    """Give every rank one temporary file, removed once every rank is done with it (the original does not wait)."""
    with original_temp_file() as name:
        yield name
        dist.barrier()


original_temp_file = distributed_test._rank_temp_file
distributed_test._rank_temp_file = patient_temp_file


def make_folders(folder: str) -> dict[str, str]:
    """Lay out the temporary folder that PyTorch's tests expect; return the environment that names it."""
    for part in ("barrier", "test_dir", "init_dir"):
        Path(folder, part).mkdir()
    return {"TEMP_DIR": folder, "INIT_METHOD": f"file://{folder}/init_dir/shared_init_file"}
