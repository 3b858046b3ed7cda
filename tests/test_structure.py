"""How the packages are built: circles and chains of imports, long files, how much a step calls, and tests' order."""

from __future__ import annotations

import graphlib
from pathlib import Path

import pytest

from tests.conftest import LONG_FILES, in_any_order
from tests.step_calls import COMPRESSORS, Calls, calls_of_a_step, files_of
from tests.structure import (
    PACKAGES,
    STUDIES,
    attributes_of,
    between_folders,
    circles,
    imports_of,
    longest_chain,
    named_once,
    private_functions,
    short_and_named_once,
    sources_of,
    table,
    words_of,
)

MOST_FILES_AND_CALLS = {"all-reduce": (22, 132), "powersgd": (29, 322)}
"""Of a steady-state step."""
LONGEST_CHAIN = {"commhooks": 8, "ddp_core": 9, "experiments": 8, STUDIES: 8}
"""Folders, each of which imports the next."""
SHORT_AND_NAMED_ONCE = {"commhooks": 0.06, "experiments": 0.06, STUDIES: 0.06}
"""As a share of all private functions."""


def test_each_seed_has_an_order_of_test_files_in_which_long_ones_come_first() -> None:
    short, long = [f"tests/test_{n}.py" for n in range(20)], [f"tests/{file}" for file in LONG_FILES]
    orders = [in_any_order(set(short + long), seed) for seed in ("1", "1", "2")]
    assert orders[0] == orders[1] and all(set(order[: len(long)]) == set(long) for order in orders)
    assert orders[0][: len(long)] != orders[2][: len(long)] and orders[0][len(long) :] != orders[2][len(long) :]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_import_each_other_in_a_circle(package: str) -> None:
    assert circles(imports_of(sources_of(package))) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_import_each_other_in_no_circle_and_in_short_chains(package: str) -> None:
    folders = between_folders(imports_of(sources_of(package)))
    assert circles(folders) == []
    assert len(longest_chain(folders)) <= LONGEST_CHAIN[package], longest_chain(folders)


def test_no_package_imports_studies() -> None:
    imports = imports_of([source for package in PACKAGES for source in sources_of(package)])
    studies = {source.module for source in sources_of(STUDIES)}
    assert not {importer: found for importer in imports.keys() - studies if (found := imports[importer] & studies)}


def test_one_file_asks_about_devices() -> None:
    asking = {str(s.path) for s in sources_of("commhooks") if {"is_cuda", "cuda", "nccl"} & words_of(s)}
    assert asking == {"commhooks/devices.py"}


@pytest.mark.parametrize("package", SHORT_AND_NAMED_ONCE)
def test_few_functions_are_short_and_named_once(package: str) -> None:
    sources = sources_of(package)
    found = short_and_named_once(sources)
    assert len(found) <= SHORT_AND_NAMED_ONCE[package] * len(private_functions(sources)), found


@pytest.fixture(scope="module")
def calls_by_compressor() -> dict[str, Calls]:
    return calls_of_a_step()


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_a_step_passes_through_few_files_and_calls(compressor: str, calls_by_compressor: dict[str, Calls]) -> None:
    calls = calls_by_compressor[compressor]
    most_files, most_calls = MOST_FILES_AND_CALLS[compressor]
    assert len(files_of(calls)) <= most_files, sorted(files_of(calls))
    assert calls.total() <= most_calls, calls.most_common()


def test_calls_are_those_of_both_threads(calls_by_compressor: dict[str, Calls]) -> None:
    called = {name for _, name in calls_by_compressor["all-reduce"]}
    assert {"attachment_hook", "AllReduceMean.compress"} <= called, "the first by DDP, the second by the worker"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a package of four files: `one` imports `two`, which imports the package and, for types only, `one`."""
    folder = tmp_path / "sample"
    folder.mkdir()
    files = {
        "__init__": 'from sample.three import THREE\n\n__all__ = ["THREE"]\n',
        "one": "import sample.two\n\n\ndef _called():\n    return sample.two\n\n\nNOT, TWICE = _called(), 1\n",
        "two": "from typing import TYPE_CHECKING\n\nfrom . import THREE\n\nif TYPE_CHECKING:\n    from . import one\n",
        "three": '"""Three.\n\nLines.\n"""\n\nTHREE = (\n    1,  # not on a line of its own\n)\n"""Text."""\n# Why.\n',
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


def test_the_longest_chain_takes_the_longest_way_and_there_is_none_in_a_circle() -> None:
    imports = {"a": {"b", "c"}, "b": {"c"}, "c": set[str](), "d": {"c"}}
    assert longest_chain(imports) == ["a", "b", "c"]
    with pytest.raises(graphlib.CycleError):
        longest_chain(imports | {"c": {"a"}})


def test_docstrings_comments_and_blank_lines_are_no_code(package: Path) -> None:
    three = next(source for source in sources_of("sample", package) if source.module == "sample.three")
    assert (three.lines, three.code, three.comments) == (10, {6, 7, 8}, 1)


def test_words_are_names_and_strings_without_comments_and_longer_texts(package: Path) -> None:
    (package / "sample" / "four.py").write_text('"""Of cuda."""\n\nx = a.is_cuda or b == "nccl"  # cuda\n')
    four = next(source for source in sources_of("sample", package) if source.module == "sample.four")
    assert words_of(four) == {"x", "a", "is_cuda", "b", "nccl", "Of cuda."}


def test_uses_of_private_functions_are_counted_without_their_definition(package: Path) -> None:
    assert named_once(sources_of("sample", package)) == ["_called"]
    (package / "sample" / "four.py").write_text("from sample.one import _called\n")
    assert named_once(sources_of("sample", package)) == []


def test_functions_of_one_name_count_each_if_they_are_short(package: Path) -> None:
    long = "def _called():\n    a = 1\n    b = a\n    return b\n"
    (package / "sample" / "four.py").write_text(f"class A:\n    def _called(self):\n        pass\n\n\n{long}")
    assert short_and_named_once(sources_of("sample", package)) == ["_called", "_called"]


def test_attributes_are_counted_once_wherever_they_are_assigned(tmp_path: Path) -> None:
    methods = "self.a = self.b = 1; self.a += 1", "self.c: int = 2; (self.d, other.e) = self.f"
    text = "class Sample:\n    field: int\n" + "\n".join(
        f"    def m{i}(self, other): {body}" for i, body in enumerate(methods)
    )
    (tmp_path / "sample.py").write_text(text)
    assert attributes_of("Sample", tmp_path / "sample.py") == {"a", "b", "c", "d", "field"}


def test_the_table_has_a_line_for_every_file(package: Path) -> None:
    assert sum(line.startswith("sample/") for line in table("sample", package).splitlines()) == 4
