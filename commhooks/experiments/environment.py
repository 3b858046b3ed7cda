"""The software and the machine, as an issue report needs them: nothing that names the person or the machine."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import commhooks
from commhooks.experiments.commit import commit_of_code
from commhooks.experiments.stored import write_text
from commhooks.units import bytes_in_words, counted

FORMAT = 1
"""The format of the JSON text; increased when its readers must change."""
PACKAGES = (
    "torch", "numpy", "scipy", "typer", "rich", "matplotlib", "scikit-learn", "tensorboard", "jinja2", "pandas",
    "pyyaml", "lightning", "pytorch-lightning", "accelerate", "transformers", "ray", "torchft",
)  # fmt: skip
BACKENDS = ("gloo", "nccl", "mpi")
_SHOWN = re.compile(r"COMMHOOKS_\w+|OMP_NUM_THREADS|MKL_NUM_THREADS")
_NAMED = re.compile(r"(GLOO|NCCL|TORCH_NCCL)_\w+")  # their values may be addresses, interfaces or paths
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/:()'\"]+/)+")
_SECRET = re.compile(r"[/\\]")


def environment() -> dict[str, Any]:
    """Return versions, system, processors, memory, backends, CUDA devices, compiled passes and variables.

    Works with the packages that commhooks itself needs. Sizes are in bytes. Contains no names of hosts, users or
    folders: values of variables that may contain them are None, and folders are cut from messages.
    """
    return {
        "format": FORMAT,
        "commhooks": {"version": commhooks.__version__, "commit": commit_of_code()},
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "system": {
            "name": f"{platform.system()} {platform.machine()}",
            "release": platform.release(),
            "libc": " ".join(filter(None, platform.libc_ver())),
        },
        "memory": _memory(),
        **_of_torch(),
        "variables": {
            name: value if _SHOWN.fullmatch(name) and not _SECRET.search(value) else None
            for name, value in sorted(os.environ.items())
            if _SHOWN.fullmatch(name) or _NAMED.fullmatch(name)
        },
    }


def in_words(found: Mapping[str, Any]) -> str:
    """Return the result of `environment` as lines of text, each with a heading and a value."""
    rows = list(_rows(found))
    width = max(len(heading) for heading, _ in rows) + 2
    return "".join(f"{heading:{width}}{value}\n" for heading, value in rows)


def print_environment(place: Path | None) -> None:
    """Print the result of `environment`, or write it into a file as JSON; with '-', print the JSON.

    Raises:
        OSError: The file cannot be written.

    """
    found = environment()
    if place is None:
        print(in_words(found), end="")
        return
    text = json.dumps(found, indent=1, allow_nan=False) + "\n"
    if place == Path("-"):
        print(text, end="")
    else:
        write_text(place, text)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _of_torch() -> dict[str, Any]:
    """Return the facts that PyTorch reports; if it cannot be imported, the error."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return {"error": f"import torch: {_without_folders(str(error))}"}
    from commhooks.experiments import versions
    from commhooks.experiments.machine import processor_name, usable_processors
    from commhooks.native import compiled

    dist = torch.distributed
    cuda = torch.cuda.is_available()
    try:
        passes = str(compiled())
    except commhooks.CommHooksError as error:
        passes = str(error)
    tried = versions.tried(torch.__version__, platform.python_version())
    lists = versions.private_names().items()
    return {
        "versions": {
            "promise": versions.promised(platform.python_version(), torch.__version__),
            "tried": tried and {key: tried[key] for key in ("torch", "python", "date", "parts")},
            "missing": {file: missing for file, names in lists if (missing := versions.missing(names))},
        },
        "processor": {
            "name": processor_name(),
            "cores": os.cpu_count(),
            "usable_cores": len(usable_processors()),
            "load": round(os.getloadavg()[0], 2),  # runnable processes, mean over the last minute
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "backends": {name: dist.is_available() and getattr(dist, f"is_{name}_available")() for name in BACKENDS},
        "cuda": {
            "built_for": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else None,
            "devices": [
                {
                    "name": one.name,
                    "capability": f"{one.major}.{one.minor}",
                    "memory_bytes": one.total_memory,
                }
                for one in map(torch.cuda.get_device_properties, range(torch.cuda.device_count() if cuda else 0))
            ],
        },
        "compiled_passes": _without_folders(passes),
    }


def _memory() -> dict[str, int | None]:
    """Return the bytes of total memory, and of available memory; None if the system does not tell."""
    table = Path("/proc/meminfo")
    lines = table.read_text(encoding="ascii").splitlines() if table.exists() else []
    found = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith(" kB")}
    return {"total_bytes": found.get("MemTotal"), "available_bytes": found.get("MemAvailable")}


def _without_folders(text: str) -> str:
    """Return a message with the names of files alone: folders may contain a person's name."""
    package = Path(commhooks.__file__).parent
    return _FOLDERS.sub("", text.replace(f"{package}{os.sep}", ""))


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    own, python, system, memory = (found[name] for name in ("commhooks", "python", "system", "memory"))
    yield "commhooks", f"{own['version']}, " + (f"commit {own['commit']}" if own["commit"] else "installed")
    yield "Python", f"{python['version']} ({python['implementation']})"
    yield from found["packages"].items()
    yield "system", ", ".join(filter(None, (system["name"], system["release"], system["libc"])))
    if memory["total_bytes"] is not None:
        available = memory["available_bytes"]
        free = f", {bytes_in_words(available)} available" if available is not None else ""
        yield "memory", f"{bytes_in_words(memory['total_bytes'])}{free}"
    if "error" in found:
        yield "error", found["error"]
    else:
        yield from _rows_of_torch(found)
    for name, value in found["variables"].items():
        yield name, "is set" if value is None else value


def _rows_of_torch(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    processor, cuda, versions = found["processor"], found["cuda"], found["versions"]
    yield "versions", versions["promise"]
    yield "tried", _in_one_line(versions["tried"])
    missing = [f"{name} ({file})" for file, names in versions["missing"].items() for name in names]
    yield (
        "private names",
        f"this PyTorch lacks {', '.join(missing)}" if missing else "this PyTorch has all that are used",
    )
    yield "processor", f"{processor['name']}, {processor['capability']}"
    yield "cores", f"{processor['usable_cores']} of {processor['cores']} usable, load {processor['load']}"
    yield "threads", f"{processor['threads']} for one computation of PyTorch"
    yield "backends", ", ".join(name for name, there in found["backends"].items() if there) or "none"
    built = f"PyTorch is built for {cuda['built_for']}" if cuda["built_for"] else "PyTorch is built without it"
    yield "CUDA", f"{built}, {counted(len(cuda['devices']), 'device')}"
    if cuda["nccl"]:
        yield "NCCL", cuda["nccl"]
    for number, one in enumerate(cuda["devices"]):
        memory = bytes_in_words(one["memory_bytes"])
        yield f"CUDA device {number}", f"{one['name']}, {memory}, compute capability {one['capability']}"
    yield "compiled passes", found["compiled_passes"].removeprefix("compiled passes: ")


def _in_one_line(tried: Mapping[str, Any] | None) -> str:
    if tried is None:
        return "no, see docs/versions.md for those that were"
    passed, failed, _ = (sum(counts) for counts in zip(*tried["parts"].values(), strict=True))
    return f"on {tried['date']} with Python {tried['python']}: {counted(passed, 'test')} passed, {failed} failed"
