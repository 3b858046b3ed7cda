"""Save and restore a whole run: model, optimiser, gradient scaler, and the hook's state of every rank.

A checkpoint is a folder, which all ranks must see under one path:

    <directory>/checkpoint-00007-step-30/
        manifest.json    step, world size, and the bytes of each file
        shared.pt        what is the same on every rank, written by rank 0
        rank0.pt ...     each rank's own: residuals, buffers, random number generators; written in parallel

It is written under another name, flushed to the disk, and renamed when it is whole: a run that is killed at any moment
leaves the checkpoints before it as they were. Every file loads by `torch.load(path)` at its defaults, which executes
nothing, and is compared with its checksums before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import re
import shutil
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from commhooks.checkpoints.disk import flush_to_disk, write_tensors, write_text
from commhooks.errors import CheckpointError
from commhooks.state.snapshot import LoadRules, Snapshot, refuse

FORMAT_VERSION = 1
_NAME = re.compile(r"checkpoint-(\d+)-step-(\d+)")
_WRITING, _REMOVING = ".writing-", ".removing-"
_PLAIN = (int, float, complex, str, bytes, bytearray, bool, type(None), torch.dtype, torch.device)
_SEQUENCES = (list, tuple, set, torch.Size)
_MAPPINGS = (dict, OrderedDict, Counter)
_IN_SHARED = {"step": int, "world_size": int, "model": dict, "extra": dict}
_IN_OWN = {"step": int, "buffers": dict, "generators": dict}

Value = TypeVar("Value")


class Saved(Protocol):
    """Anything with a `state_dict`: a `torch.optim.Optimizer`, `torch.amp.GradScaler`, learning-rate scheduler, ..."""

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...  # noqa: D102


class HookState(Protocol):
    """An `Attachment` or a `PowerSGDState`."""

    def snapshot(self) -> Snapshot: ...  # noqa: D102
    def differences(self, snapshot: Snapshot, rules: LoadRules) -> list[str]: ...  # noqa: D102
    def load_state_dict(  # noqa: D102
        self, state: Mapping[str, Any], *, world_size: str = ..., settings: str = ..., missing: str = ...
    ) -> None: ...


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` loaded, and from where."""

    path: Path
    step: int
    extra: dict[str, Any]


