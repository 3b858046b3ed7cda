"""The script that proves that a change of structure changes no bit."""

from __future__ import annotations

import torch

from tests.golden import compare, digest_of


def test_every_bit_counts() -> None:
    ones = torch.ones(3, dtype=torch.bfloat16)
    other = ones.clone()
    other[2] = 1 + 2**-7
    assert digest_of([ones]) == digest_of([ones.clone()]) != digest_of([other])
    assert digest_of([torch.tensor(0.0)]) != digest_of([torch.tensor(-0.0)])


def test_what_differs_is_named_and_what_is_new_is_not() -> None:
    before = {"a": {"means": ["1", "2"], "state": ["3"]}, "b": {"means": ["1"], "state": []}}
    assert compare(before, before | {"c": {"means": []}}) == []
    after = {"a": {"means": ["1", "9"], "state": ["3"]}}
    assert compare(before, after) == ["b: not there any more", "a: means"]
