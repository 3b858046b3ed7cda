"""The packages meet at one signature (docs, architecture): who may import what, read from the sources."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from tests.structure import (
    EXPERIMENTS,
    PACKAGES,
    STUDIES,
    Source,
    between_folders,
    circles,
    imports_of,
    sources_of,
    words_of,
)

TOP = ("commhooks", "ddp_core", EXPERIMENTS)
GUARD = "ddp_core.guard"  # it knows wrappers and process groups, no compression: the one part that both use
MAY_IMPORT = {
    "ddp_core": {"torch"},
    "commhooks": {"torch", "numpy"},
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


FILES = [source for package in (*TOP, STUDIES) for source in sources_of(package)]


def inside(folder: str) -> list[Source]:
    """Return the files of a package or a folder, such as "commhooks.native", without another package inside it."""
    others = [package for package in PACKAGES if package.startswith(f"{folder}.")]
    found = [source for source in FILES if is_within(source.module, folder)]
    return [source for source in found if not any(is_within(source.module, other) for other in others)]


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def frameworks_of(source: Source) -> set[str]:
    return FRAMEWORKS.get(source.path.stem, set()) if source.path.parent.name == "integrations" else set()


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_package_imports_only_itself_the_standard_library_and_what_it_may(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package} | set(sys.stdlib_module_names)
    strangers = [
        f"{source.path}: {module}"
        for source in inside(package)
        for module in source.imported
        if module.split(".")[0] not in allowed | frameworks_of(source) and not is_within(module, GUARD)
    ]
    assert not strangers, f"{package} may import {sorted(MAY_IMPORT[package])} only"


@pytest.mark.parametrize(
    ("package", "other"), [("commhooks", EXPERIMENTS), ("ddp_core", EXPERIMENTS), *((one, "tests") for one in TOP)]
)
def test_nothing_imports_what_is_above_it(package: str, other: str) -> None:
    assert not [source.path for source in inside(package) for name in source.imported if is_within(name, other)]


@pytest.mark.parametrize("room", ["hooks", "saving.checkpoints", "integrations"])
def test_only_the_public_names_are_above_the_top_rooms(room: str) -> None:
    """Hooks may import every other room but those that stand above; what is below must work without them."""
    public = {"commhooks", "commhooks.default_hooks", "commhooks.lockstep", "commhooks.powersgd_hook"}
    importers = {
        source.module
        for source in inside("commhooks")
        for module in source.imported
        if is_within(module, f"commhooks.{room}") and not is_within(source.module, f"commhooks.{room}")
    }
    above = ("commhooks.control", "commhooks.integrations", "commhooks.diloco", "commhooks.sharded")
    assert {name for name in importers if not any(is_within(name, one) for one in above)} <= public


def test_the_runtime_imports_no_law() -> None:
    importers = {
        source.module
        for source in inside("commhooks")
        for name in source.imported
        if is_within(name, "commhooks.testing")
    }
    assert not [one for one in importers if not is_within(one, "commhooks.testing")]


def test_compiled_passes_need_torch_and_the_errors_alone() -> None:
    needed = ("commhooks.native", "commhooks.errors", "torch")
    assert not [
        f"{source.path}: {module}"
        for source in inside("commhooks.native")
        for module in source.imported
        if not any(is_within(module, one) for one in needed) and module.split(".")[0] not in sys.stdlib_module_names
    ]


@pytest.mark.parametrize(
    ("folder", "out_of_reach"),
    [
        ("commhooks.compressors", OUT_OF_REACH_OF_A_COMPRESSOR),
        ("commhooks.wrappers", OUT_OF_REACH_OF_A_COMPRESSOR),
    ],
)
def test_what_only_computes_reaches_no_process_group_clock_or_log(folder: str, out_of_reach: tuple[str, ...]) -> None:
    reached = [
        f"{source.path}: {name}"
        for source in inside(folder)
        for name in (*source.imported, *source.dotted_names)
        for forbidden in out_of_reach
        if is_within(name, forbidden)
    ]
    assert not reached, "a compressor touches tensors and yields requests; what else it needs comes in its context"


def test_all_is_sorted_and_names_what_exists() -> None:
    for source in FILES:
        if source.path.name != "__main__.py" and not frameworks_of(source):
            module = importlib.import_module(source.module)
            public = getattr(module, "__all__", None)
            assert public is not None or source.module not in MAY_IMPORT, f"{source.module} must say what is public"
            assert list(public or []) == sorted(set(public or [])), source.module
            assert not [name for name in public or [] if not hasattr(module, name)], source.module


@pytest.mark.parametrize(
    "source", [source for source in FILES if frameworks_of(source)], ids=lambda source: source.module
)
def test_an_integration_says_what_to_install(source: Source) -> None:
    framework = "lightning" if "lightning" in frameworks_of(source) else source.path.stem
    if importlib.util.find_spec(framework) is not None:
        pytest.skip("its framework is installed, and tests/frameworks imports it")
    with pytest.raises(ImportError, match=rf"pip install '{framework}(-nightly)?(\[\w+\])?>=\d"):
        importlib.import_module(source.module)


@pytest.mark.parametrize("package", PACKAGES)
def test_neither_files_nor_folders_import_each_other_in_a_circle(package: str) -> None:
    imports = imports_of(sources_of(package))
    assert circles(imports) == circles(between_folders(imports)) == []


def test_no_package_imports_studies() -> None:
    imports = imports_of([source for package in PACKAGES for source in sources_of(package)])
    studies = {source.module for source in sources_of(STUDIES)}
    assert not {importer: found for importer in imports.keys() - studies if (found := imports[importer] & studies)}


def test_one_file_asks_about_devices() -> None:
    asking = {str(s.path) for s in sources_of("commhooks") if {"is_cuda", "cuda", "nccl"} & words_of(s)}
    assert asking == {"commhooks/devices.py"}
