"""Settings and results of runs, as data: everything here survives a round trip through JSON unchanged."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .link import LinkSettings

FORMAT = 1  # of the result files; increased when readers must change
PARTIAL = ".json.part"  # suffix of a result's name while it is being written
HEAD = '{\n "format": '  # how its text begins
HookValue = bool | int | float | str


@dataclass(frozen=True)
class HookSpec:
    """A hook by name, with the settings that differ from its defaults."""

    name: str
    settings: tuple[tuple[str, HookValue], ...] = ()

    @classmethod
    def parse(cls, text: str) -> HookSpec:
        """Return the hook described by a text such as 'powersgd:rank=4,start_after=10'.

        A class of another package is 'mypackage.module:TopK:ratio=0.1'. A whole compressor as printed by `str`, such as
        'ErrorFeedback(inner=TopK(ratio=0.1))', is a name without settings.

        Raises:
            ValueError: The text does not have that form. Whether such a hook exists is checked in `make_hook`.

        """
        if "(" in text:
            return cls(text.strip())
        found = re.fullmatch(r"([\w.]+:[A-Z]\w*(?=:|$)|[^:]*)(?::(.*))?", text.strip())
        name, rest = (found[1], found[2] or "") if found else ("", "")
        pairs = [piece.partition("=") for piece in rest.split(",")] if rest.strip() else []
        if not name or any(not key.strip() or not equals or not value.strip() for key, equals, value in pairs):
            raise ValueError(f"hook {text!r} does not parse: expected 'name' or 'name:setting=value,setting=value'")
        keys = [key.strip() for key, _, _ in pairs]
        if len(set(keys)) < len(keys):
            raise ValueError(f"hook {text!r} does not parse: a setting is given twice")
        return cls(name.strip(), tuple((key.strip(), _value(value.strip())) for key, _, value in pairs))

    @property
    def label(self) -> str:
        """The hook as it is written on the command line."""
        settings = ",".join(f"{key}={value}" for key, value in self.settings)
        return f"{self.name}:{settings}" if settings else self.name

    @property
    def file_name(self) -> str:
        """The label without characters that are special in file names."""
        return re.sub(r"[^A-Za-z0-9.]+", "-", self.label).strip("-")


def _value(text: str) -> HookValue:
    """Read a setting as a bool, an int or a float if possible, otherwise as text."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        pass  # not an int: a float, or a word
    try:
        return float(text)
    except ValueError:
        return text


def check_ddp(settings: str, ddp: str, bucket_cap_mb: float | None) -> None:
    """Raise ValueError if there is no such DDP, or no bucket of that size."""
    if ddp not in {"core", "torch"}:
        raise ValueError(f"{settings}(ddp={ddp!r}): ddp must be 'core' or 'torch'.")
    if bucket_cap_mb is not None and not 0 < bucket_cap_mb < math.inf:
        raise ValueError(f"{settings}(bucket_cap_mb={bucket_cap_mb}): bucket_cap_mb must be above zero, and finite.")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One training run: the same settings, versions and machine give the same losses, bit for bit."""

    task: str
    size: str = "medium"
    hook: HookSpec = field(default_factory=lambda: HookSpec("all-reduce"))
    ranks: int = 2
    steps: int = 100  # optimizer steps
    seed: int = 0
    link: LinkSettings = field(default_factory=LinkSettings)
    ddp: str = "core"  # "core": ddp_core's DistributedDataParallel; "torch": PyTorch's
    bucket_cap_mb: float | None = None  # lower: more buckets, more overlap, more collectives; None: the DDP's default
    evaluate_every: int = 20  # steps between two evaluations on held-out data; the clock is stopped meanwhile

    def __post_init__(self) -> None:
        for name in ("ranks", "steps", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"RunSettings({name}={getattr(self, name)}): {name} must be at least 1.")
        check_ddp("RunSettings", self.ddp, self.bucket_cap_mb)

    @property
    def label(self) -> str:
        """Task and hook, for messages."""
        return f"{self.task} · {self.hook.label}"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step as seen by rank 0; the loss is the mean over ranks. compute + compression + waiting = seconds."""

    step: int  # from 1
    loss: float  # training loss, mean over the ranks' batches
    seconds: float  # the whole step: forward, backward, optimizer
    compute: float  # seconds of forward, backward up to the last gradient, optimizer
    compression: float  # seconds after the last gradient in which the hook worked without waiting
    waiting: float  # seconds in which the step waited for other ranks or for the link
    hidden: float  # seconds of waiting for the link during compute, which cost the step nothing
    gradient_bytes: int  # bytes passed to the hook
    payload_bytes: int  # bytes that the hook passed to collectives
    moved_bytes: int  # bytes that a rank sent for those, as a ring moves them
    dense_bytes: int  # what a rank would have sent for the plain all-reduce
    ended: float = 0.0  # Unix time; other runs take their turns in between. 0.0: a result of an earlier version


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """The model's performance on held-out data after so many steps."""

    step: int
    loss: float
    accuracy: float
    bits_per_byte: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Everything known about a finished run."""

    settings: RunSettings
    parameters: int  # elements of the model
    description: str  # the task in a sentence
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]  # the last is after the last step
    replicas_identical: bool  # whether all ranks ended with the same parameters, bit for bit
    versions: Mapping[str, str]
    machine: Mapping[str, str | int | float]

    def to_json(self) -> str:
        """Return the result as JSON text."""
        return json.dumps(_strict({"format": FORMAT, **dataclasses.asdict(self)}), indent=1, allow_nan=False)

    @property
    def file_name(self) -> str:
        """The name of its file, `<task>.<hook>.json`."""
        return f"{self.settings.task}.{self.settings.hook.file_name}.json"

    def write(self, folder: Path) -> Path:
        """Write the result under its name, completely or not at all, and return the path."""
        path = folder / self.file_name
        partial = path.with_suffix(PARTIAL)
        partial.write_text(self.to_json() + "\n", encoding="utf-8")
        return partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> RunResult:
        """Read a result file.

        Raises:
            ValueError: The file is of another format.

        """
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if raw.pop("format", None) != FORMAT:
            raise ValueError(f"{path}: expected a result file of format {FORMAT}; run `commhooks compare` again")
        return cls(**{**raw, **_typed(raw)})


def _strict(value: Any) -> Any:
    """Return the value in a form that JSON can represent: a loss that is not finite becomes null."""
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _with_losses(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the record with null losses as NaN."""
    return {**raw, "loss": math.nan if raw["loss"] is None else raw["loss"]}


def _typed(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the nested records of a result file as their dataclasses."""
    settings = dict(raw["settings"])
    hook = settings["hook"]
    settings["hook"] = HookSpec(hook["name"], tuple((key, value) for key, value in hook["settings"]))
    settings["link"] = LinkSettings(**settings["link"])
    return {
        "settings": RunSettings(**settings),
        "steps": tuple(StepRecord(**_with_losses(step)) for step in raw["steps"]),
        "evaluations": tuple(EvaluationRecord(**_with_losses(evaluation)) for evaluation in raw["evaluations"]),
    }
