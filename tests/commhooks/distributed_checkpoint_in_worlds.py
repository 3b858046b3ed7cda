"""What the tests of `torch.distributed.checkpoint` run on every rank."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
from commhooks import Attachment, Compressor, PowerSGDState, make_compressor
from tests.cases import CASES
from tests.commhooks.models import wrap
from tests.commhooks.told import Told, told_by

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
LAID_OUT = [name for name in ALL if name != "whole bucket"]
"""Those whose state has its place in a fresh state_dict()."""


def network(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(1, 12, 3)
    return nn.Sequential(first, nn.Flatten(), nn.Linear(192, 24), nn.Tanh(), nn.Linear(24, 30), nn.Linear(30, 10, bias))


@dataclasses.dataclass
class Run:
    """One rank's model, optimiser and hook."""

    ddp: nn.Module
    optimizer: torch.optim.Optimizer
    hooks: Attachment | PowerSGDState

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            inputs = torch.randn(6, 1, 6, 6, generator=generator)
            targets = torch.randint(0, 10, (6,), generator=generator)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.ddp(inputs), targets).backward()
            self.optimizer.step()

    def parts(self) -> dict[str, Any]:
        """Return what is handed to DCP."""
        optimizer = get_optimizer_state_dict(self._module, self.optimizer)
        return {"model": self._module, "optimizer": optimizer, "hooks": self.hooks}

    def load(self, path: Path, how: str) -> None:
        parts = self.parts()
        if how == "load_distributed":
            commhooks.load_distributed(path, parts.pop("hooks"))
        load(parts, checkpoint_id=path)
        set_optimizer_state_dict(self._module, self.optimizer, parts["optimizer"])

    def result(self) -> dict[str, Any]:
        """Return everything that must be the same after a resume."""
        return {
            "model": self._module.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "hooks": memory_of(self.hooks),
        }

    def end(self) -> None:
        if isinstance(self.hooks, Attachment):
            self.hooks.detach()

    @property
    def _module(self) -> nn.Module:
        module = self.ddp.module
        assert isinstance(module, nn.Module)
        return module


def memory_of(hooks: Attachment | PowerSGDState) -> dict[str, Any]:
    state = hooks.state_dict()
    return {name: state[name] for name in ("step", "grad_scale", "replicated", "local")}


