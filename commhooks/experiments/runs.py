"""Runs as data: their settings and their results. Both survive a round trip through JSON unchanged."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from commhooks.experiments.devices import DEVICES, check_device
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.specs import Spec, steps_under_way
from commhooks.saving.files import named, read_json
from commhooks.units import unknown

T = TypeVar("T")
FORMAT = 2  # of the result files; increased when readers must change
PARTIAL = ".json.part"  # suffix of a result's name while it is being written
HEAD = '{\n "format": '  # how its text begins


_LONGEST = 200  # bytes in a part of a path; file systems take 255
SHARDED = "sharded"
"""The value of `ddp` that means FSDP2."""


def check_ddp(settings: str, ddp: str, bucket_cap_mb: float | None, known: tuple[str, ...] = ("core", "torch")) -> None:
    """Raise ValueError if the DDP is unknown, or if the bucket size is not positive and finite."""
    if ddp not in known:
        raise ValueError(f"{settings}(ddp={ddp!r}): ddp must be {' or '.join(map(repr, known))}.")
    if bucket_cap_mb is not None and not 0 < bucket_cap_mb < math.inf:
        raise ValueError(f"{settings}(bucket_cap_mb={bucket_cap_mb}): bucket_cap_mb must be above zero, and finite.")


@dataclass(frozen=True)
class Compute:
    """The time of a step's compute on the user's own processor; exactly one of the two is given."""

    seconds: float | None = None  # per step
    factor: float | None = None  # of its time here: 0.5 is a processor twice as fast

    @classmethod
    def parse(cls, text: str) -> Compute:
        """Return the time or the factor in a text such as '200ms', '1.5s' or '0.5x'.

        Raises:
            ValueError: The text is not a positive time or factor.

        """
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(x|s|ms|us)\s*", text)
        if match is None or float(match[1]) == 0:
            raise ValueError(
                f"compute {text!r} does not parse: expected the time of a step's compute on your processor, such as "
                "'200ms', or a factor of its time here, such as '0.5x'"
            )
        if match[2] == "x":
            return cls(factor=float(match[1]))
        return cls(seconds=float(match[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[match[2]])


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One training run: the same settings, versions and machine give the same losses, bit for bit.

    A run may continue after its steps (`Goal`). The number of further steps depends on the clock, but no loss does.
    """

    task: Spec
    hook: Spec = field(default_factory=lambda: Spec("all-reduce"))  # its setting `policy` is the order of collectives
    optimizer: Spec | None = None  # None: the task's own
    ranks: int = 2
    device: str = "cpu"  # "cuda": each rank trains on a GPU
    steps: int = 100  # optimizer steps
    seed: int = 0
    link: LinkSettings = field(default_factory=LinkSettings)
    compute: str | None = None  # the time of a step's compute on the user's processor; None: its time here
    ddp: str = "core"  # "core": ddp_core's DistributedDataParallel; "torch": PyTorch's; SHARDED: FSDP2
    bucket_cap_mb: float | None = None  # lower: more buckets, more overlap, more collectives; None: the DDP's default
    evaluate_every: int = 20  # steps between two evaluations on held-out data; the clock is stopped meanwhile

    def __post_init__(self) -> None:
        for name, least in {"ranks": 1, "steps": 1, "evaluate_every": 1, "seed": 0}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"RunSettings({name}={value!r}): {name} must be a whole number of at least {least}.")
        if self.device not in DEVICES:
            raise ValueError(f"RunSettings(device={self.device!r}): device must be {' or '.join(DEVICES)}.")
        check_ddp("RunSettings", self.ddp, self.bucket_cap_mb, ("core", "torch", SHARDED))
        if self.bucket_cap_mb is not None:  # 4 and 4.0 are one run, with one name
            object.__setattr__(self, "bucket_cap_mb", float(self.bucket_cap_mb))
        if self.compute is not None:
            Compute.parse(self.compute)
            object.__setattr__(self, "compute", "".join(self.compute.split()))  # so are '200ms' and '200 ms'

    @property
    def label(self) -> str:
        """Task, hook and seed, for messages."""
        return f"{self.task.label} · {self.hook.label} · seed {self.seed}"

    @property
    def is_sharded(self) -> bool:
        """True if FSDP2 shards the model."""
        return self.ddp == SHARDED

    @property
    def states_seconds(self) -> bool:
        """True if the time of a step's compute is stated in seconds, so that its time here must be measured first."""
        return self.compute is not None and Compute.parse(self.compute).seconds is not None

    @property
    def comparison_group(self) -> RunSettings:
        """The same settings without a hook: runs of one comparison group take turns, which makes times comparable.

        A run takes no turns with others if the rates of its hosts change over time, or if its exchanges continue in
        later steps: they would overlap the other runs' turns.
        """
        alone = (self.link.kind == "hosts" and self.link.schedule) or steps_under_way(self.hook) > 0
        return self if alone else dataclasses.replace(self, hook=Spec(""))

    @property
    def key(self) -> str:
        """A short name for these settings: the same for equal settings, in every version that knows them."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """The name of the run's files, without a suffix."""
        return f"{self.task.file_name}.{self.hook.file_name}.seed-{self.seed}.{self.key}"

    @property
    def log_folder(self) -> str:
        """The run's folder among TensorBoard's logs, which TensorBoard shows as its name: 'task/hook/seed-0'.

        All other settings that differ from the defaults follow the seed: 'seed-0, ranks=4, link=100Mbit-s'.
        """
        others = [f"{key}={value}" for key, value in self.to_dict().items() if key not in {"task", "hook", "seed"}]
        parts = self.task.label, self.hook.label, ", ".join([f"seed-{self.seed}", *others])
        if max(len(part.encode()) for part in parts) > _LONGEST:
            parts = self.task.file_name, self.hook.file_name, f"seed-{self.seed}, {self.key}"
        return "/".join(part.replace("/", "-") for part in parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, as text and numbers, as a sweep's YAML file has them."""
        written: dict[str, Any] = {"task": self.task.label}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            default = each.default_factory() if callable(each.default_factory) else each.default
            if each.name != "task" and value != default:
                written[each.name] = value.label if isinstance(value, Spec | LinkSettings) else value
        return written

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> RunSettings:
        """Return the settings that `to_dict` or a person wrote.

        Raises:
            ValueError: A key is unknown, or a value cannot work.

        """
        known = [each.name for each in dataclasses.fields(cls)]
        for key in written:
            if key not in known:
                raise ValueError(unknown("setting", str(key), known))
        if "task" not in written:
            raise ValueError("a run needs a task")
        return cls(**{name: read_setting(name, value) for name, value in written.items()})


_TEXTS = {"task", "hook", "optimizer", "link", "compute", "ddp", "device"}
_MAY_BE_NONE = {"optimizer", "compute", "bucket_cap_mb"}


def read_setting(name: str, value: Any) -> Any:
    """Return the value of one of `RunSettings`' fields, given as in a YAML file: as text or as a number.

    Raises:
        ValueError: The value is of the wrong type, or its text does not parse.

    """
    if isinstance(value, Spec | LinkSettings) or (value is None and name in _MAY_BE_NONE):
        return value
    if name in _TEXTS and isinstance(value, str):
        if name == "compute":
            Compute.parse(value)
        if name == "device":
            check_device(value)
        if name in {"task", "hook", "optimizer"}:
            return Spec.parse(value, name)
        return LinkSettings.parse(value) if name == "link" else value
    number = int if name != "bucket_cap_mb" else (int, float)
    if name in _TEXTS or not isinstance(value, number) or isinstance(value, bool):
        wanted = "text" if name in _TEXTS else "a number" if name == "bucket_cap_mb" else "a whole number"
        raise ValueError(f"{name} must be {wanted} (got {value!r})")
    return value


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
    dense_bytes: int  # bytes that a rank would have sent for the plain all-reduce, or in plain FSDP2
    interface_bytes: int | None = None  # bytes that this host's network interface sent; None: not counted
    probed: bool = False  # the step was also measured by layer, which takes time: it is not part of typical steps
    ended: float = 0.0  # Unix time; other runs take their turns in between


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """The model's performance on held-out data after `step` steps."""

    step: int
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # others: "accuracy" (0 to 1), "bits_per_byte", ...


@dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """One parameter in a probed step."""

    name: str
    elements: int
    payload_bytes: float | None  # in messages, mean over the run's steps so far; None: not counted by the hook
    error: float  # norm of (the hook's mean - the true mean) over the norm of the true mean
    residual: float | None  # norm of rank 0's residual over that of its mean gradient; None: no residual


@dataclass(frozen=True, kw_only=True)
class ProbeRecord:
    """The gradients of one step, measured against their true mean."""

    step: int
    error: float  # over all parameters: norm of (the hook's mean - the true mean) over the norm of the true mean
    residual: float | None  # norm of rank 0's residuals over that of its mean gradients
    layers: tuple[LayerRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The baseline's limits for a run that continues after the requested steps: the first one reached ends it."""

    loss: float | None  # a training loss, mean over SMOOTHING_STEPS steps; None: there is no target
    seconds: float  # of training
    steps: int


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Everything known about a finished run."""

    settings: RunSettings
    parameters: int  # elements of the model
    description: str  # the task in a sentence
    source: str  # hash of the file with the task's function; "": a built-in task
    steps: tuple[StepRecord, ...]  # the requested steps, and further ones if the run continued
    evaluations: tuple[EvaluationRecord, ...]  # one is after the last step asked for, the last after the last step
    probes: tuple[ProbeRecord, ...]
    replicas_identical: bool  # True if all ranks ended with the same parameters, bit for bit
    time_scale: float  # seconds here for one second in the records: above 1 if `compute` states a faster processor
    compute_here: float | None  # seconds of a step's compute measured here before the run, if `compute` is stated
    versions: Mapping[str, str]
    machine: Mapping[str, str | int | float]
    goal: Goal | None = None  # None: the run ended after the steps asked for
    peak_memory: int | None = None  # bytes of rank 0's GPU that the run held; None: it trained on the CPU
    commit: str | None = None  # of the checkout that made it; None: an installed package, or not known

    @property
    def asked_steps(self) -> tuple[StepRecord, ...]:
        """The requested steps, without further ones."""
        return self.steps[: self.settings.steps]

    @property
    def evaluation(self) -> EvaluationRecord:
        """The evaluation after the last requested step."""
        return next(one for one in self.evaluations if one.step == self.settings.steps)

    @property
    def file_name(self) -> str:
        """The name of the result's file."""
        return f"{self.settings.name}.json"

    def to_json(self) -> str:
        """Return the result as JSON text; steps are columns, so that the file stays small."""
        raw = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        raw |= {
            "settings": self.settings.to_dict(),
            "steps": _columns(StepRecord, self.steps),
            "evaluations": [dataclasses.asdict(one) for one in self.evaluations],
            "probes": [{**vars(one), "layers": _columns(LayerRecord, one.layers)} for one in self.probes],
            "goal": None if self.goal is None else vars(self.goal),
        }
        lines = [f" {json.dumps(key)}: {json.dumps(strict(value), allow_nan=False)}" for key, value in raw.items()]
        return HEAD + f"{FORMAT},\n" + ",\n".join(lines) + "\n}"

    def write(self, folder: Path) -> Path:
        """Write the result under its name, completely or not at all, and return the path.

        Raises:
            OSError: It cannot be written; the error names the file and, if the disk is full, the space left.

        """
        path = folder / self.file_name
        partial = path.with_suffix(PARTIAL)
        try:
            with named(path), partial.open("w", encoding="utf-8") as file:
                file.write(self.to_json() + "\n")
                file.flush()
                os.fsync(file.fileno())  # the name must not reach the disk before the text, should the power fail
            return partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> RunResult:
        """Read a result file.

        Raises:
            ValueError: The file is damaged, or of another format.

        """
        try:
            raw = _of_type("a result", read_json(path), dict)
            if (number := raw.pop("format", None)) != FORMAT:
                raise ValueError(f"it is of format {number}, which another version of commhooks wrote")
            with _part("settings"):
                raw["settings"] = RunSettings.from_dict(_of_type("settings", raw["settings"], dict))
            with _part("steps"):
                raw["steps"] = _records(StepRecord, raw["steps"])
            with _part("evaluations"):
                raw["evaluations"] = tuple(_record(EvaluationRecord, one) for one in raw["evaluations"])
            with _part("probes"):
                probes = [(_of_type("a probe", one, dict), one["layers"]) for one in raw["probes"]]
                raw["probes"] = tuple(
                    _record(ProbeRecord, {**one, "layers": _records(LayerRecord, layers)}) for one, layers in probes
                )
            with _part("goal"):  # files of earlier versions have none
                raw["goal"] = None if raw.get("goal") is None else _record(Goal, raw["goal"])
            with _part("versions"):
                for name, version in _of_type("versions", raw["versions"], dict).items():
                    _of_type(name, version, str)
            with _part("machine"):
                _check_machine(raw["machine"])
            result = _typed(cls(**raw))
            for step in result.steps:
                if not step.compute + step.compression + step.waiting > 0:
                    raise ValueError(f"step {step.step}: compute + compression + waiting must be above zero")
            asked, evaluated = result.settings.steps, [one.step for one in result.evaluations]
            made = len(result.steps)
            if made < asked or (made > asked and result.goal is None) or not {asked, made} <= {*evaluated}:
                raise ValueError(f"it has {made} of {asked} steps, evaluated after {evaluated or 'none'}")
            return result
        except (*_WRONG, AttributeError) as error:
            raise ValueError(
                f"{path}: expected a result file of format {FORMAT} ({error}); move it away, and run again"
            ) from error


NOT_FINITE = {"nan", "inf", "-inf"}
"""Numbers that JSON cannot represent, as they are written: as text."""
_NAN_FOR_NULL = {"loss", "error"}  # files of earlier versions have null instead


def _columns(kind: type, records: tuple[Any, ...]) -> dict[str, list[Any]]:
    return {each.name: [getattr(record, each.name) for record in records] for each in dataclasses.fields(kind)}


_WRONG = (ValueError, KeyError, TypeError, OverflowError)
"""What a value that a file should not have raises when it is read."""


@contextmanager
def _part(name: str) -> Iterator[None]:
    try:
        yield
    except _WRONG as error:
        raise ValueError(f"{name}: {error}") from error


def _records(kind: type, columns: Any) -> tuple[Any, ...]:
    lengths = {name: len(_of_type(name, column, list)) for name, column in _of_type("records", columns, dict).items()}
    if wrong := [name for name in lengths if lengths[name] != max(lengths.values())]:
        raise ValueError(f"{wrong[0]} has {lengths[wrong[0]]} values, others have {max(lengths.values())}")
    rows = zip(*columns.values(), strict=True)
    return tuple(_record(kind, dict(zip(columns, row, strict=True))) for row in rows)


def _check_machine(raw: Any) -> None:
    """Raise if what a report says of a machine is missing or of another type."""
    known = _of_type("machine", raw, dict)
    for name in ("processor", "system"):
        _of_type(name, known[name], str)
    for name in ("cores", "load", "threads_per_rank"):
        _of_type(name, known[name], (int, float))


def _record(kind: type[T], raw: Any) -> T:
    return _typed(kind(**_with_nan(_of_type("a record", raw, dict))))


_PLAIN = {"int": (int, float), "float": (int, float), "bool": (bool,), "str": (str,)}
_ABOVE_ZERO = {"seconds", "time_scale"}
_FINITE = {"compute", "compression", "waiting", "hidden", "ended", "compute_here"}  # rounded, a part may be below zero
_LARGEST = 1e30
"""No number of bytes, elements or seconds is larger; sums and products of a few such numbers are still finite."""


def _of_type(name: str, value: Any, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value, kind):
        wanted = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise TypeError(f"{name} must be of type {wanted} (got {value!r:.80})")
    return value


def _typed(record: T) -> T:
    """Return a record that was read.

    Raises TypeError if a plain field has another type than its own, ValueError for a number that nothing can have.
    """
    for each in dataclasses.fields(record):  # type: ignore[arg-type]  # every record is a dataclass
        value, kind = getattr(record, each.name), str(each.type).removesuffix(" | None")
        if kind not in _PLAIN or (value is None and kind != each.type):
            continue
        if not isinstance(value, _PLAIN[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise TypeError(f"{each.name} must be of type {kind} (got {value!r:.80})")
        number: Any = value
        if each.name in _ABOVE_ZERO and not 0 < number <= _LARGEST:
            raise ValueError(f"{each.name} must be above zero and finite (got {value!r:.80})")
        if kind == "int" and not 0 <= number <= _LARGEST:
            raise ValueError(f"{each.name} must be at least zero and finite (got {value!r:.80})")
        if each.name in _FINITE and not abs(number) <= _LARGEST:
            raise ValueError(f"{each.name} must be finite (got {value!r:.80})")
    return record


def strict(value: Any) -> Any:
    """Return the value in a form that JSON can represent: a number that is not finite becomes text."""
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _with_nan(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the record with its non-finite numbers as floats in place of text or null."""
    given = _of_type("metrics", raw.get("metrics", {}), dict)
    metrics = {"metrics": {key: _number(key, value) for key, value in given.items()}} if "metrics" in raw else {}
    numbers = {
        key: _number(key, value)
        for key, value in raw.items()
        if key != "name"
        and ((value is None and key in _NAN_FOR_NULL) or (isinstance(value, str) and value in NOT_FINITE))
    }
    return {**raw, **numbers, **metrics}


def _number(name: str, value: Any) -> float:
    """Return a number that a file has as one, as text if it is not finite, or, in earlier versions, as null."""
    if value is None:
        return math.nan
    return float(value if isinstance(value, str) and value in NOT_FINITE else _of_type(name, value, (int, float)))
