"""What the tests of damaged checkpoints run on every rank."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import errno
import functools
import hashlib
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks import CheckpointError, Compressor, PowerSGDState, make_compressor
from commhooks.checkpoints import files as checkpoint
from commhooks.checkpoints.contents import read_contents
from commhooks.checkpoints.folder import prepare
from tests.commhooks.models import wrap

FILES = ["manifest.json", "shared.pt", "rank0.pt", "rank1.pt"]
CUTS, FLIPS = 5, 15  # which bits does not matter: the whole file has one checksum


@dataclasses.dataclass
class Told:
    """What one rank was told about one damage, and what it did to the run."""

    damage: str
    text: str = ""
    """Of the error; empty where there was none."""
    changed: bool = False
    """Anything differs from what it was before."""
    restored: bool = False
    """All is as it was when the checkpoint was saved."""


class Network(nn.Module):
    """A model with buffers: some that a checkpoint holds, and a cache that it does not."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.last: nn.Module = nn.Linear(width, 4)
        self.register_buffer("cache", torch.zeros(width), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.last(self.drop(torch.relu(self.norm(self.first(inputs)))))
        return scores


class Renamed(Network):
    """Call the last layer something else."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.head = nn.Identity(), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(super().forward(inputs))
        return scores


class Run:
    """One rank's run."""

    def __init__(
        self,
        directory: Path,
        module: nn.Module | None = None,
        compressor: Compressor | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        scales: bool = True,
    ) -> None:
        self.directory = directory
        self.ddp = wrap("core", module or Network(), bucket_cap_mb=0.0002)
        settings = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        self.optimizer = optimizer(self.ddp.parameters(), lr=0.05, **settings)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scales)
        self.hooks = commhooks.attach(self.ddp, compressor or make_compressor("powersgd", rank=1), scaler=self.scaler)
        self.steps = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.scaler.scale(self.ddp(torch.randn(5, 6)).square().mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.steps += 1

    def save(self, **settings: Any) -> Path:
        return commhooks.save_checkpoint(**(self._parts() | {"step": self.steps} | settings))

    def load(self, **settings: Any) -> commhooks.Checkpoint | None:
        return commhooks.load_checkpoint(**(self._parts() | settings))

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.ddp, "optimizer": self.optimizer, "scaler": self.scaler, "hooks": self.hooks}
        return parts | {"directory": self.directory}

    def digest(self) -> str:
        """Tell in short all that a checkpoint restores."""
        hook_state = self.hooks.state_dict()
        parts = [self.ddp.module.state_dict(), self.optimizer.state_dict(), self.scaler.state_dict()]  # type: ignore[union-attr]  # 'Item "Tensor"'
        parts += [hook_state["replicated"], hook_state["local"], hook_state["step"], hook_state["grad_scale"]]
        return hashlib.sha256("\n".join(_words([*parts, torch.get_rng_state()])).encode()).hexdigest()

    def told(self, damage: str, saved: str = "", before: str = "", **settings: Any) -> Told:
        """Try to load, and return the outcome."""
        before, text = before or self.digest(), ""
        try:
            self.load(**settings)
        except CheckpointError as error:
            text = str(error)
        after = self.digest()
        return Told(damage, text, changed=after != before, restored=after == saved)


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {value.detach().tolist()}"
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield str(key)
            yield from _words(value[key])
    elif isinstance(value, (list, tuple)):
        for held in value:
            yield from _words(held)
    else:
        yield repr(value)


def begin(rank: int, folder: str, name: str = "run", **settings: Any) -> Run:
    torch.manual_seed(rank)
    run = Run(Path(folder) / name, **settings)
    run.train(3)
    return run


# --- damaged files ----------------------------------------------------------------------------------------------------