def save_checkpoint(
    directory: str | os.PathLike[str],
    *,
    step: int,
    model: Module,
    optimizer: Saved | None = None,
    scaler: Saved | None = None,
    hooks: HookState | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = 2,
    flush: bool = True,
) -> Path:
    """Write one checkpoint, and return its path; call it on every rank, between the same two steps.

    - `model` is the DistributedDataParallel; rank 0's parameters are saved, and every rank's buffers that are in its
      state_dict.
    - `optimizer` and `scaler` have the same state on every rank; rank 0's is saved.
    - `hooks` is what `attach` returned, or the hook's `PowerSGDState`.
    - `extra` is whatever else is to come back, in plain data: numbers, texts, tensors, lists and dictionaries.
    - `keep` is how many of the newest checkpoints stay in the directory (None: all).
    - `flush`: wait until everything is on the disk, so that the checkpoint survives the machine's sudden end too;
      without, it survives that of processes, and saving takes about half the time.

    Raises `CheckpointError` on every rank if any rank cannot write, with the file and the cause; what was written of
    this checkpoint is removed, and the other checkpoints stay as they were. If only an older checkpoint cannot be
    removed ("could not remove those before the checkpoint"), the new one is whole, and stays.
    """
    if keep is not None and keep < 1:
        raise CheckpointError(f"save_checkpoint(keep={keep!r}): keep must be at least 1, or None.")
    if type(step) is not int or step < 0:
        raise CheckpointError(f"save_checkpoint(step={step!r}): step must be an int of at least 0.")
    ranks, root = _Ranks(model), Path(directory)
    prepared: list[tuple[int, Any]]
    prepared = ranks.together("prepare", lambda: (step, _prepare(root, step) if ranks.rank == 0 else None))
    steps = [number for number, _ in prepared]
    names: tuple[str, str] = prepared[0][1]
    name, writing = names

    def write() -> dict[str, int]:
        snapshot = None if hooks is None else hooks.snapshot()
        files = {f"rank{ranks.rank}.pt": _own_part(model, snapshot, step)}
        if ranks.rank == 0:
            files["shared.pt"] = _shared_part(model, optimizer, scaler, snapshot, extra, step)
            files["shared.pt"]["world_size"] = ranks.world_size
        return {name: write_tensors(root / writing / name, content, flush=flush) for name, content in files.items()}

    def put_in_place() -> None:
        if ranks.rank == 0:
            _finish(root, writing, name, manifest, flush)

    def remove_old() -> None:
        if ranks.rank == 0:
            _remove_old(root, keep)

    with _removed_if_it_fails(root / writing, ranks):
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"save_checkpoint: ranks disagree about the step: by rank {', '.join(map(str, steps))}."
            )
        sizes = ranks.together("write", write)
        manifest = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "world_size": ranks.world_size,
            "files": {name: size for part in sizes for name, size in part.items()},
        }
        ranks.together("put in place", put_in_place)
    ranks.together("remove those before", remove_old)
    return root / name


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: Module,
    optimizer: Saved | None = None,
    scaler: Saved | None = None,
    hooks: HookState | None = None,
    world_size: str = "refuse",
    settings: str = "refuse",
    missing: str = "refuse",
) -> Checkpoint | None:
    """Go on from the newest checkpoint in a directory, or from the one at this path; return None if there is none.

    Call it on every rank, after the hook is attached, before or between steps. `world_size`, `settings` and `missing`
    say which differences are wanted, for the hook's state: see `LoadRules`. Loaded by as many ranks as saved it, every
    rank gets back its own buffers, and the state of torch's random number generators.

    Raises `CheckpointError` on every rank, and changes nothing, if the checkpoint is damaged or does not fit on any.
    """
    rules = LoadRules(world_size=world_size, settings=settings, missing=missing)
    ranks = _Ranks(model)
    path = ranks.together("find", lambda: _newest(Path(directory)) if ranks.rank == 0 else None)[0]
    if path is None:
        return None

    def read() -> _Contents:
        contents = _read(path, ranks.rank, ranks.world_size, rules)
        faults = contents.faults(model, optimizer, scaler, hooks, rules)
        if faults:
            raise refuse(f"{path} does not fit", faults)
        return contents

    contents = ranks.gather_failures("load", read)
    if hooks is not None and contents.hooks is not None:
        state = contents.hooks.as_dict()
        hooks.load_state_dict(state, world_size=world_size, settings=settings, missing=missing)
    contents.load_into(model, optimizer, scaler)
    return Checkpoint(path, contents.step, contents.extra)


class _Ranks:
    """The ranks of a model's process group: if something fails on one of them, it raises on all."""

    def __init__(self, model: Module) -> None:
        group: Any = getattr(model, "process_group", None)
        self._group = group if group is not None or not dist.is_initialized() else dist.group.WORLD
        self.rank = 0 if self._group is None else dist.get_rank(self._group)
        self.world_size = 1 if self._group is None else dist.get_world_size(self._group)

    def together(self, what: str, act: Callable[[], Value]) -> list[Any]:
        """Return what `act` returned on every rank, by rank; if it fails on any, raise `CheckpointError` on all."""
        done: tuple[Any, str | None]
        error: Exception | None = None
        try:
            done = act(), None
        except Exception as failure:
            error, done = failure, (None, f"{type(failure).__name__}: {failure}")
        told = [done]
        if self._group is not None:
            told = [done] * self.world_size
            dist.all_gather_object(told, done, group=self._group)
        failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text is not None]
        if failed:
            raise CheckpointError(f"could not {what} the checkpoint. " + " ".join(failed)) from error
        return [value for value, _ in told]

    def gather_failures(self, what: str, act: Callable[[], Value]) -> Value:
        """Return what `act` returned on this rank, without sending it; failures raise as in `together`."""
        kept: list[Value] = []
        self.together(what, lambda: kept.append(act()))
        return kept[0]


