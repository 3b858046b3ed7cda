"""The FSDP modules that get a compressor, those that stay with FSDP2, and the ranks that they are sharded over.

Experts are often sharded over fewer ranks than the rest of a model: with expert parallelism each rank has some of them,
and only the ranks that have the same ones average. Such groups are parts of the largest one, over which everything is
agreed.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from commhooks.errors import SettingsError
from commhooks.sharded.fsdp import Unit
from commhooks.units import bytes_in_words, counted

Patterns = str | Sequence[str]
"""Shell patterns for names of modules, such as "layers.*.experts"; one may stand alone."""


class NotCompressed(NamedTuple):
    """A module, or one of its groups of parameters, whose gradients FSDP2 reduces itself."""

    gradient_bytes: int
    """The size of its whole gradients, in the dtype of their reduction."""
    why: str

    def __str__(self) -> str:
        return f"{bytes_in_words(self.gradient_bytes)} of gradients: {self.why}"


class Part(NamedTuple):
    """The ranks that some modules are sharded over."""

    group: dist.ProcessGroup
    number: int
    """The number of this group among those of other ranks, which have other experts: they count from 0 on."""
    groups: int
    """The number of such groups; 1: all ranks have the same parameters."""


class Choice:
    """The units of a model to attach to, and those that stay with FSDP2.

    `frozen` says whether units without a trained parameter, which are only gathered, are chosen too.
    """

    def __init__(
        self,
        caller: str,
        found: Sequence[Unit],
        modules: Patterns | None,
        except_modules: Patterns,
        *,
        strict: bool,
        frozen: bool,
    ) -> None:
        """Choose by patterns and by what each unit is; raise `SettingsError` if a pattern matches none, or all go."""
        self._caller, self._is_strict = caller, strict
        self.found = found
        """All units of the model."""
        self.units: list[Unit] = []
        """The units to attach to."""
        self.not_compressed: dict[str, NotCompressed] = {}
        """The trained units that stay with FSDP2, by name."""
        self._refused: list[str] = []
        """Those of them that nobody asked to leave."""
        self._not_gathered: dict[str, str] = {}
        """The frozen units that FSDP2 gathers itself although nobody asked for that, and why."""
        self.left: list[Unit] = []
        """All units that stay with FSDP2."""
        wanted = None if modules is None else _matching(caller, "modules", modules, found)
        unwanted = _matching(caller, "except_modules", except_modules, found)
        for unit in found:
            asked = "not among modules=" if wanted is not None and unit not in wanted else ""
            asked = "among except_modules=" if unit in unwanted else asked
            why = asked or refusal_of(unit)
            if why:
                self._leave(unit, why, is_refused=not asked, is_gathered=frozen)
            elif frozen or unit.trained():
                self.units.append(unit)
        self._check()

    @property
    def trained(self) -> list[Unit]:
        """Those of the units that have a trained parameter."""
        return [unit for unit in self.units if unit.trained()]

    def _leave(self, unit: Unit, why: str, *, is_refused: bool = True, is_gathered: bool = True) -> None:
        self.left.append(unit)
        if unit.trained():
            self.not_compressed[unit.name] = NotCompressed(unit.gradient_bytes(), why)
            if is_refused:
                self._refused.append(unit.name)
        elif is_refused and is_gathered:
            self._not_gathered[unit.name] = why

    def _check(self) -> None:
        if self._refused and (self._is_strict or not self.trained):
            name = self._refused[0]
            raise SettingsError(f"{self._caller}: {name}: {self.not_compressed[name].why}.")
        if self._not_gathered and self._is_strict:
            name, why = next(iter(self._not_gathered.items()))
            raise SettingsError(f"{self._caller}(gather=): {name}: {why}.")
        if not self.trained:
            raise SettingsError(f"{self._caller}: modules= and except_modules= leave no module that is trained.")

    def facts(self) -> str:
        """Return what must be the same on every rank of the largest group before it finds the parts."""
        sizes = ", ".join(str(unit.process_group.size()) for unit in self.units)
        return f"modules: {', '.join(unit.name for unit in self.trained)}\nnumbers of their ranks: {sizes}\n"

    def parts(self, whole: dist.ProcessGroup) -> dict[str, Part]:
        """Return each unit's part of the largest group, by name; call it on all ranks of that.

        Units that are sharded over ranks outside it stay with FSDP2. Groups of the same ranks count as one.
        """
        ours = tuple(dist.get_process_group_ranks(whole))
        own = [tuple(dist.get_process_group_ranks(unit.process_group)) for unit in self.units]
        told = [own] * len(ours)
        if any(ranks != ours for ranks in own):  # on all ranks alike
            dist.all_gather_object(told, own, group=whole)
        groups, parts = {ours: whole}, dict[str, Part]()
        for place, (unit, ranks) in enumerate(zip(self.units, own, strict=True)):
            every = sorted({of_rank[place] for of_rank in told})
            if all({*one} <= {*ours} for one in every):
                group = groups.setdefault(ranks, unit.process_group)
                parts[unit.name] = Part(group, every.index(ranks), len(every))
            else:
                self._leave(unit, f"it is sharded over ranks that are not among the {len(ours)} of the rest")
        connected = {parts[unit.name].group for unit in self.trained if unit.name in parts}
        for unit in self.units:
            if unit.name in parts and parts[unit.name].group not in connected:
                self._leave(unit, "it is frozen, and no module that is trained is sharded over its ranks")
                del parts[unit.name]
        self.units = [unit for unit in self.units if unit.name in parts]
        self._check()
        return parts

    def warn(self) -> None:
        """Warn of the units that stay with FSDP2 although nobody asked for that."""
        if self._not_gathered:
            each = "; ".join(f"{name}: {why}" for name, why in self._not_gathered.items())
            warnings.warn(
                f"commhooks, {self._caller}: FSDP2 gathers {counted(len(self._not_gathered), 'frozen module')} itself, "
                f"uncompressed: {each}. Pass except_modules= to say so, or strict=True to have an error instead.",
                stacklevel=3,
            )
        if self._refused:
            size = bytes_in_words(sum(self.not_compressed[name].gradient_bytes for name in self._refused))
            each = "; ".join(f"{name}, {self.not_compressed[name]}" for name in self._refused)
            warnings.warn(
                f"commhooks, {self._caller}: FSDP2 reduces the gradients of {counted(len(self._refused), 'module')} "
                f"itself, uncompressed, {size} of them: {each}. Pass except_modules= to say so, or strict=True to "
                "have an error instead.",
                stacklevel=3,
            )


def _matching(caller: str, option: str, patterns: Patterns, found: Sequence[Unit]) -> set[Unit]:
    """Return the units whose module's name, or whose own, matches a pattern; "the model" is the root."""
    matching = set[Unit]()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        named = {
            unit for unit in found if any(fnmatch.fnmatchcase(name, pattern) for name in (unit.of_module, unit.name))
        }
        if not named:
            names = list(dict.fromkeys(unit.of_module for unit in found))
            raise SettingsError(
                f"{caller}({option}={patterns!r}): {pattern!r} matches no module that fully_shard was called with; "
                f"there are {', '.join(names[:8])}{' and others' * (len(names) > 8)}."
            )
        matching |= named
    return matching


def refusal_of(unit: Unit) -> str:
    """Return why a unit cannot be attached to; "" if it can."""
    if unit.is_replicated:
        replicas, shards = unit.dimensions
        return (
            "FSDP2 averages its gradients over replicas itself, uncompressed (HSDP: a mesh of two dimensions; or "
            "replicate; take a mesh of shape (ranks, 1) instead). Shard over one dimension, fully_shard(..., "
            f"mesh=mesh[{shards!r}]), and let commhooks.attach_replicas(..., process_group=mesh[{replicas!r}]"
            ".get_group()) average over the other"
        )
    try:
        unit.parameters()
    except SettingsError as error:
        return str(error).partition(": ")[2].rstrip(".")
    return ""
