"""Reading a checkpoint: every file is checked before it is unpickled, and all of them before anything is loaded."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from commhooks.checkpoints.disk import crc32_of, read_json, read_tensors
from commhooks.checkpoints.run import Run, Saved, of_own_models, optimizer_class
from commhooks.devices import set_generator_states
from commhooks.errors import CheckpointError
from commhooks.state.formats import LAYOUT, refuse_other_layouts
from commhooks.state.groups import Snapshots, joined
from commhooks.state.snapshot import LoadRules, Snapshot

_IN_SHARED = {"step": int, "world_size": int, "model": dict, "extra": dict}
_IN_OWN = {"step": int, "buffers": dict, "generators": dict}


@dataclasses.dataclass(frozen=True)
class Contents:
    """The parts of a checkpoint that one rank read."""

    shared: dict[str, Any]
    own: dict[str, Any] | None
    """This rank's own part; None if another number of ranks saved the checkpoint."""
    hooks: Snapshot | Snapshots | None
    of_former_self: dict[str, Any] | None = None
    """The part of the rank of this number among another number of ranks, if it was read: its optimizer and scaler
    continue."""

    def of(self, run: Run, name: str) -> Any:
        """Return the state of the model, the optimizer or the scaler: this rank's own if ranks have their own."""
        own = self.own or (self.of_former_self if name != "model" else None)
        return own[name] if own is not None and name in own and of_own_models(run.hooks) else self.shared.get(name)

    def faults(self, run: Run, rules: LoadRules) -> list[str]:
        """List every mismatch between the checkpoint and the run."""
        found = _differing_tensors("model", self.of(run, "model"), run.model.state_dict())
        for name, wanted in (("optimizer", run.optimizer), ("scaler", run.scaler), ("hooks", run.hooks)):
            if wanted is not None and name not in self.shared:
                found.append(f"it was saved without {name}=")
        if run.optimizer is not None and "optimizer" in self.shared:
            found += _differing_optimizers(self.shared | {"optimizer": self.of(run, "optimizer")}, run.optimizer)
        if run.scaler is not None and "scaler" in self.shared:
            absent = run.scaler.state_dict().keys() - self.of(run, "scaler").keys()
            found += [f"scaler: checkpoint has no {name!r}" for name in sorted(absent)]
        if run.hooks is not None and self.hooks is not None:
            found += run.hooks.differences(self.hooks, rules)
        if self.own is not None:
            found += _differing_tensors("buffers", self.own["buffers"], run.buffers())
            torch.Generator().set_state(self.own["generators"]["cpu"])  # raises if this is not a generator's state
        return found

    def load_into(self, run: Run) -> None:
        """Load everything but the hook's state."""
        run.model.load_state_dict(self.of(run, "model"))
        if run.optimizer is not None:
            run.optimizer.load_state_dict(self.of(run, "optimizer"))
        if run.scaler is not None:
            run.scaler.load_state_dict(self.of(run, "scaler"))
        if self.own is None:
            return
        with torch.no_grad():
            for name, buffer in run.buffers().items():
                buffer.copy_(self.own["buffers"][name])
        torch.set_rng_state(self.own["generators"]["cpu"])
        set_generator_states(self.own["generators"])


