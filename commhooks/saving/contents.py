"""A checkpoint's folder as a source of ranks' parts, and the comparison of what it holds with a run.

Every file is checked before it is unpickled, and all of them before anything is loaded.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from commhooks.devices import set_generator_states
from commhooks.errors import CheckpointError
from commhooks.saving.files import read_json, read_tensors, sums_of
from commhooks.saving.form import LAYOUT, Condition, Form, check_layout, faults_of
from commhooks.saving.misfits import other_optimizer, other_tensors
from commhooks.saving.parts import Part, joined, read_parts
from commhooks.saving.rules import LoadRules
from commhooks.saving.run import Run, of_own_models
from commhooks.saving.saved import Saved, listed

MANIFEST: Form = {"save": str, "files": {str: int}, "crc32": {str: str}, ...: Any}
_FILE: Form = {"layout": Condition(f"layout {LAYOUT}", lambda layout: layout == LAYOUT), "step": int, ...: Any}
SHARED: Form = {**_FILE, "world_size": int, "model": dict, "extra": dict}
OWN: Form = {**_FILE, "buffers": dict, "generators": dict}


class Folder:
    """A checkpoint's folder: what its manifest says, and its files, each read once its sums are right."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._manifest = read_json(path / "manifest.json")
            if isinstance(self._manifest, dict):
                check_layout(str(path), self._manifest)
            faults = listed(list(faults_of(self._manifest, MANIFEST)))
        except (OSError, ValueError) as error:
            faults = f"{type(error).__name__}: {error}"
        if faults != listed([]) or self._manifest["files"].keys() != self._manifest["crc32"].keys():
            raise CheckpointError(f"{path / 'manifest.json'} cannot be read, or has no CRC-32 of a file ({faults}).")

    def shared(self) -> Part:
        """Return the part that all ranks share."""
        return self._read("shared.pt", SHARED)

    def own(self, rank: int) -> Part:
        """Return a rank's own part."""
        return self._read(f"rank{rank}.pt", OWN)

    def _read(self, name: str, form: Form) -> dict[str, Any]:
        """Return a file's content after checking its size, checksums, form and save."""
        path, expected = self.path / name, self._manifest["files"].get(name)
        size, crc32 = sums_of(path)
        if size != expected:
            raise CheckpointError(
                f"{path} has {size} bytes, but the manifest says {expected}: it was cut or changed, or belongs to "
                "another save."
            )
        content = read_tensors(path)
        if faults := list(faults_of(content, form)):
            raise CheckpointError(f"{path} is damaged. {listed(faults)}")
        if content.get("save") != self._manifest["save"]:
            raise CheckpointError(
                f"{path} belongs to another save than manifest.json (step {content['step']}; save "
                f"{content.get('save')}, the manifest's is {self._manifest['save']}); put back the file that was saved "
                "with it."
            )
        if crc32 != (before := self._manifest["crc32"][name]):
            raise CheckpointError(
                f"{path} was changed after it was saved: its CRC-32 is {crc32}, but the manifest says {before}."
            )
        return content


@dataclasses.dataclass(frozen=True)
class Contents:
    """The parts of a checkpoint that one rank read."""

    shared: Part
    own: Part | None
    """This rank's own part; None if another number of ranks saved the checkpoint."""
    hooks: Saved | None
    of_former_self: Part | None = None
    """The part of the rank of this number among another number of ranks, if it was read: its optimizer and scaler
    continue."""

    def of(self, run: Run, name: str) -> Any:
        """Return the state of the model, the optimizer or the scaler: this rank's own if ranks have their own."""
        own = self.own or (self.of_former_self if name != "model" else None)
        return own[name] if own is not None and name in own and of_own_models(run.hooks) else self.shared.get(name)

    def misfits(self, run: Run, rules: LoadRules) -> list[str]:
        """List every mismatch between the checkpoint and the run."""
        found = list(other_tensors("model", self.of(run, "model"), run.model.state_dict()))
        wanted = [*run.beside, *(["hooks"] if run.hooks is not None else [])]
        found += [f"it was saved without {name}=" for name in wanted if name not in self.shared]
        if run.optimizer is not None and "optimizer" in self.shared:
            groups = self.of(run, "optimizer").get("param_groups", ())
            found += other_optimizer("optimizer", self.shared.get("optimizer_class"), groups, run.optimizer)
        if run.scaler is not None and "scaler" in self.shared:
            absent = run.scaler.state_dict().keys() - self.of(run, "scaler").keys()
            found += [f"scaler: checkpoint has no {name!r}" for name in sorted(absent)]
        if run.hooks is not None and self.hooks is not None:
            found += run.hooks.differences(self.hooks, rules)
        if self.own is not None:
            found += other_tensors("buffers", self.own["buffers"], run.buffers())
            torch.Generator().set_state(self.own["generators"]["cpu"])  # raises if this is not a generator's state
        return found

    def load_into(self, run: Run) -> None:
        """Load everything but the hook's state."""
        run.model.load_state_dict(self.of(run, "model"))
        for name, one in run.beside.items():
            one.load_state_dict(self.of(run, name))
        if self.own is None:
            return
        with torch.no_grad():
            for name, buffer in run.buffers().items():
                buffer.copy_(self.own["buffers"][name])
        torch.set_rng_state(self.own["generators"]["cpu"])
        set_generator_states(self.own["generators"])


def read_contents(path: Path, rank: int, world_size: int, rules: LoadRules) -> Contents:
    """Read the parts that one of `world_size` ranks needs; raise `CheckpointError` if any is damaged."""
    shared, parts = read_parts(Folder(path), rank, world_size, rules)
    hooks = None
    if "hooks" in shared:
        try:
            hooks = Saved.from_dict(joined(shared["hooks"], [part["hooks"] for part in parts.values()]))
        except (CheckpointError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{path}: {error}") from error
    same_size = shared["world_size"] == world_size
    former = parts.get(rank) if rules.world_size == "keep" and not same_size else None
    return Contents(shared, parts[rank] if same_size else None, hooks, former)