# --- writing ----------------------------------------------------------------------------------------------------------


def _prepare(root: Path, step: int) -> tuple[str, str]:
    """Return the new checkpoint's name, and the one under which it is written; clear away what a killed run left."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.iterdir():
        if left.name.startswith((_WRITING, _REMOVING)) and _NAME.fullmatch(left.name.partition("-")[2]):
            shutil.rmtree(left)
    numbers = [int(match[1]) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    name = f"checkpoint-{max(numbers, default=0) + 1:05d}-step-{step}"
    (root / (_WRITING + name)).mkdir()
    return name, _WRITING + name


@contextlib.contextmanager
def _removed_if_it_fails(writing: Path, ranks: _Ranks) -> Iterator[None]:
    """Remove what was written of a checkpoint that cannot be finished: the disk may be full because of it."""
    try:
        yield
    except CheckpointError:  # all ranks raise it, so none of them writes any more
        if ranks.rank == 0:
            shutil.rmtree(writing, ignore_errors=True)  # what is left the next save clears away
        raise


def _own_part(model: Module, snapshot: Snapshot | None, step: int) -> dict[str, Any]:
    generators = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators["cuda"] = torch.cuda.get_rng_state()
    part: dict[str, Any] = {"format_version": FORMAT_VERSION, "step": step, "generators": generators}
    part["buffers"] = _persistent_buffers(_inner(model))
    return part if snapshot is None else part | {"hooks": {"local": snapshot.as_dict()["local"]}}


def _persistent_buffers(module: Module) -> dict[str, Tensor]:
    """Return the buffers that the module calls its state: others may be caches, of any shape."""
    kept = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def _shared_part(
    model: Module,
    optimizer: Saved | None,
    scaler: Saved | None,
    snapshot: Snapshot | None,
    extra: Mapping[str, Any] | None,
    step: int,
) -> dict[str, Any]:
    part: dict[str, Any] = {"format_version": FORMAT_VERSION, "step": step, "model": _inner(model).state_dict()}
    for name, saved in (("optimizer", optimizer), ("scaler", scaler)):
        if saved is not None:
            part[name] = saved.state_dict()
    part["optimizer_class"] = type(optimizer).__name__
    if snapshot is not None:
        part["hooks"] = snapshot.as_dict() | {"local": {}}
    part["extra"] = dict(extra or {})
    _require_plain("", part)
    return part


def _require_plain(where: str, value: object) -> None:
    """Raise `CheckpointError` for what `torch.load` would refuse at its defaults: it would be too late then."""
    if type(value) in _MAPPINGS:
        for key, held in value.items():  # type: ignore[attr-defined]  # "object" has no attribute "items"
            _require_plain(f"a key of {where}", key)
            _require_plain(f"{where}[{key!r}]", held)
    elif type(value) in _SEQUENCES:
        for number, held in enumerate(value):  # type: ignore[arg-type]  # "object" is not Iterable
            _require_plain(f"{where}[{number}]", held)
    elif not _is_plain_tensor(value) and type(value) not in _PLAIN:  # numpy's float64 is a float, and is refused
        raise CheckpointError(
            f"{where} must be plain data, which torch.load takes at its defaults: tensors, numbers, texts, lists, "
            f"dictionaries (got {type(value).__module__}.{type(value).__qualname__})."
        )


def _is_plain_tensor(value: object) -> bool:
    safe = (Tensor, torch.nn.Parameter, *torch.serialization.get_safe_globals())
    return isinstance(value, Tensor) and type(value) in safe


def _finish(root: Path, writing: str, name: str, manifest: Mapping[str, Any], flush: bool) -> None:
    """Write the manifest and rename the checkpoint to its final name; with `flush`, flush before and after renaming."""
    write_text(root / writing / "manifest.json", json.dumps(manifest, indent=1), flush=flush)
    if flush:
        flush_to_disk(root / writing)
    (root / writing).rename(root / name)
    if flush:
        try:
            flush_to_disk(root)
        except OSError:  # nobody is to find what save_checkpoint says that it could not save
            (root / name).rename(root / writing)
            raise


def _remove_old(root: Path, keep: int | None) -> None:
    for old in _all_in(root)[:-keep] if keep is not None else ():
        removing = old.with_name(_REMOVING + old.name)
        old.rename(removing)  # at no moment is half a checkpoint there under its name
        shutil.rmtree(removing)


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Contents:
    """What was read from a checkpoint; none of it is loaded before all of it is known to fit."""

    shared: dict[str, Any]
    own: dict[str, Any] | None
    hooks: Snapshot | None

    @property
    def step(self) -> int:
        return int(self.shared["step"])

    @property
    def extra(self) -> dict[str, Any]:
        return dict(self.shared["extra"])

    def faults(
        self,
        model: Module,
        optimizer: Saved | None,
        scaler: Saved | None,
        hooks: HookState | None,
        rules: LoadRules,
    ) -> list[str]:
        """Name everything that does not fit."""
        found = _differing_tensors("model", self.shared["model"], _inner(model).state_dict())
        for name, wanted in (("optimizer", optimizer), ("scaler", scaler), ("hooks", hooks)):
            if wanted is not None and name not in self.shared:
                found.append(f"it was saved without {name}=")
        if optimizer is not None and "optimizer" in self.shared:
            found += _differing_optimizers(self.shared, optimizer)
        if scaler is not None and "scaler" in self.shared:
            absent = scaler.state_dict().keys() - self.shared["scaler"].keys()
            found += [f"scaler: checkpoint has no {name!r}" for name in sorted(absent)]
        if hooks is not None and self.hooks is not None:
            found += hooks.differences(self.hooks, rules)
        if self.own is not None:
            found += _differing_tensors("buffers", self.own["buffers"], _persistent_buffers(_inner(model)))
            torch.Generator().set_state(self.own["generators"]["cpu"])  # raises for what is none
        return found

    def load_into(self, model: Module, optimizer: Saved | None, scaler: Saved | None) -> None:
        """Load all but the hook's state."""
        inner = _inner(model)
        inner.load_state_dict(self.shared["model"])
        if optimizer is not None:
            optimizer.load_state_dict(self.shared["optimizer"])
        if scaler is not None:
            scaler.load_state_dict(self.shared["scaler"])
        if self.own is None:
            return
        with torch.no_grad():
            for name, buffer in _persistent_buffers(inner).items():
                buffer.copy_(self.own["buffers"][name])
        torch.set_rng_state(self.own["generators"]["cpu"])
        if "cuda" in self.own["generators"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.own["generators"]["cuda"])


