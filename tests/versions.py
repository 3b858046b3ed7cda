"""Try another PyTorch in an environment of its own: `make test-torch TORCH=2.15.0 PYTHON=python3.12`.

`python -m tests.versions TORCH` builds the environment, runs the tests that depend on PyTorch inside it, prints what
passed by part, and removes the environment. With `--page` the row is added to commhooks/experiments/versions.json, and
docs/versions.md is written from it; without a version, the page alone. Outside the environment Python is enough.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "commhooks" / "experiments" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
NEEDED = (
    "typer rich matplotlib scikit-learn tensorboard jinja2 pandas pyyaml pytest pytest-timeout pytest-xdist hypothesis "
    "expecttest psutil jsonschema"
)
"""Beside torch, numpy and scipy: what imports of the tests below need."""
PARTS = {
    "ddp_core": "tests/ddp_core",
    "parity": "tests/parity",
    "hooks": (
        "tests/commhooks/test_hooks.py tests/commhooks/test_registration.py tests/commhooks/test_wrapped_hooks.py "
        "tests/commhooks/test_optimizers.py tests/commhooks/test_amp.py tests/commhooks/test_failure.py"
    ),
    "attach": (
        "tests/commhooks/test_refusals.py tests/commhooks/test_replacement.py tests/commhooks/test_guards.py "
        "tests/commhooks/test_odd_parameters.py tests/commhooks/test_sparse.py "
        "tests/commhooks/test_python_groups.py tests/commhooks/test_forks.py"
    ),
    "guard": "tests/guard",
    "compile": "tests/commhooks/test_compile.py tests/commhooks/test_compiled.py",
    "laws": "tests/commhooks/test_laws.py",
    "exchanger": "tests/commhooks/test_exchanger.py tests/commhooks/test_exchangers.py",
    "checkpoints": (
        "tests/commhooks/test_checkpoint_files.py tests/commhooks/test_checkpoint_saving.py "
        "tests/commhooks/test_distributed_checkpoint.py tests/commhooks/test_resume.py "
        "tests/commhooks/test_state_dict.py"
    ),
    "DiLoCo": "tests/diloco",
    "FSDP2": (
        "tests/sharded tests/commhooks/test_sharded_steps.py tests/commhooks/test_adapters.py "
        "tests/test_examples.py::test_a_sharded_model_resumes_bit_for_bit"
    ),
    "README": (
        "tests/test_docs.py::test_a_whole_script_runs_under_torchrun "
        "tests/test_docs.py::test_the_readme_has_no_relative_link_and_every_file_that_it_names_exists "
        "tests/test_examples.py::test_plain_ddp_resumes_bit_for_bit "
        "tests/test_examples.py::test_a_compressor_of_your_own_trains_on_pytorchs_ddp"
    ),
    "commands": (
        "tests/experiments/test_compare.py::test_pytorchs_hooks_move_the_bytes_of_ours_and_learn_the_same "
        "tests/experiments/test_environment.py tests/test_versions.py"
    ),
}
"""The parts of the promise, and the tests that show each."""
EVERY_ROW = "not soak and not gpu and not bench and not torch_suite and not frameworks and not virtual_device"
"""What `make test` runs, and what it leaves to `make test-all`."""
SHORT = {
    "hooks": "tests/commhooks/test_registration.py",
    "FSDP2": "tests/sharded/test_attach.py",
    "commands": "tests/test_versions.py",
}
"""What most often fails with a new version: names that it no longer has, registration, and FSDP2."""
MATHEMATICS = ("loss", "unbiased", "convergence")
"""Laws that repeat a compressor many times, and ask little of PyTorch."""
PROMISE = runpy.run_path(str(ROOT / "commhooks" / "experiments" / "versions.py"))
"""The module, run by its path: to import commhooks takes torch."""


def main() -> int:
    """Try one version, or write the page; return 0 if all tests passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("torch", nargs="?", help="the version to install, such as 2.15.0")
    parser.add_argument("--page", action="store_true", help="add the row to the record, and write the page")
    parser.add_argument("--keep", action="store_true", help="keep the environment")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--short", action="store_true", help="only what most often fails")
    asked = parser.parse_args()
    if asked.torch is None:
        write_page(json.loads(ROWS.read_text(encoding="utf-8")))
        return 0
    if asked.page and (asked.part or asked.short):
        parser.error("--page needs a row of all parts; leave --part and --short out")
    folder = ROOT / f".venv-torch-{asked.torch}-{platform.python_version()}"
    try:
        if not (folder / "bin" / "python").exists():  # else it was kept
            build(folder, asked.torch)
        parts = {part: PARTS[part] for part in asked.part or parts_with(asked.torch)}
        row = run(folder, asked.torch, SHORT if asked.short else parts)
    finally:
        if not asked.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(lines_of(row)))
    if asked.page:
        add(row)
    return int(any(count[1] for count in row["parts"].values()))


def parts_with(torch: str) -> list[str]:
    """Return the parts that a version is for."""
    is_too_old = PROMISE["numbers_of"](torch)[:2] < PROMISE["FSDP2"].oldest
    return [part for part in PARTS if not (is_too_old and part == "FSDP2")]


