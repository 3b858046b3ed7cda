"""A sweep as a YAML file: settings of runs, each with a value or a list of values, in all combinations."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from commhooks.experiments.results.verdicts import USUAL, Margins
from commhooks.experiments.runs import RunSettings, read_setting
from commhooks.experiments.sweeps.plan import check_number, check_runs, combinations, in_turn
from commhooks.units import unknown

EXAMPLE = """\
# A sweep for `commhooks sweep FILE.yaml`. Every setting takes a value, or a list of values; all combinations are run.
# A value with a comma must be quoted inside [ ]. Runs with a result in the folder are not run again.

out: runs/example            # folder of the results; without it: runs/<name of this file>

task: digits:size=small      # or gpt, or a function of yours: my_task.py:task
hook:                        # the others are compared with all-reduce, or else with the first
  - all-reduce
  - fp16
  - powersgd:rank=2,start_after=5
link: [100Mbit/s, 1Gbit/s]   # between the ranks; "100Mbit/s,latency=1ms" has latency too
seeds: 2                     # 0 and 1; or seed: [0, 7]
ranks: 2
steps: 30                    # without it: each task's own number

# Other settings, with their defaults:
# optimizer: sgd:lr=0.1,momentum=0.9   # without it: the task's own
# device: auto               # or cpu, or cuda: a GPU for each rank; auto: a GPU if there is one
# compute: 200ms             # the time of a step's compute on your processor; or 0.5x of its time here
# ddp: core                  # or torch; or sharded, for FSDP2
# bucket_cap_mb: 10          # without it: 1 for the first bucket, 25 for the others
# evaluate_every: 20

# Runs listed one by one, or in groups. The settings above are the defaults of each:
# runs:
#   - {hook: all-reduce, optimizer: "sgd:lr=0.1,momentum=0.9"}
#   - {hook: top-k, optimizer: ["sgd:lr=0.03", "sgd:lr=0.1"]}

# For the report:
# baseline: all-reduce
# target_loss: 0.5
# matters: 0.01             # of what the baseline's loss falls: a smaller difference does not matter
# saves: 0.05               # of a step's time: a smaller saving does not matter
"""
"""A file that works, with every key explained."""

_SETTINGS = [each.name for each in dataclasses.fields(RunSettings)]
_REPORT: dict[str, Any] = {"out": str, "baseline": str, "target_loss": (int, float), "matters": float, "saves": float}
_ELSEWHERE = {
    "rate": "the rate belongs to the link: 'link: 100Mbit/s'",
    "latency": "the latency belongs to the link: 'link: \"100Mbit/s,latency=1ms\"'",
    "size": "the size belongs to the task: 'task: gpt:size=small'",
    "policy": "the policy belongs to the hook: 'hook: powersgd:rank=4,policy=fused'",
    "<<": "merging is not needed: what is written at the top of the file holds for each of its `runs`",
    "name": "a sweep is named by its folder: 'out: runs/name'",
}
_CUT_OFF = re.compile(r"(?!rate=)[a-z_]+=[^:]*")


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """The contents of a file."""

    runs: tuple[RunSettings, ...]
    out: Path
    baseline: str | None = None
    target_loss: float | None = None
    margins: Margins = USUAL


@dataclass(frozen=True)
class _Entry:
    """A key's value, and the line of the key."""

    value: Any
    line: int  # from 1


def read_sweep(path: Path, device: str | None = None) -> SweepFile:
    """Return the runs that a YAML file describes, and its folder; a device that is given replaces the file's.

    Raises:
        ValueError: The file is not YAML, a key is unknown, or a value cannot work; the error names file, line and key.

    """
    try:
        return _read(path, device)
    except RecursionError as error:
        raise ValueError(f"{path}: its brackets are nested too deeply") from error


def _read(path: Path, device: str | None) -> SweepFile:
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error}); `commhooks sweep --example > {path}` writes one that works"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    try:
        return _sweep_of(_block(node, "the file"), path, device)
    except (ValueError, yaml.YAMLError) as error:  # what is YAML may still have tags that stand for no value
        raise ValueError(f"{path}{'' if str(error).startswith(', line') else ': '}{error}") from error