def _newest(directory: Path) -> Path | None:
    if _NAME.fullmatch(directory.name) or any((directory / name).exists() for name in ("manifest.json", "shared.pt")):
        return directory  # whole or not: who names one does not want to start from nothing
    found = _all_in(directory) if directory.is_dir() else []
    return found[-1] if found else None


def _all_in(root: Path) -> list[Path]:
    numbered = {int(match[1]): path for path in root.iterdir() if (match := _NAME.fullmatch(path.name))}
    return [numbered[number] for number in sorted(numbered)]


def _read(path: Path, rank: int, world_size: int, rules: LoadRules) -> _Contents:
    manifest = _read_manifest(path)
    files = manifest["files"]
    shared = _read_file(path / "shared.pt", files, _IN_SHARED)
    saved_size = shared["world_size"]  # not the manifest's, which has no checksum
    same_size = saved_size == world_size
    wanted = range(rank, rank + 1) if same_size else range(saved_size if rules.spreads else 0)
    parts = {number: _read_file(path / f"rank{number}.pt", files, _IN_OWN) for number in wanted}
    for number, part in parts.items():
        if part["step"] != shared["step"]:
            raise CheckpointError(
                f"{path / f'rank{number}.pt'} is of step {part['step']}, and shared.pt of step {shared['step']}: they "
                "are of two checkpoints."
            )
    own = parts[rank] if same_size else None
    return _Contents(shared, own, _read_hooks(path, shared, parts) if "hooks" in shared else None)


