"""Compressors by name, and by what `str` prints of them."""

from __future__ import annotations

import dataclasses
import sys
import types
from importlib.metadata import EntryPoint

import pytest
import torch

from commhooks import COMPRESSORS, ErrorFeedback, PerParameter, SettingsError, TopK, make_compressor, making
from commhooks.making import settings_of
from tests.cases import CASES, NEEDED, Case


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_str_prints_is_read_back(case: Case) -> None:
    compressor = case.make()
    assert make_compressor(str(compressor)) == compressor
    assert make_compressor(repr(compressor)) == compressor
    inside = PerParameter(rules=(("a-b.*", compressor),)) if not compressor.needs_whole_buckets else compressor
    assert make_compressor(str(inside)) == inside


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_name_makes_what_its_text_makes(name: str) -> None:
    settings = NEEDED.get(name, {})
    inside = ", ".join(f"{setting}={value}" for setting, value in settings.items())
    assert make_compressor(f"{name}({inside})") == make_compressor(name, **settings)


def test_only_what_differs_from_the_defaults_is_printed() -> None:
    assert str(make_compressor("top-k", ratio=0.02)) == "ErrorFeedback(inner=TopK(ratio=0.02))"
    assert str(make_compressor("fp16")) == "Cast(dtype=torch.float16)"
    assert make_compressor("ErrorFeedback(inner=top-k(ratio=1e-05, error_feedback=False), decay=0.5)") == ErrorFeedback(
        inner=TopK(ratio=1e-05), decay=0.5
    )


def test_settings_stand_inside_of_a_text_or_beside_a_name() -> None:
    assert make_compressor("top-k(ratio=0.1)", start_after=3) == make_compressor("top-k", ratio=0.1, start_after=3)
    assert {"ratio", "start_after", "wire", "error_feedback"} <= set(settings_of("top-k"))
    assert {"block", "server_feedback", "damping"} <= set(settings_of("sign"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Foreign(TopK):
    """A compressor of somebody else's."""


def test_a_class_of_another_package_is_named_with_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("somebodys_package")
    package.Foreign = Foreign  # type: ignore[attr-defined]  # a module's attributes are what is put there
    monkeypatch.setitem(sys.modules, "somebodys_package", package)
    monkeypatch.setattr(Foreign, "__module__", "somebodys_package")
    assert make_compressor("somebodys_package:Foreign", ratio=0.5) == Foreign(ratio=0.5)
    around = ErrorFeedback(inner=Foreign(ratio=0.5))
    assert str(around) == "ErrorFeedback(inner=somebodys_package:Foreign(ratio=0.5))"
    assert make_compressor(str(around)) == around
    with pytest.raises(SettingsError, match="has no setting 'rate'; .* Did you mean 'ratio'"):
        make_compressor("somebodys_package:Foreign", rate=1)


def test_entry_points_of_other_packages_are_names_too(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("their-top-k", f"{__name__}:Foreign", making.ENTRY_POINTS)
    monkeypatch.setattr(making, "entry_points", lambda group: [point] if group == "commhooks.compressors" else [])
    assert make_compressor("their-top-k", ratio=0.5) == Foreign(ratio=0.5)
    with pytest.raises(SettingsError, match="known are .*their-top-k.* Did you mean 'their-top-k'"):
        make_compressor("their-topk")


def test_wires_are_dtypes() -> None:
    wired = make_compressor("powersgd", rank=2, wire=torch.bfloat16)
    assert make_compressor("powersgd(rank=2, wire=torch.bfloat16)") == wired
    assert make_compressor(str(wired)) == wired