def read_contents(path: Path, rank: int, world_size: int, rules: LoadRules) -> Contents:
    """Read the parts that one of `world_size` ranks needs; raise `CheckpointError` if any is damaged."""
    manifest = _read_manifest(path)
    shared = _read_file(path / "shared.pt", manifest, _IN_SHARED)
    saved_size = shared["world_size"]  # not the manifest's, which has no checksum
    same_size = saved_size == world_size
    wanted = rules.ranks_to_read(rank, saved_size, world_size)
    parts = {number: _read_file(path / f"rank{number}.pt", manifest, _IN_OWN) for number in wanted}
    for number, part in parts.items():
        if part["step"] != shared["step"]:
            raise CheckpointError(
                f"{path / f'rank{number}.pt'} is of step {part['step']}, shared.pt of step {shared['step']}: they "
                "belong to two different checkpoints."
            )
    hooks = None
    if "hooks" in shared:
        try:
            hooks = joined(shared["hooks"], [part.get("hooks", {}) for part in parts.values()])
        except (CheckpointError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{path}: {error}") from error
    former = parts.get(rank) if rules.world_size == "keep" and not same_size else None
    return Contents(shared, parts[rank] if same_size else None, hooks, former)


@dataclasses.dataclass(frozen=True)
class _Manifest:
    """The expected sizes and CRC-32 of a checkpoint's files, and its name."""

    sizes: dict[str, int]
    save: str
    crc32: dict[str, str]


def _read_manifest(path: Path) -> _Manifest:
    try:
        manifest = read_json(path / "manifest.json")
        refuse_other_layouts(str(path), manifest)
        files, save, crc32 = manifest["files"], manifest["save"], manifest["crc32"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / 'manifest.json'} cannot be read ({type(error).__name__}: {error}).") from error
    if not isinstance(files, dict) or not isinstance(crc32, dict) or files.keys() != crc32.keys():
        raise CheckpointError(f"{path / 'manifest.json'} is damaged: it must give the CRC-32 of each file.")
    return _Manifest(files, save, crc32)


def _read_file(path: Path, manifest: _Manifest, wanted: Mapping[str, type]) -> dict[str, Any]:
    """Read one file after checking its size and checksums; it must hold entries of the given types."""
    expected = manifest.sizes.get(path.name)
    try:
        size, crc32 = path.stat().st_size, crc32_of(path)
        if size != expected:
            raise CheckpointError(
                f"{path} has {size} bytes, but the manifest says {expected}: it was cut or changed, or belongs to "
                "another save."
            )
        content = read_tensors(path)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:  # PyTorch's message would tell the user how to execute the file's content
        raise CheckpointError(
            f"{path} was not written by save_checkpoint: torch.load rejects it with its default arguments."
        ) from error
    except Exception as error:  # whatever a damaged or hostile file causes
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}).") from error
    if not isinstance(content, dict) or content.get("layout") != LAYOUT:
        raise CheckpointError(f"{path} is not part of a checkpoint of layout {LAYOUT}.")
    wrong = [name for name, kind in wanted.items() if not isinstance(content.get(name), kind)]
    if wrong:
        raise CheckpointError(f"{path} is damaged: missing or of the wrong type: {', '.join(wrong)}.")
    _check_save(path, content, crc32, manifest)
    return content


def _check_save(path: Path, content: Mapping[str, Any], crc32: str, manifest: _Manifest) -> None:
    """Raise `CheckpointError` for a file that another save wrote, or that was written again since."""
    if content.get("save") != manifest.save:
        raise CheckpointError(
            f"{path} belongs to another save than manifest.json (step {content['step']}; save {content.get('save')}, "
            f"the manifest's is {manifest.save}); put back the file that was saved with it."
        )
    if crc32 != manifest.crc32[path.name]:
        raise CheckpointError(
            f"{path} was changed after it was saved: its CRC-32 is {crc32}, but the manifest says "
            f"{manifest.crc32[path.name]}."
        )


def _differing_tensors(what: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = [f"{what}: checkpoint has no {name!r}" for name in now if name not in saved]
    found += [f"{what}: checkpoint has {name!r}, which the model does not have" for name in saved if name not in now]
    for name, tensor in now.items():
        theirs, ours = (tuple(t.shape) if isinstance(t, Tensor) else None for t in (saved.get(name), tensor))
        if name in saved and theirs != ours:
            found.append(f"{what}: {name!r} was saved with shape {theirs}, now {ours}")
    return found


def _differing_optimizers(shared: Mapping[str, Any], optimizer: Saved) -> list[str]:
    """Compare the optimizers' classes, then their parameter groups, whose options must all have been saved."""
    theirs, ours = shared.get("optimizer_class"), optimizer_class(optimizer)
    if theirs != ours:
        return [f"optimizer: saved from {theirs}, now {ours}"]
    saved, now = shared["optimizer"].get("param_groups", ()), getattr(optimizer, "param_groups", None)
    if now is None:  # not tried first: a ZeroRedundancyOptimizer's state_dict raises if nothing was consolidated
        now = optimizer.state_dict().get("param_groups", ())
    if len(saved) != len(now):
        return [f"optimizer: saved with {len(saved)} groups of parameters, now {len(now)}"]
    found = []
    for number, (then, here) in enumerate(zip(saved, now, strict=True)):
        before, after = (group.keys() - {"params"} for group in (then, here))
        if len(then["params"]) != len(here["params"]) or not after <= before:
            found.append(
                f"optimizer: group {number} was saved with {len(then['params'])} parameters and the options "
                f"{', '.join(sorted(before))}, now {len(here['params'])} and {', '.join(sorted(after))}"
            )
    return found