def _read_hooks(path: Path, shared: Mapping[str, Any], parts: Mapping[int, Mapping[str, Any]]) -> Snapshot:
    try:
        local = [part.get("hooks", {}).get("local", {}) for part in parts.values()]
        together = {key: held for one in local for key, held in one.items()}
        return Snapshot.from_dict(shared["hooks"] | {"local": together})
    except (CheckpointError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        version = manifest["format_version"]
        complete = isinstance(manifest["files"], dict)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / 'manifest.json'} cannot be read ({type(error).__name__}: {error}).") from error
    if version != FORMAT_VERSION or not complete:
        raise CheckpointError(
            f"{path} was saved in format {version!r}; this version of commhooks reads format {FORMAT_VERSION}."
        )
    return dict(manifest)


def _read_file(path: Path, sizes: Mapping[str, int], wanted: Mapping[str, type]) -> dict[str, Any]:
    """Read one file, after a look at its size and checksums; it must hold entries of these types."""
    expected = sizes.get(path.name)
    try:
        size = path.stat().st_size
        if size != expected:
            raise CheckpointError(f"{path} has {size} bytes, and the manifest says {expected}: it was cut or changed.")
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged: the checksum of {damaged} is wrong.")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:  # its text says how to execute what is in the file
        raise CheckpointError(
            f"{path} holds something that torch.load refuses at its defaults: save_checkpoint has not written this."
        ) from error
    except Exception as error:  # whatever a damaged or hostile file makes of the reader
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}).") from error
    if not isinstance(content, dict) or content.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(f"{path} is no part of a checkpoint of format {FORMAT_VERSION}.")
    wrong = [name for name, kind in wanted.items() if not isinstance(content.get(name), kind)]
    if wrong:
        raise CheckpointError(f"{path} is damaged: it has no {', '.join(wrong)}, or of another type.")
    return content


def _differing_tensors(what: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = [f"{what}: checkpoint has no {name!r}" for name in now if name not in saved]
    found += [f"{what}: checkpoint has {name!r}, which the model has not" for name in saved if name not in now]
    for name, tensor in now.items():
        theirs, ours = (tuple(t.shape) if isinstance(t, Tensor) else None for t in (saved.get(name), tensor))
        if name in saved and theirs != ours:
            found.append(f"{what}: {name!r} was saved with shape {theirs}, now {ours}")
    return found


def _differing_optimizers(shared: Mapping[str, Any], optimizer: Saved) -> list[str]:
    theirs, ours = shared.get("optimizer_class"), type(optimizer).__name__
    if theirs != ours:
        return [f"optimizer: saved from {theirs}, now {ours}"]
    return _differing_groups(shared["optimizer"], optimizer.state_dict())


def _differing_groups(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Compare optimisers by what their groups of parameters say."""
    ours, theirs = _groups(now), _groups(saved)
    if len(ours) != len(theirs):
        return [f"optimizer: saved with {len(theirs)} groups of parameters, now {len(ours)}"]
    return [
        f"optimizer: group {number} was saved with {len(their['params'])} parameters and {_options(their)}, "
        f"now {len(our['params'])} and {_options(our)}"
        for number, (our, their) in enumerate(zip(ours, theirs, strict=True))
        if len(our["params"]) != len(their["params"]) or not _options(our) <= _options(their)
    ]


def _groups(state: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    groups: Sequence[Mapping[str, Any]] = state.get("param_groups", ())
    return groups


def _options(group: Mapping[str, Any]) -> set[str]:
    return group.keys() - {"params"}


def _inner(model: Module) -> Module:
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, Module) and hasattr(model, "register_comm_hook") else model
