"""Compressors by name, and by what `str` prints of them: one spelling, written and read."""

from __future__ import annotations

import dataclasses
import random
import sys
import types
from importlib.metadata import EntryPoint

import pytest
import torch

from commhooks import ErrorFeedback, PerParameter, SettingsError, StartAfter, make_compressor, making
from commhooks.compressors import TopK
from commhooks.language.compressor import loss_of_a_matrix
from tests.cases import CASES, Case, rows_of
from tests.commhooks.nestings import SHAPES, drawn
from tests.tiers import rows, thorough


@pytest.mark.parametrize("case", rows_of(CASES), ids=str)
def test_what_str_prints_is_read_back(case: Case) -> None:
    compressor = case.make()
    assert make_compressor(str(compressor)) == compressor
    assert make_compressor(repr(compressor)) == compressor
    assert str(make_compressor(repr(compressor))) == str(compressor)
    inside = PerParameter(rules=(("a-b.*", compressor),)) if not loss_of_a_matrix(compressor).of_bucket else compressor
    assert make_compressor(str(inside)) == inside


@pytest.mark.parametrize("seed", [*range(3), *rows(range(3, 20)), *thorough(range(20, 100))])
def test_what_str_prints_of_any_nesting_is_read_back(seed: int) -> None:
    compressor = drawn(random.Random(seed), {name: torch.empty(shape) for name, shape in SHAPES.items()}, world_size=4)
    assert make_compressor(str(compressor)) == compressor
    assert str(make_compressor(str(compressor))) == str(compressor)


@pytest.mark.parametrize(
    ("written", "also"),
    [
        ("top-k:ratio=0.02", "ErrorFeedback(inner=TopK(ratio=0.02))"),
        ("top-k", "TopK()"),
        ("top-k:error_feedback=False", "WithoutFeedback(inner=TopK())"),
        ("top-k:error_feedback=False", "without-feedback:inner=top-k"),
        ("top-k:decay=0.5", "error-feedback:inner=top-k,decay=0.5"),
        ("demo", "error-feedback:inner=(demo),decay=0.999"),
        ("demo:decay=1", "ErrorFeedback(inner=DeMo())"),
        ("sparse-loco", "ErrorFeedback(inner=SparseLoCo(), decay=0.95)"),
        ("hierarchical:inner=(powersgd:rank=4),size=2", "Hierarchical(inner=PowerSGD(rank=4), size=2)"),
        (
            "without-feedback:inner=(powersgd:start_after=3)",
            "WithoutFeedback(inner=StartAfter(inner=PowerSGD(), steps=3))",
        ),
        ("fp16", "Cast(dtype=torch.float16)"),
        ("bf16:error_feedback=True", "error-feedback:inner=(fp16:dtype=bf16)"),
        ("distro", "demo:k=4,one_bit=True,sign=True"),
        ("int8", "TwoHop(codec=Int8())"),
        ("int8:error_feedback=False,server_feedback=True", "WithoutFeedback(inner=TwoHop(codec=Int8()))"),
        ("int8:server_feedback=False", "two-hop:codec=(Int8),server_feedback=False"),
        ("int8:error_feedback=False", "without-feedback:inner=(int8:server_feedback=False)"),
        ("sign", "two-hop:codec=sign"),
        ("powersgd:rank=4,start_after=10,wire=bf16", "powersgd(start_after=10, rank=4, wire=torch.bfloat16)"),
        ("powersgd:skip=(a.*,b)", "powersgd:skip=a.*+b"),
        ("top-k:ratio=1", "top-k : ratio = 1.0"),
        ("hierarchical:inner=(top-k),size=2", "hierarchical:inner=top-k,size=2"),
        ("start-after:before=(fp16),inner=(sign),steps=3", "StartAfter(inner=sign, steps=3, before=(fp16))"),
        (
            "per-parameter:otherwise=(top-k:ratio=0.1,wire=None),rules=((bias,(fp16)),((match:dimensions=(2,)),(sign)))",
            "PerParameter(rules=(('bias', fp16()), (Match(dimensions=(2,)), sign())), otherwise=top-k(ratio=0.1))",
        ),
    ],
)
def test_what_means_the_same_is_written_alike(written: str, also: str) -> None:
    assert make_compressor(also) == make_compressor(written)
    assert str(make_compressor(also)) == str(make_compressor(written)) == written.replace(",wire=None", "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Foreign(TopK):
    """A compressor of somebody else's."""

    limit: float | None = 1.0


def test_a_class_of_another_package_is_named_with_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("somebodys_package")
    package.Foreign = Foreign  # type: ignore[attr-defined]  # a module's attributes are what is put there
    monkeypatch.setitem(sys.modules, "somebodys_package", package)
    monkeypatch.setattr(Foreign, "__module__", "somebodys_package")
    assert make_compressor("somebodys_package:Foreign", ratio=0.5) == Foreign(ratio=0.5)
    around = ErrorFeedback(inner=Foreign(ratio=0.5))
    assert str(around) == "error-feedback:inner=(somebodys_package:Foreign:ratio=0.5)"
    assert make_compressor("ErrorFeedback(inner=somebodys_package:Foreign(ratio=0.5))") == around
    started = StartAfter(inner=Foreign(limit=None), steps=3)
    assert str(started) == "somebodys_package:Foreign:limit=None,start_after=3"
    assert make_compressor(str(started)) == started
    assert make_compressor(str(around)) == around
    with pytest.raises(SettingsError, match="has no setting 'rate'; .* Did you mean 'ratio'"):
        make_compressor("somebodys_package:Foreign", rate=1)


def test_entry_points_of_other_packages_are_names_too(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("their-top-k", f"{__name__}:Foreign", making.ENTRY_POINTS)
    monkeypatch.setattr(making, "entry_points", lambda group: [point] if group == "commhooks.compressors" else [])
    assert make_compressor("their-top-k", ratio=0.5) == Foreign(ratio=0.5)
    with pytest.raises(SettingsError, match="known are .*their-top-k.* Did you mean 'their-top-k'"):
        make_compressor("their-topk")
