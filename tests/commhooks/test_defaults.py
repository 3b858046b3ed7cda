"""Defaults that a process may set concern the user's own tensors: what travels, and what is kept, has the same bits."""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cases import BY_NAME, FORMS
from tests.commhooks.defaults import DEFAULTS, digests_of_ranks
from tests.structure import sources_of
from tests.tiers import THOROUGH

ROOT = Path(__file__).resolve().parents[2]
MAKERS = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
"""The functions of torch that follow the process's default dtype or device."""


@functools.cache
def without(names: Sequence[str]) -> list[dict[str, str]]:
    found = digests_of_ranks("none", names)
    assert not [what for of_rank in found for what in of_rank.values() if " " in what]  # errors
    return found


@pytest.mark.parametrize(
    ("default", "names"),
    [
        pytest.param(default, names, id=f"{default}-{what}", marks=marks)
        for number, default in enumerate(list(DEFAULTS)[1:])
        for what, names, marks in (
            ("some forms", FORMS[number % 3 :: 3], ()),
            ("every form", FORMS, THOROUGH),
            ("every row", list(BY_NAME), pytest.mark.soak),
        )
    ],
)
def test_a_default_of_the_process_changes_no_bit(default: str, names: list[str]) -> None:
    expected = without(tuple(FORMS if len(names) < len(FORMS) else names))
    for found, plain in zip(digests_of_ranks(default, names), expected, strict=True):
        assert found == {way: plain[way] for way in found}


@pytest.mark.parametrize("package", ["commhooks", "ddp_core"])
def test_every_tensor_is_made_with_a_dtype_and_a_device(package: str) -> None:
    found = []
    for source in sources_of(package):
        for node in ast.walk(source.tree):
            match node:
                case ast.Call(ast.Attribute(ast.Name("torch"), maker), _, keywords) if maker in MAKERS:
                    missing = {"dtype", "device"} - {keyword.arg for keyword in keywords}
                    found += [f"{source.path}:{node.lineno}: no {what}" for what in sorted(missing)]
    assert not found