def build(folder: Path, torch: str) -> None:
    """Make an environment with this version, what it brings, and everything else as constraints.txt says."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    if subprocess.run([*pip, "install", "--quiet", f"torch=={torch}"], check=False).returncode:
        raise SystemExit(f"PyTorch {torch} could not be installed for Python {platform.python_version()}: see above")
    listed = subprocess.run([*pip, "list", "--format=json"], check=True, capture_output=True, text=True).stdout
    brought = {_plain(one["name"]) for one in json.loads(listed)}  # an old torch asks for an old sympy
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pin for pin in pins if _plain(pin.split("==")[0]) not in brought))
        constraints.flush()
        wanted = ["numpy", "scipy", "setuptools", *NEEDED.split()]
        subprocess.run([*pip, "install", "--quiet", "-c", constraints.name, *wanted], check=True)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def run(folder: Path, torch: str, parts: Mapping[str, str]) -> dict[str, Any]:
    """Run the tests of these parts in the environment; return a row of the table."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        tests = [test for tests in parts.values() for test in tests.split()]
        command = [str(folder / "bin" / "python"), "-m", "pytest", "-p", "tests.versions"]
        options = ["-q", "-n", "2", "--dist", "worksteal", "--continue-on-collection-errors", f"--junitxml={report}"]
        options += [] if parts is SHORT else ["-m", EVERY_ROW]
        options += ["--timeout-method=thread"]  # which ends a test that hangs in C++, as PyTorch 2.6 may at its end
        ended = subprocess.run([*command, *options, *tests], cwd=ROOT, env=_environment(), check=False)
        if ended.returncode not in (0, 1):  # 1: some tests failed
            raise SystemExit(f"pytest did not come to its end with PyTorch {torch}: see above")
        return {
            "torch": torch,
            "python": platform.python_version(),
            "date": datetime.date.today().isoformat(),
            "minutes": round((time.monotonic() - began) / 60, 1),
            **counted(ElementTree.parse(report).getroot(), parts),
        }


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def counted(report: ElementTree.Element, parts: Iterable[str]) -> dict[str, Any]:
    """Return passed, failed and skipped tests of each part, and the names of those that failed."""
    counts = {part: Counter[str]() for part in parts}
    failed = []
    for test in report.iter("testcase"):
        name = f"{test.get('classname')}.{test.get('name')}".strip(".")
        kinds = {kind.tag for kind in test}
        result = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[part_of(name, counts)][result] += 1
        failed += [name] if result == "failed" else []
    return {
        "parts": {p: [c["passed"], c["failed"], c["skipped"]] for p, c in counts.items()},
        "failed": sorted(failed),
    }


def part_of(name: str, parts: Iterable[str]) -> str:
    """Return the part to which a test belongs, by its dotted name."""
    places = [(_dotted(place), part) for part in parts for place in PARTS[part].split()]
    found = max((one for one in places if f"{name}.".startswith((f"{one[0]}.", f"{one[0]}["))), default=None)
    if found is None:
        raise SystemExit(f"{name} belongs to no part of tests/versions.py")
    return found[1]


def _dotted(place: str) -> str:
    return place.replace(".py", "").replace("::", ".").replace("/", ".")


def lines_of(row: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each part: the version, the part, and what passed, failed and was skipped."""
    for part, (passed, failed, skipped) in row["parts"].items():
        counts = f"{passed} passed, {failed} failed, {skipped} skipped"
        yield f"PyTorch {row['torch']}, Python {row['python']} × {part}: {counts}"
    yield from (f"failed: {name}" for name in row["failed"])


# --- the page ---------------------------------------------------------------------------------------------------------


def add(row: dict[str, Any]) -> None:
    """Put a row in place of an older one with the same versions, and write the page."""
    rows = json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.exists() else []
    rows = [other for other in rows if _key(other) != _key(row)] + [row]
    rows.sort(key=_key)
    ROWS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    write_page(rows)


def _key(row: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a row's versions, as numbers; of Python without the last."""
    return PROMISE["numbers_of"](row["python"])[:2], PROMISE["numbers_of"](row["torch"])


def write_page(rows: list[dict[str, Any]]) -> None:
    """Write the page from the rows."""
    PAGE.write_text(page(rows), encoding="utf-8")


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page in Markdown: what stands above the table, and the rows."""
    text = PAGE.read_text(encoding="utf-8").partition("\n| PyTorch |")[0]
    heads = ["PyTorch", "Python", "date", *PARTS]
    table = [f"| {' | '.join(heads)} |", f"| {' | '.join(['---'] * len(heads))} |"]
    for row in rows:
        cells = [_cell(row["parts"].get(part)) for part in PARTS]
        table.append(f"| {' | '.join([row['torch'], row['python'], row['date'], *cells])} |")
    return "\n".join([text, *table, ""])


def _cell(count: list[int] | None) -> str:
    if count is None:
        return "refused"
    passed, failed, _ = count
    return f"{passed}, **{failed} failed**" if failed else str(passed)


# --- a plugin of pytest -----------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep one row of the laws for each class of compressor and of codec, without what is mathematics alone.

    FSDP2 is left out where it is not promised.
    """
    from commhooks.language.compressor import inner_of

    if metadata.version("torch") not in PROMISE["FSDP2"]:
        items[:] = [item for item in items if "guide/sharded.md" not in item.name]
    first: dict[object, object] = {}
    kept = []
    for item in items:
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")  # type: ignore[attr-defined]
        if case is not None and item.path.name == "test_laws.py":
            compressor = case.make()
            while inner := inner_of(compressor):
                compressor = inner[0]
            form = type(compressor), type(getattr(compressor, "codec", None))
            law = str(item.callspec.params.get("law"))  # type: ignore[attr-defined]
            if first.setdefault(form, case) is not case or law in MATHEMATICS:
                continue
        kept.append(item)
    items[:] = kept


if __name__ == "__main__":
    sys.exit(main())