def begin(kind: str, what: str | Compressor, policy: str = "fifo", *, bias: bool = True) -> Run:
    ddp = wrap(kind, network(bias=bias), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    if what != HOOK:
        compressor = what if isinstance(what, Compressor) else COMPRESSORS[what]
        return Run(ddp, optimizer, commhooks.attach(ddp, compressor, policy=policy))
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    state.bind(ddp)
    ddp.register_comm_hook(state, commhooks.powerSGD_hook)  # type: ignore[operator]  # 'Tensor not callable'
    return Run(ddp, optimizer, state)


def distance(ours: Any, theirs: Any) -> float:
    """Return the largest difference of any two tensors or numbers; infinity where the structure differs."""
    if isinstance(ours, Mapping):
        if ours.keys() != theirs.keys():
            return float("inf")
        return max((distance(ours[key], theirs[key]) for key in ours), default=0.0)
    if isinstance(ours, Tensor):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return float("inf")
        return float((ours.double() - theirs.double()).abs().max()) if ours.numel() else 0.0
    return 0.0 if ours == theirs else float("inf")


# --- the same run, in one piece and in two ----------------------------------------------------------------------------


def saved_in_passing(rank: int, kind: str, folder: str) -> None:
    """Run everything in one piece, with two checkpoints on the way; keep the results."""
    group = dist.new_group(backend="gloo")  # the second checkpoint's own: training has collectives at the same time
    for name in ALL:
        run, path = begin(kind, name), Path(folder, name)
        run.train(0, SAVED_AT[0])
        save(run.parts(), checkpoint_id=path / str(SAVED_AT[0]))
        run.train(*SAVED_AT)
        torch.save(memory_of(run.hooks), path / f"memory.{rank}")
        writing = async_save(run.parts(), checkpoint_id=path / str(SAVED_AT[1]), process_group=group)
        run.train(SAVED_AT[1], LAST)
        writing.result()  # type: ignore[union-attr]  # 'AsyncSaveResponse', for stagers that were not asked for
        torch.save(run.result(), path / f"whole.{rank}")
        run.end()


def resumed(rank: int, kind: str, folder: str, how: str, names: list[str]) -> dict[str, float]:
    """Resume from every checkpoint in new processes; return how far the end is from that of the run in one piece."""
    distances = {}
    for name in names:
        for step in SAVED_AT:
            run, path = begin(kind, name), Path(folder, name)
            run.load(path / str(step), how)
            run.train(step, LAST)
            distances[f"{name}, from {step}"] = distance(run.result(), torch.load(path / f"whole.{rank}"))
            run.end()
    return distances


def read_from_the_other(rank: int, folders: dict[str, str]) -> dict[str, float]:
    """Load a checkpoint of the other DDP into each, and return how far the hook's state is from what was saved."""
    distances = {}
    for kind, folder in folders.items():
        run, path = begin(kind, "powersgd"), Path(folder, "powersgd")
        commhooks.load_distributed(path / str(SAVED_AT[1]), run.hooks)
        distances[kind] = distance(memory_of(run.hooks), torch.load(path / f"memory.{rank}"))
        run.train(SAVED_AT[1], LAST)
        run.end()
    return distances


# --- what is refused --------------------------------------------------------------------------------------------------


def refused_directly(rank: int, kind: str, attempts: list[tuple[str, str, bool]]) -> list[Told]:
    """Let DCP load checkpoints directly into runs that they do not match; nothing must change."""
    told = []
    for folder, name, bias in attempts:
        run = begin(kind, name, bias=bias)
        before = memory_of(run.hooks)
        told.append(told_by(functools.partial(_dcp_load, {"hooks": run.hooks}, Path(folder, str(SAVED_AT[1])))))
        assert distance(before, memory_of(run.hooks)) == 0
        run.train(0, 2)
        run.end()
    return told


def _dcp_load(parts: dict[str, Any], path: Path) -> None:
    try:
        load(parts, checkpoint_id=path)
    except CheckpointException as error:  # a BaseException
        raise RuntimeError(str(error)) from error


def waiting_residual(rank: int, kind: str, folder: str) -> tuple[Told, float]:
    """Save residuals that wait for a compressor that sends them; DCP alone has no place for them, we do."""
    run = begin(kind, "powersgd")
    run.train(0, 2)
    assert isinstance(run.hooks, Attachment)
    run.hooks.replace("fp16")
    save({"hooks": run.hooks}, checkpoint_id=folder)
    fresh = begin(kind, make_compressor("fp16"))
    told = told_by(lambda: load({"hooks": fresh.hooks}, checkpoint_id=folder))
    commhooks.load_distributed(folder, fresh.hooks)
    far = distance(memory_of(run.hooks), memory_of(fresh.hooks))
    run.end()
    fresh.end()
    return told, far


class FailsOnOneRank(FileSystemReader):
    """Fail to read, on rank 1."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        if dist.get_rank() == 1:
            raise OSError("the disk is gone")
        return super().read_data(plan, planner)


def refused_by_us(rank: int, kind: str, checkpoint: str, damaged: dict[str, str]) -> tuple[dict[str, Told], float]:
    """Load what cannot be read; each time the run continues as if nothing had happened. Then load what can be."""
    run, untouched = begin(kind, "powersgd"), begin(kind, "powersgd")
    load_distributed = commhooks.load_distributed
    attempts: dict[str, Callable[[], None]] = {
        "key": lambda: load_distributed(checkpoint, run.hooks, key="hook"),
        "one rank": lambda: load_distributed(checkpoint, run.hooks, storage_reader=FailsOnOneRank(checkpoint)),
    } | {what: functools.partial(load_distributed, path, run.hooks) for what, path in damaged.items()}
    told = {}
    for step, (what, attempt) in enumerate(attempts.items()):
        for one in (run, untouched):
            one.train(step, step + 1)
        told[what] = told_by(attempt)
        assert distance(run.result(), untouched.result()) == 0, what
    load_distributed(checkpoint, run.hooks)
    saved = torch.load(Path(checkpoint).parent / f"memory.{rank}")
    far = distance(memory_of(run.hooks), saved)
    run.end()
    untouched.end()
    return told, far


def refused_before_the_first_step(rank: int, kind: str, checkpoint: str) -> tuple[Told, Told]:
    """Load into a hook's state that has no line to the other ranks yet, and cannot be read on one; then train."""
    run = begin(kind, HOOK)
    read = functools.partial(commhooks.load_distributed, storage_reader=FailsOnOneRank(checkpoint))
    told = told_by(functools.partial(read, checkpoint, run.hooks))
    return told, told_by(functools.partial(run.train, 0, 1))


# --- another number of ranks ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class App:
    """The object that PyTorch's tutorials save: one for everything."""

    run: Run

    def state_dict(self) -> dict[str, Any]:
        return {"hooks": self.run.hooks.state_dict(), "note": "x"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("only saved here")


def passed_on(rank: int, kind: str, source: str | None, target: str) -> tuple[list[str], list[Tensor]]:
    """Load what another number of ranks saved, if anything; return the files read and the residuals, and save them."""
    run = begin(kind, "powersgd")
    reader = None if source is None else CountingReader(source)
    if source is not None:
        commhooks.load_distributed(source, run.hooks, key="app.hooks", storage_reader=reader, world_size="spread")
    owed = [kept["residual"].clone() for kept in run.hooks.state_dict()["local"][f"rank{rank}"].values()]
    if source is None:
        run.train(0, 4)
        owed = [kept["residual"].clone() for kept in run.hooks.state_dict()["local"][f"rank{rank}"].values()]
    else:
        assert isinstance(run.hooks, Attachment) and run.hooks.steps == 4
    save({"app": App(run)}, checkpoint_id=target)
    run.train(4, 6)
    run.end()
    return ([] if reader is None else sorted(reader.read)), owed


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


def every_case(rank: int, kind: str, policy: str, folder: str, resume: bool) -> dict[str, float]:
    """Run every compressor in one piece with a checkpoint at each step, or resume from each of these both ways."""
    distances = {}
    for case in CASES:
        if not case.exchanges:
            continue
        path = Path(folder, case.name)
        if not resume:
            run = begin(kind, case.make(), policy)
            for step in range(LAST):
                save(run.parts(), checkpoint_id=path / str(step))
                run.train(step, step + 1)
            torch.save(run.result(), path / f"whole.{rank}")
            run.end()
            continue
        by_parameter = not case.depends_on_buckets
        for how in ["load_distributed"] + ["dcp.load"] * by_parameter:
            # A DDP cuts its buckets up after its first step: whoever resumes there takes a second such step.
            for step in range(1 if by_parameter else 2, LAST):
                run = begin(kind, case.make(), policy)
                run.load(path / str(step), how)
                run.train(step, LAST)
                distances[f"{case.name} {how} {step}"] = distance(run.result(), torch.load(path / f"whole.{rank}"))
                run.end()
    return distances
