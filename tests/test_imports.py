"""The packages meet at one signature (docs, architecture): who may import what, read from the sources."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("commhooks", "ddp_core", "experiments")
GUARD = "ddp_core.guard"  # it knows wrappers and process groups, no compression: the one file that both use
MAY_IMPORT = {
    "ddp_core": {"torch"},
    "commhooks": {"torch", "numpy", "scipy"},
}
# An integration may import the framework that it is named after; ddp_core, which some offer inside it, too.
FRAMEWORKS = {
    "lightning": {"lightning", "ddp_core"},
    "lightning_diloco": {"lightning"},
    "fabric": {"lightning", "ddp_core"},
    "accelerate": {"accelerate"},
    "transformers": {"transformers"},
    "ray": {"ray"},
    "torchft": {"torchft"},
}
# A compressor touches tensors and yields requests: nothing that differs between two runs is within reach.
OUT_OF_REACH_OF_A_COMPRESSOR = ("torch.distributed", "logging", "time", "random", "threading")


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the full name of every module that the file names in an import, wherever in the file it stands."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def dotted_names(path: Path) -> Iterator[str]:
    """Yield every dotted name the file spells out, such as `torch.distributed.all_reduce`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def frameworks_of(path: Path) -> set[str]:
    return FRAMEWORKS[path.stem] if path.parent.name == "integrations" and path.stem in FRAMEWORKS else set()


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_package_imports_only_itself_the_standard_library_and_what_it_may(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package} | set(sys.stdlib_module_names)
    strangers = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in sources(package)
        for module in imported_modules(path)
        if module.split(".")[0] not in allowed | frameworks_of(path) and not is_within(module, GUARD)
    ]
    assert not strangers, f"{package} may import {sorted(MAY_IMPORT[package])} only"


@pytest.mark.parametrize("package", ["commhooks", "ddp_core"])
def test_nothing_imports_experiments(package: str) -> None:
    assert not [
        path for path in sources(package) for module in imported_modules(path) if is_within(module, "experiments")
    ]


def test_no_package_imports_tests() -> None:
    assert not [
        path
        for package in PACKAGES
        for path in sources(package)
        for m in imported_modules(path)
        if is_within(m, "tests")
    ]


@pytest.mark.parametrize("room", ["hooks", "checkpoints", "integrations"])
def test_only_the_public_names_are_above_the_top_rooms(room: str) -> None:
    """Hooks may import every other room but those that stand above; what is below must work without them."""
    public = {"commhooks", "commhooks.default_hooks", "commhooks.powersgd_hook"}
    public.add("commhooks.planning.payloads")  # it runs a whole exchange, for the estimate, which users call
    importers = {
        module_name(path)
        for path in sources("commhooks")
        for module in imported_modules(path)
        if is_within(module, f"commhooks.{room}") and not is_within(module_name(path), f"commhooks.{room}")
    }
    above = ("commhooks.integrations", "commhooks.planning", "commhooks.seldom", "commhooks.sharded")
    assert {name for name in importers if not any(is_within(name, one) for one in above)} <= public


def test_compiled_passes_need_torch_and_the_errors_alone() -> None:
    needed = ("commhooks.native", "commhooks.errors", "torch")
    assert not [
        f"{path.relative_to(ROOT)}: {module}"
        for path in sources("commhooks/native")
        for module in imported_modules(path)
        if not any(is_within(module, one) for one in needed) and module.split(".")[0] not in sys.stdlib_module_names
    ]


def test_bucketing_is_pure() -> None:
    path = ROOT / "ddp_core" / "bucketing.py"
    names = [*imported_modules(path), *dotted_names(path)]
    assert not [name for name in names if is_within(name, "torch.distributed") or is_within(name, "dist")]


@pytest.mark.parametrize("folder", ["commhooks/compressors", "commhooks/wrappers"])
def test_compressors_reach_no_process_group_clock_or_log(folder: str) -> None:
    reached = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources(folder)
        for name in (*imported_modules(path), *dotted_names(path))
        for forbidden in OUT_OF_REACH_OF_A_COMPRESSOR
        if is_within(name, forbidden)
    ]
    assert not reached, "a compressor touches tensors and yields requests; what else it needs comes in its context"


@pytest.mark.parametrize(
    "path",
    [p for package in PACKAGES for p in sources(package) if p.name != "__main__.py" and not frameworks_of(p)],
    ids=module_name,
)
def test_all_is_sorted_and_names_what_exists(path: Path) -> None:
    module = importlib.import_module(module_name(path))
    public = getattr(module, "__all__", None)
    if public is None:
        assert module.__name__ not in MAY_IMPORT, f"{module.__name__} must say what is public in __all__"
        return
    assert list(public) == sorted(set(public))
    assert not [name for name in public if not hasattr(module, name)]


@pytest.mark.parametrize("path", [path for path in sources("commhooks") if frameworks_of(path)], ids=module_name)
def test_an_integration_says_what_to_install(path: Path) -> None:
    framework = "lightning" if "lightning" in frameworks_of(path) else path.stem
    if importlib.util.find_spec(framework) is not None:
        pytest.skip("its framework is installed, and tests/frameworks imports it")
    with pytest.raises(ImportError, match=rf"pip install '{framework}(-nightly)?(\[\w+\])?>=\d"):
        importlib.import_module(module_name(path))


def test_importing_commhooks_takes_little_more_than_importing_torch() -> None:
    """Who only registers a hook waits for none of these; what needs them imports them when it is called."""
    heavy = ("scipy", "matplotlib", "rich", "typer", "pandas", "sklearn", "torch._dynamo", "torch.utils.tensorboard")
    program = f"import sys, commhooks; print(*(name for name in {heavy!r} if name in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []
