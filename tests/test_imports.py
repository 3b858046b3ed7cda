"""The packages meet at one signature (docs, architecture): who may import what, read from the sources."""

from __future__ import annotations

import graphlib
import importlib
import importlib.util
import sys

import pytest

from tests.structure import EXPERIMENTS, PACKAGES, STUDIES, Source, between_folders, imports_of, sources_of, words_of

TOP = ("commhooks", "ddp_core", EXPERIMENTS)
GUARD = "ddp_core.guard"  # it knows wrappers and process groups, no compression: the one part that both use
MAY_IMPORT = {
    "ddp_core": ("ddp_core", "torch", GUARD),
    "commhooks": ("commhooks", "torch", "numpy", GUARD),
    "commhooks.native": ("commhooks.native", "commhooks.errors", "torch"),
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
OUT_OF_REACH = {
    "commhooks.compressors": OUT_OF_REACH_OF_A_COMPRESSOR,
    "commhooks.wrappers": OUT_OF_REACH_OF_A_COMPRESSOR,
    "commhooks": (EXPERIMENTS, STUDIES, "tests"),
    "ddp_core": ("commhooks", STUDIES, "tests"),
    EXPERIMENTS: (STUDIES, "tests"),
}
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


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_the_standard_library_and_what_it_may(folder: str) -> None:
    strangers = [
        f"{source.path}: {module}"
        for source in inside(folder)
        for module in source.imported
        if module.split(".")[0] not in frameworks_of(source) | set(sys.stdlib_module_names)
        and not any(is_within(module, one) for one in MAY_IMPORT[folder])
    ]
    assert not strangers, f"{folder} may import {MAY_IMPORT[folder]} only"


@pytest.mark.parametrize("folder", OUT_OF_REACH)
def test_what_is_out_of_reach_is_not_used(folder: str) -> None:
    reached = [
        f"{source.path}: {name}"
        for source in inside(folder)
        for name in (*source.imported, *source.dotted_names)
        if any(is_within(name, forbidden) for forbidden in OUT_OF_REACH[folder])
    ]
    assert not reached, "what is above imports what is below; what a compressor needs beside comes in its context"


PUBLIC = {"commhooks", "commhooks.default_hooks", "commhooks.lockstep", "commhooks.powersgd_hook"}
ABOVE = ("commhooks.control", "commhooks.integrations", "commhooks.diloco", "commhooks.sharded")


@pytest.mark.parametrize(
    ("room", "public", "above"),
    [*((room, PUBLIC, ABOVE) for room in ("hooks", "saving.checkpoints", "integrations")), ("testing", set(), ())],
)
def test_only_the_public_names_are_above_the_top_subpackages(
    room: str, public: set[str], above: tuple[str, ...]
) -> None:
    """Hooks may import every other room but those that stand above; what is below must work without them."""
    importers = {
        source.module
        for source in inside("commhooks")
        for module in source.imported
        if is_within(module, f"commhooks.{room}") and not is_within(source.module, f"commhooks.{room}")
    }
    assert {name for name in importers if not any(is_within(name, one) for one in above)} <= public


def test_all_is_sorted_and_names_what_exists() -> None:
    for source in FILES:
        if source.path.name != "__main__.py" and not frameworks_of(source):
            module = importlib.import_module(source.module)
            public = getattr(module, "__all__", None)
            assert public is not None or source.module not in ("commhooks", "ddp_core"), (
                f"{source.module} must say what is public"
            )
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
    for graph in (imports, between_folders(imports)):
        graphlib.TopologicalSorter(graph).prepare()  # CycleError names a circle


def test_one_file_asks_about_devices() -> None:
    asking = {str(s.path) for s in sources_of("commhooks") if {"is_cuda", "cuda", "nccl"} & words_of(s)}
    assert asking == {"commhooks/devices.py"}