def cut_and_flipped(rank: int, folder: str) -> list[Told]:
    """Cut every file at many lengths, then flip bytes in it; load each time."""
    run = begin(rank, folder)
    path, saved = run.save(), run.digest()
    run.train(2)
    run.directory = Path(folder) / "later"
    later = run.save()
    run.directory, now, told = path, run.digest(), []
    contents = {name: (path / name).read_bytes() for name in FILES}
    dist.barrier()
    for name, whole in contents.items():
        for damage, content in _damages(name, whole):
            if rank == 0:  # the others read when rank 0 has found the checkpoint
                _replace(path / name, content)
            told.append(run.told(damage, saved, now))
            if not told[-1].text:
                run.load(directory=later)
        if rank == 0:
            (path / name).write_bytes(whole)
    told.append(run.told("none", saved))
    return told


def _damages(name: str, whole: bytes) -> Iterator[tuple[str, bytes | None]]:
    chance = random.Random(name)
    yield f"missing {name}", None
    for cut in range(CUTS):
        yield f"cut {name} at {cut}/{CUTS}", whole[: len(whole) * cut // CUTS]
    for _ in range(FLIPS):
        place, bits = chance.randrange(len(whole)), chance.randrange(1, 256)
        yield f"flip {name} at {place}", whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :]


