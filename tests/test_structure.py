"""The packages import themselves in no circle."""

from __future__ import annotations

import pytest

from tests.structure import PACKAGES, STUDIES, between_folders, circles, imports_of, sources_of, words_of


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