def _sweep_of(top: dict[str, _Entry], path: Path, device: str | None) -> SweepFile:
    _check_keys(top, [*_SETTINGS, "seeds", "runs", *_REPORT])
    report = {name: top.pop(name) for name in _REPORT if name in top}
    for name, entry in report.items():
        if not isinstance(entry.value, _REPORT[name]) or isinstance(entry.value, bool):
            wanted = "text" if _REPORT[name] is str else "a number"
            raise ValueError(f", line {entry.line}: {name} must be {wanted} (got {entry.value!r})")
    forced = {} if device is None else {"device": _Entry(device, 0)}
    runs = in_turn([settings for entries in _entries(top) for settings in _runs_of({**entries, **forced})])
    check_runs(runs)
    values: dict[str, Any] = {name: entry.value for name, entry in report.items()}
    margins = Margins(**{name: values.pop(name) for name in ("matters", "saves") if name in values})
    return SweepFile(
        **{**values, "margins": margins, "runs": runs, "out": Path(values.get("out", Path("runs") / path.stem))}
    )


def _entries(top: dict[str, _Entry]) -> Iterator[Mapping[str, _Entry]]:
    """Yield the settings of the file, or of each entry of `runs` with the file's settings as defaults."""
    listed = top.pop("runs", None)
    if listed is None:
        yield top
        return
    if not isinstance(listed.value, list) or not listed.value:
        raise ValueError(f", line {listed.line}: runs must be a list of settings, such as '- hook: fp16'")
    for own in listed.value:
        _check_keys(own, [*_SETTINGS, "seeds"])
        # `seed` and `seeds` set the same: an entry's one replaces the file's other.
        replaced = {"seed", "seeds"} if {"seed", "seeds"} & own.keys() else set()
        yield {name: entry for name, entry in top.items() if name not in replaced} | own


def _runs_of(entries: Mapping[str, _Entry]) -> tuple[RunSettings, ...]:
    """Return all combinations of the values."""
    if "task" not in entries:
        raise ValueError("a run needs a task, such as 'task: digits'; `commhooks sweep --example` shows a file")
    if {"seed", "seeds"} <= entries.keys():
        raise ValueError(f", line {entries['seeds'].line}: give seed or seeds, not both")
    chosen: dict[str, Sequence[Any]] = {}
    for name, entry in entries.items():
        try:
            if name == "seeds":
                chosen["seed"] = seeds_of(entry.value)
            else:
                chosen[name] = [_checked(name, value) for value in _listed(name, entry.value)]
        except ValueError as error:
            raise ValueError(f", line {entry.line}: {error}") from error
    return combinations(chosen)


def seeds_of(count: Any) -> range:
    """Return the seeds 0 to count - 1.

    Raises:
        ValueError: The count is not a whole number of at least 1.

    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(
            f"seeds must be a whole number of at least 1: 3 stands for the seeds 0, 1 and 2 (got {count!r}); for "
            "certain seeds write 'seed: [0, 7]'"
        )
    check_number(count)
    return range(count)


def _listed(name: str, value: Any) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(f"{name} is an empty list: name at least one value, or leave the key out")
    return values


def _checked(name: str, value: Any) -> Any:
    """Return a value in the form of `RunSettings`; raise ValueError if it cannot be one."""
    if isinstance(value, str) and name in {"task", "hook", "optimizer", "link"} and _CUT_OFF.fullmatch(value):
        raise ValueError(
            f"{name} {value!r} has settings but no name: inside [ ] and {{ }} a comma separates values, so put quotes "
            'around one that has a comma, such as "powersgd:rank=4,start_after=5"'
        )
    return read_setting(name, value)


def _check_keys(block: Mapping[str, _Entry], known: list[str]) -> None:
    for name, entry in block.items():
        if name not in known:
            said = _ELSEWHERE.get(name) or unknown("key", name, known)
            raise ValueError(f", line {entry.line}: {said}")


def _block(node: yaml.Node | None, what: str) -> dict[str, _Entry]:
    """Return a mapping's keys, each with its value and its line; the entries of `runs` are such mappings too."""
    if not isinstance(node, yaml.MappingNode) or not node.value:
        raise ValueError(f"{what} must have settings, such as 'task: digits'; `commhooks sweep --example` shows a file")
    loader, found = yaml.SafeLoader(""), dict[str, _Entry]()
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ValueError(f", line {line}: expected the name of a setting before the colon, such as 'task: digits'")
        name = key_node.value
        if name in found:
            raise ValueError(
                f", line {line}: {name} is given twice (first on line {found[name].line}); for several values "
                f"write '{name}: [first, second]'"
            )
        if name == "runs" and isinstance(value_node, yaml.SequenceNode):
            value: Any = [_block(each, "each of runs") for each in value_node.value]
        else:
            value = loader.construct_object(value_node, deep=True)
        found[name] = _Entry(value, line)
    return found
