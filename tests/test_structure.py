"""The packages import themselves in no circle."""

from __future__ import annotations

from pathlib import Path

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


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a package of four files: `one` imports `two`, which imports the package and, for types only, `one`."""
    folder = tmp_path / "sample"
    folder.mkdir()
    files = {
        "__init__": 'from sample.three import THREE\n\n__all__ = ["THREE"]\n',
        "one": "import sample.two\n\n\ndef _called():\n    return sample.two\n\n\nNOT, TWICE = _called(), 1\n",
        "two": "from typing import TYPE_CHECKING\n\nfrom . import THREE\n\nif TYPE_CHECKING:\n    from . import one\n",
        "three": "THREE = 1\n",
    }
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return tmp_path


def test_imports_name_files_and_a_package_only_for_what_it_defines(package: Path) -> None:
    assert imports_of(sources_of("sample", package)) == {
        "sample": {"sample.three"},
        "sample.one": {"sample.two"},
        "sample.two": {"sample", "sample.one"},
        "sample.three": set(),
    }


def test_circles_are_found_and_what_only_leads_to_one_is_not() -> None:
    chain = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str](), "e": {"f"}, "f": {"g"}, "g": {"e"}}
    assert circles(chain) == [["b", "c"], ["e", "f", "g"]]


def test_a_folder_counts_with_all_that_is_inside_it() -> None:
    imports = {"p": {"p.one"}, "p.one": {"p.two.x"}, "p.two": set[str](), "p.two.x": {"p.two"}, "p.two.y.z": {"p.one"}}
    assert between_folders(imports) == {"p": {"p.one"}, "p.one": {"p.two"}, "p.two": {"p.one"}}


def test_words_are_names_and_strings_without_comments_and_longer_texts(package: Path) -> None:
    (package / "sample" / "four.py").write_text('"""Of cuda."""\n\nx = a.is_cuda or b == "nccl"  # cuda\n')
    four = next(source for source in sources_of("sample", package) if source.module == "sample.four")
    assert words_of(four) == {"x", "a", "is_cuda", "b", "nccl", "Of cuda."}
