"""A hook's state goes through torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import commhooks
from commhooks import Compressor, Handle, PowerSGDState, make_compressor
from tests import bounds
from tests.commhooks import resuming
from tests.commhooks.models import wrap
from tests.commhooks.resuming import distance
from tests.commhooks.told import Told, told_by
from tests.commhooks.workers import largest
from tests.world import run_world

SavedBy = Callable[[str], Path]
SAVED_AT = (2, 5)
"""Before PowerSGD starts where `start_after` is 3, and after; the second is written while training goes on."""
LAST = 8
COMPRESSORS = {
    "powersgd": make_compressor("powersgd", rank=2),
    "powersgd from step 3": make_compressor("powersgd", rank=2, start_after=3),
    "alternating": make_compressor("powersgd", rank=2, alternating=True),
    "fp16 with error feedback": make_compressor("fp16", error_feedback=True),
    "all-reduce": make_compressor("all-reduce"),
    "whole bucket": make_compressor("powersgd", rank=2, matrices="whole-bucket"),
}
HOOK = "powerSGD_hook"
"""Not attached, but registered with a state of its own."""
ALL = [HOOK, *COMPRESSORS]
SOME = ("powersgd", "all-reduce")
LAID_OUT = [name for name in ALL if name != "whole bucket"]
"""Those whose state has its place in a fresh state_dict()."""


class Run(resuming.Run):
    """One rank's model, optimiser and hook, which DCP saves."""

    def parts(self) -> dict[str, Any]:
        """Return what is handed to DCP."""
        optimizer = get_optimizer_state_dict(self.ddp.module, self.optimizer)
        return {"model": self.ddp.module, "optimizer": optimizer, "hooks": self.hooks}

    def load(self, path: Path, how: str) -> None:
        parts = self.parts()
        if how == "load_distributed":
            commhooks.load_distributed(path, parts.pop("hooks"))
        load(parts, checkpoint_id=path)
        set_optimizer_state_dict(self.ddp.module, self.optimizer, parts["optimizer"])

    @property
    def memory(self) -> dict[str, Any]:
        hooks: dict[str, Any] = self.result()["hooks"]
        return hooks

    def end(self) -> None:
        if isinstance(self.hooks, Handle):
            self.hooks.close()


