"""The script that proves that a change of structure changes no bit."""

from __future__ import annotations

import torch

from tests.golden import Digests, compare, digest_of
from tests.golden_ways import entries_of


def test_every_bit_counts() -> None:
    ones = torch.ones(3, dtype=torch.bfloat16)
    other = ones.clone()
    other[2] = 1 + 2**-7
    assert digest_of([ones]) == digest_of([ones.clone()]) != digest_of([other])
    assert digest_of([torch.tensor(0.0)]) != digest_of([torch.tensor(-0.0)])


def test_what_differs_is_named_and_what_is_new_is_not() -> None:
    before: Digests = {"a": {"means": ["1", "2"], "state": {"w, Q": "3"}}, "b": {"means": ["1"], "state": {}}}
    assert compare(before, before | {"c": {"means": []}}) == []
    after: Digests = {"a": {"means": ["1", "9"], "state": {"w, Q": "4"}}}
    assert compare(before, after) == ["b: not there any more", "a: means 1, state w, Q"]
    assert compare({"a": {"means": "12345"}}, {"a": {"means": "21354"}}) == ["a: means 0, means 1, means 3 and 1 more"]


def test_what_a_layout_says_is_no_part_of_an_entrys_name() -> None:
    saved = {
        "groups": {"the model": {"replicated": {"w": {"Q": torch.ones(1)}}, "local": {"rank1": {"w": [torch.ones(2)]}}}}
    }
    assert {name: one.numel() for name, one in entries_of(saved).items()} == {
        "the model, w, Q": 1,
        "the model, w, 0": 2,
    }