def _replace(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


# --- forged files -----------------------------------------------------------------------------------------------------


class Payload:
    """Leave a file behind where a pickle of it is executed."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.mark}'",)


def forged(rank: int, folder: str) -> list[Told]:
    """Load checkpoints in which a file was rewritten, so that sizes and checksums are right."""
    run = begin(rank, folder)
    path = run.save()
    other = run.save(step=17)
    run.train(1)
    twin = run.save(step=3, keep=None)
    run.train(1)
    told = []
    for damage, name, forge in _forgeries(Path(folder) / "executed", other, twin):
        run.directory = Path(folder) / damage
        if rank == 0:
            shutil.copytree(path, run.directory)
            forge(run.directory / name)
            if name != "manifest.json":
                _write_true_sums(run.directory)
        told.append(run.told(damage))
    return told


def _write_true_sums(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    contents = {name: (path / name).read_bytes() for name in manifest["files"]}
    manifest["files"] = {name: len(content) for name, content in contents.items()}
    manifest["crc32"] = {name: f"{zlib.crc32(content):08x}" for name, content in contents.items()}
    (path / "manifest.json").write_text(json.dumps(manifest))


def _forgeries(mark: Path, other: Path, twin: Path) -> Iterator[tuple[str, str, Callable[[Path], Any]]]:
    yield "no JSON", "manifest.json", lambda path: path.write_text("step: 3")
    yield "no object", "manifest.json", lambda path: path.write_text("[1, 2]")
    yield "no text", "manifest.json", lambda path: path.write_bytes(b"\xff\xfe\x00")
    yield "version of the manifest", "manifest.json", _other_version
    yield "version of a file", "rank1.pt", lambda path: _rewrite(path, format_version=2)
    yield "version of the hook", "shared.pt", lambda path: _rewrite_hooks(path, format_version=4)
    yield "kind of the hook's entries", "shared.pt", lambda path: _rewrite_hooks(path, replicated=[1])
    yield "hooks no dictionary", "shared.pt", lambda path: _rewrite(path, hooks=[1])
    yield "model no dictionary", "shared.pt", lambda path: _rewrite(path, model=1)
    yield "generator no state", "rank1.pt", lambda path: _rewrite(path, generators={"cpu": torch.zeros(3)})
    yield "no generators", "rank0.pt", lambda path: _rewrite(path, generators=None)
    yield (
        "buffer of another shape",
        "rank1.pt",
        lambda path: _rewrite(path, buffers={"norm.running_mean": torch.ones(1)}),
    )
    yield "of another checkpoint", "rank1.pt", lambda path: shutil.copy(other / path.name, path)
    yield "of another save of the same step", "rank1.pt", lambda path: shutil.copy(twin / path.name, path)
    yield "shared.pt of another save of the same step", "shared.pt", lambda path: shutil.copy(twin / path.name, path)
    yield "payload in shared.pt", "shared.pt", lambda path: _rewrite(path, extra={"payload": Payload(mark)})
    yield "payload in rank1.pt", "rank1.pt", lambda path: _rewrite(path, buffers={"payload": Payload(mark)})
    yield "payload alone", "rank0.pt", lambda path: torch.save(Payload(mark), path)
    yield (
        "payload in the old format",
        "shared.pt",
        lambda path: torch.save(Payload(mark), path, _use_new_zipfile_serialization=False),
    )


def _other_version(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 2}))


def _rewrite(path: Path, **changes: Any) -> None:
    torch.save(torch.load(path) | changes, path)


def _rewrite_hooks(path: Path, **changes: Any) -> None:
    content = torch.load(path)
    torch.save(content | {"hooks": content["hooks"] | changes}, path)


def misfits(rank: int, folder: str) -> list[Told]:
    """Load a good checkpoint into runs that it does not fit, and one that lacks something into a run that wants it."""
    saved = begin(rank, folder)
    path = saved.save()
    runs: dict[str, dict[str, Any]] = {
        "names": {"module": Renamed()},
        "shapes": {"module": Network(width=10)},
        "settings": {"compressor": make_compressor("powersgd", rank=2, iterations=2)},
        "compressor": {"compressor": commhooks.AllReduceMean()},
        "optimizer": {"optimizer": torch.optim.Adagrad},
    }
    told = [begin(rank, folder, **settings).told(name, directory=path) for name, settings in runs.items()]
    without = begin(rank, folder, "without", optimizer=torch.optim.Adam, scales=False)
    without.save(hooks=None)
    told.append(without.told("hooks", directory=without.directory))
    similar = begin(rank, folder, optimizer=torch.optim.Adamax)  # has no setting that Adam has not
    told.append(similar.told("similar optimizer", directory=without.directory, hooks=None))
    scaled = begin(rank, folder, optimizer=torch.optim.Adam)
    told.append(scaled.told("scaler", directory=without.directory, hooks=None))
    if rank == 0:
        manifest = without.directory / "checkpoint-00001-step-3" / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"world_size": 2', '"world_size": 3'))
    told.append(without.told("world size", without.digest(), directory=without.directory, hooks=None))
    return told


def of_a_powersgd_state(rank: int, kind: str, folder: str) -> tuple[bool, str]:
    """Save a PowerSGDState; tell whether one like it took it up, and what one with another rank was told."""
    states, models = [PowerSGDState(None, r, start_powerSGD_iter=0) for r in (1, 1, 2)], []
    for state in states:
        models.append(wrap(kind, Network(), bucket_cap_mb=0.0002))
        models[-1].register_comm_hook(state, commhooks.powerSGD_hook)  # type: ignore[operator]  # '"Tensor" not callable'
        state.bind(models[-1])
        models[-1](torch.randn(5, 6)).square().mean().backward()
    models[0](torch.randn(5, 6)).square().mean().backward()
    commhooks.save_checkpoint(folder, step=2, model=models[0], hooks=states[0])
    commhooks.load_checkpoint(folder, model=models[1], hooks=states[1])
    text = _text_of(functools.partial(commhooks.load_checkpoint, folder, model=models[2], hooks=states[2]))
    dicts = [state.state_dict() for state in states[:2]]
    saved, loaded = ([list(_words(one[part])) for part in ("step", "replicated", "local")] for one in dicts)
    return loaded == saved, text


# --- saving -----------------------------------------------------------------------------------------------------------


def cannot_write(rank: int, folder: str) -> list[tuple[str, str, list[str]]]:
    """Fail to save in several ways: what, the error, and what is in the directory then. Then load, and save again."""
    run = begin(rank, folder)
    run.save()
    saved = run.digest()
    run.train(1)
    told = []
    for name, obstacle in _obstacles(rank).items():
        with obstacle:
            told.append((name, _text_of(run.save), _listing(run)))
    told.append(("under a file", _text_of(lambda: run.save(directory=__file__)), _listing(run)))
    told.append(("steps that differ", _text_of(lambda: run.save(step=5 + rank)), _listing(run)))
    told.append(("loading", _text_of(run.load), ["restored" if run.digest() == saved else "differs"]))
    told.append(("saving", _text_of(lambda: run.save(step=9)), _listing(run)))
    return told


def _obstacles(rank: int) -> dict[str, Any]:
    full = OSError(errno.ENOSPC, "No space left on device")
    nowhere = contextlib.nullcontext()
    return {
        "disk full on rank 1": mock.patch.object(torch, "save", side_effect=full) if rank == 1 else nowhere,
        "a folder in the way on rank 1": mock.patch.object(checkpoint, "prepare", _prepare_with_a_folder),
        "disk full at the manifest": mock.patch.object(Path, "write_text", side_effect=full) if rank == 0 else nowhere,
    }


def _prepare_with_a_folder(root: Path, step: int) -> tuple[str, str]:
    name, writing = prepare(root, step)
    (root / writing / "rank1.pt").mkdir()
    return name, writing


def _text_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except CheckpointError as error:
        return str(error)
    return ""


def _listing(run: Run) -> list[str]:
    dist.barrier()
    names = sorted(path.name for path in run.directory.iterdir())
    dist.barrier()
    return names


def kept(rank: int, folder: str) -> dict[str, list[str]]:
    """Save again and again; return what is there by `keep`."""
    found = {}
    for keep in (1, 2, None):
        run = begin(rank, folder, f"keep-{keep}")
        for step in range(4):
            run.save(step=10 * step, keep=keep)
        found[str(keep)] = _listing(run)
    return found


class Fruit(enum.IntEnum):
    APPLE = 1


class Marked(Tensor):
    """A tensor subclass."""


Point = collections.namedtuple("Point", ["x", "y"])
REFUSED: dict[str, Any] = {
    "loss": np.float64(0.5), "name": np.str_("a"), "fruit": Fruit.APPLE, "point": Point(1, 2), "path": Path("/tmp"),
    "counts": collections.defaultdict(int), "function": print, "nested": [{"deep": {np.int64(1): 2}}],
    "tensor": torch.ones(1).as_subclass(Marked), "frozen": frozenset([1]),
}  # fmt: skip
TAKEN: dict[Any, Any] = {
    "numbers": [1, 2.5, 1 + 2j, True, None], "texts": ("a", b"b", bytearray(b"c")), "set": {1, 2}, 3: torch.float16,
    "shape": torch.Size([2, 3]), "device": torch.device("cpu"), "counts": collections.Counter("aab"),
    "tensors": {"a": torch.arange(3), "b": nn.Parameter(torch.ones(2))}, "order": collections.OrderedDict(a=1),
}  # fmt: skip


def extras(rank: int, folder: str) -> tuple[dict[str, str], list[str], bool]:
    """Hand in extras that cannot be loaded again, and some that can: errors, the directory then, whether they came."""
    run = begin(rank, folder)
    texts = {name: _text_of(functools.partial(run.save, extra={name: value})) for name, value in REFUSED.items()}
    listing = _listing(run)
    run.save(extra=TAKEN)
    loaded = run.load()
    return texts, listing, loaded is not None and list(_words(loaded.extra)) == list(_words(TAKEN))


def leftovers(rank: int, folder: str) -> list[Any]:
    """Load from folders in which there is no whole checkpoint, or another one for each rank."""
    run = begin(rank, folder)
    path = run.save()
    empty, killed = Path(folder) / "empty", Path(folder) / "killed"
    if rank == 0:
        empty.mkdir()
        shutil.copytree(path, killed / f".writing-{path.name}")
        shutil.copytree(path, killed / f".removing-{path.name}")
    dist.barrier()
    before = run.digest()
    loaded: list[Any] = [run.load(directory=place) for place in (empty, killed, Path(folder) / "nowhere")]
    twin = run.save(keep=None)
    seen = path if rank == 0 else twin  # as on hosts that each have a disk of their own under this path
    with mock.patch.object(checkpoint, "read_contents", lambda _, *given: read_contents(seen, *given)):
        text = _text_of(functools.partial(run.load, directory=path))
    return [*loaded, run.digest() == before, text]