def begin(kind: str, what: str | Compressor, *, bias: bool = True) -> Run:
    torch.manual_seed(0)
    first = nn.Conv2d(1, 12, 3)
    last = nn.Linear(30, 10, bias)
    model = nn.Sequential(first, nn.Flatten(), nn.Linear(192, 24), nn.Tanh(), nn.Linear(24, 30), last)
    ddp = wrap(kind, model, bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    if what != HOOK:
        return Run(ddp, optimizer, commhooks.attach(ddp, COMPRESSORS[what] if isinstance(what, str) else what))
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    state.bind(ddp)
    ddp.register_comm_hook(state, commhooks.powerSGD_hook)  # type: ignore[operator]  # 'Tensor not callable'
    return Run(ddp, optimizer, state)


# --- the same run, in one piece and in two ----------------------------------------------------------------------------


def saved_in_passing(rank: int, kind: str, folder: str) -> None:
    """Run everything in one piece, with two checkpoints on the way; keep the results."""
    group = dist.new_group(backend="gloo")  # the second checkpoint's own: training has collectives at the same time
    for name in ALL:
        run, path = begin(kind, name), Path(folder, name)
        run.train(rank, 0, SAVED_AT[0])
        save(run.parts(), checkpoint_id=path / str(SAVED_AT[0]))
        run.train(rank, *SAVED_AT)
        torch.save(run.memory, path / f"memory.{rank}")
        parts = run.parts()
        # Of tensors on the CPU, PyTorch 2.6 writes what training has made of them by then. A hook's are copies.
        copied = copy.deepcopy({"model": parts["model"].state_dict(), "optimizer": parts["optimizer"]})
        writing = async_save(copied | {"hooks": run.hooks}, checkpoint_id=path / str(SAVED_AT[1]), process_group=group)
        run.train(rank, SAVED_AT[1], LAST)
        writing.result()  # type: ignore[union-attr]  # 'AsyncSaveResponse', for stagers that were not asked for
        torch.save(run.result(), path / f"whole.{rank}")
        run.end()


def resumed(rank: int, kind: str, folder: str, how: str, names: list[str]) -> None:
    """Resume from every checkpoint in new processes: each ends as the run in one piece."""
    for name in names:
        for step in SAVED_AT:
            run, path = begin(kind, name), Path(folder, name)
            run.load(path / str(step), how)
            run.train(rank, step, LAST)
            assert distance(run.result(), torch.load(path / f"whole.{rank}")) == 0, (name, step)
            run.end()


# --- what is refused --------------------------------------------------------------------------------------------------


def refused_directly(rank: int, attempts: list[tuple[str, str, bool]]) -> list[Told]:
    """Let DCP load checkpoints directly into runs that they do not match; nothing must change."""
    told = []
    for folder, name, bias in attempts:
        run = begin("core", name, bias=bias)
        before = run.memory
        told.append(told_by(functools.partial(_dcp_load, {"hooks": run.hooks}, Path(folder, str(SAVED_AT[1])))))
        assert distance(before, run.memory) == 0
        run.train(rank, 0, 2)
        run.end()
    return told


def _dcp_load(parts: dict[str, Any], path: Path) -> None:
    try:
        load(parts, checkpoint_id=path)
    except CheckpointException as error:  # a BaseException
        raise RuntimeError(str(error)) from error


class FailsOnOneRank(FileSystemReader):
    """Fail to read, on rank 1."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        if dist.get_rank() == 1:
            raise OSError("the disk is gone")
        return super().read_data(plan, planner)


UNREADABLE = {
    "key": "has no hook's state under the key 'hook'; it has hooks, model, optimizer.",
    "one rank": "OSError: the disk is gone",
    "nothing there": "nothing-there cannot be read (FileNotFoundError",
    "no checkpoint": "no-checkpoint cannot be read (FileNotFoundError",
    "no metadata at all": "no-metadata-at-all cannot be read (",
    "tensors cut": "tensors-cut cannot be read (",
}
"""By what cannot be read: what the error says of it, on every rank."""


def refused_by_us(rank: int, checkpoint: str, damaged: dict[str, str]) -> None:
    """Load what cannot be read; each time the run continues as if nothing had happened. Then load what can be."""
    run, untouched = begin("torch", "powersgd"), begin("torch", "powersgd")
    load_distributed = commhooks.load_distributed
    attempts: dict[str, Callable[[], None]] = {
        "key": lambda: load_distributed(checkpoint, run.hooks, key="hook"),
        "one rank": lambda: load_distributed(checkpoint, run.hooks, storage_reader=FailsOnOneRank(checkpoint)),
    } | {what: functools.partial(load_distributed, path, run.hooks) for what, path in damaged.items()}
    assert attempts.keys() == UNREADABLE.keys()
    for step, (what, attempt) in enumerate(attempts.items()):
        for one in (run, untouched):
            one.train(rank, step, step + 1)
        told = told_by(attempt)
        assert told.error == "CheckpointError" and UNREADABLE[what] in told.text, (what, told)
        assert distance(run.result(), untouched.result()) == 0, what
    load_distributed(checkpoint, run.hooks)
    assert distance(run.memory, torch.load(Path(checkpoint).parent / f"memory.{rank}")) == 0
    run.end()
    untouched.end()


def refused_before_the_first_step(rank: int, checkpoint: str) -> None:
    """Load into a hook's state that has no connection to the other ranks yet, and cannot be read on one; then train."""
    run = begin("torch", HOOK)
    read = functools.partial(commhooks.load_distributed, storage_reader=FailsOnOneRank(checkpoint))
    told = told_by(functools.partial(read, checkpoint, run.hooks))
    assert told.error == ("CheckpointError" if rank else "nothing")
    training = told_by(functools.partial(run.train, rank, 0, 1))
    assert "ranks disagree. loaded state, step: 2 (rank 0)" in training.text


# --- another number of ranks ------------------------------------------------------------------------------------------


def passed_on(rank: int, source: str | None, target: str) -> tuple[list[str], list[Tensor]]:
    """Load what another number of ranks saved, if anything; return the files read and the residuals, and save them."""
    run = begin("core", "powersgd")
    read: set[str] = set()
    if source is None:
        run.train(rank, 0, 4)
    else:
        reader = CountingReader(source)
        commhooks.load_distributed(source, run.hooks, key="app.hooks", storage_reader=reader, world_size="spread")
        assert isinstance(run.hooks, Handle) and run.hooks.steps == 4
        read = reader.read
    owed = [kept["residual"].clone() for kept in run.hooks.state_dict()["local"][f"rank{rank}"].values()]
    save({"app": {"hooks": run.hooks.state_dict()}}, checkpoint_id=target)
    run.train(rank, 4, 6)
    run.end()
    return sorted(read), owed


class CountingReader(FileSystemReader):
    """Note which ranks' own tensors are read."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.read: set[str] = set()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        names = [item.storage_index.fqn for item in plan.items]
        self.read |= {name.split(".")[3] for name in names if name.startswith("app.hooks.local.")}
        return super().read_data(plan, planner)


# --- everything -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> SavedBy:
    """Return a function from a kind of DDP to the folder that holds its checkpoints."""

    @functools.cache
    def save(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        run_world(saved_in_passing, 2, kind, str(folder))
        return folder

    return save


@pytest.mark.parametrize(("kind", "how"), [("core", "load_distributed"), ("torch", "dcp.load")])
def test_a_run_resumed_from_a_dcp_checkpoint_is_bit_for_bit_the_uninterrupted_one(
    saved_by: SavedBy, kind: str, how: str
) -> None:
    names = list(ALL if how == "load_distributed" else LAID_OUT)
    run_world(resumed, 2, kind, str(saved_by(kind)), how, names)


def test_every_rank_writes_its_own_residuals_and_nobody_elses(saved_by: SavedBy) -> None:
    for step in SAVED_AT:
        written = (
            FileSystemReader(saved_by("core") / "fp16 with error feedback" / str(step)).read_metadata().storage_data
        )
        files = {index.fqn: place.relative_path for index, place in written.items()}
        for rank in (0, 1):
            own = {name: file for name, file in files.items() if name.startswith(f"hooks.local.rank{rank}.")}
            assert len(own) == 8 and all(file.startswith(f"__{rank}_") for file in own.values()), own


def test_dcp_alone_refuses_another_number_of_ranks(saved_by: SavedBy) -> None:
    (of_both,) = run_world(refused_directly, 1, [(str(saved_by("core") / name), name, True) for name in SOME])
    for told in of_both:
        assert told.error == "CheckpointError"
        assert "saved by 2 ranks, loaded by 1; pass world_size='spread'" in told.text


def test_dcp_alone_refuses_to_leave_anything_behind(saved_by: SavedBy) -> None:
    attempts = [(str(saved_by("core") / "whole bucket"), "whole bucket", True)]
    attempts += [(str(saved_by("core") / "all-reduce"), "all-reduce", False)]  # a model without its last bias
    for bucketed, another_model in run_world(refused_directly, 2, attempts):
        assert bucketed.error == another_model.error == "CheckpointError"
        assert "the state was read without replicated.0.weight.Q of the bucket, " in bucketed.text
        assert bucketed.text.endswith("read it with commhooks.load_distributed.")
        assert "read without shapes.5.bias, which it held when it was saved" in another_model.text


def test_the_sum_of_residuals_is_kept_from_4_ranks_to_2_to_3(tmp_path: Path) -> None:
    paths = [str(tmp_path / str(ranks)) for ranks in (4, 2, 3)]
    by_rank: list[list[Tensor]] = []  # what every rank owes of each parameter
    for ranks, source, target in zip((4, 2, 3), [None, *paths], paths, strict=False):
        found = run_world(passed_on, ranks, source, target)
        by_rank.append([torch.stack(owed).double() for owed in zip(*[owed for _, owed in found], strict=True)])
        assert source is None or all(len(files) == {2: 4, 3: 2}[ranks] for files, _ in found)
    for later in by_rank[1:]:
        for before, now in zip(by_rank[0], later, strict=True):
            # Shares are computed in float64, and each is rounded once, to the residual's dtype; they pass on twice.
            rounding = 2 * bounds.unit_roundoff(torch.float32) * largest(before.abs().sum(0))
            assert largest(before.sum(0) - now.sum(0)) <= rounding < largest(before.sum(0))


def test_what_cannot_be_read_is_refused_on_every_rank_and_changes_nothing(saved_by: SavedBy, tmp_path: Path) -> None:
    checkpoint = saved_by("torch") / "powersgd" / str(SAVED_AT[1])
    damaged = damaged_copies(checkpoint, tmp_path)
    run_world(refused_by_us, 2, str(checkpoint), damaged)


def test_a_state_without_a_step_tells_of_a_failed_read_at_the_first_bucket(saved_by: SavedBy) -> None:
    checkpoint = str(saved_by("torch") / HOOK / str(SAVED_AT[0]))
    run_world(refused_before_the_first_step, 2, checkpoint)


def damaged_copies(checkpoint: Path, folder: Path) -> dict[str, str]:
    names = ("no checkpoint", "no metadata at all", "tensors cut")
    paths = {name: folder / name.replace(" ", "-") for name in ("nothing there", *names)}
    paths["no checkpoint"].mkdir()
    for name in names[1:]:
        shutil.copytree(checkpoint, paths[name])
    index, tensors = ".metadata", "__1_0.distcp"
    (paths["no metadata at all"] / index).write_bytes(b"something else")
    (paths["tensors cut"] / tensors).write_bytes((checkpoint / tensors).read_bytes()[:2000])
    return {name: str(path) for name, path in paths.items()}
