"""What `commhooks.testing.check` says of compressors that obey the laws, and of those that do not."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from commhooks import Compressor, ErrorFeedback, SettingsError, make_compressor
from commhooks.codecs import QSGD, Codec, Int4, Int8
from commhooks.compressors import TopK, TwoHop
from commhooks.language import Loss
from commhooks.testing import LAWS, Finding, as_used, check
from tests.commhooks import mistaken
from tests.commhooks.test_own_compressors import example
from tests.test_docs import ROOT, blocks_of
from tests.tiers import A_ROW, rows, thorough

OF_EXAMPLES: dict[str, Compressor | Codec] = {
    "own_compressor": example("own_compressor").RandomRows(every=4),
    "dithering": example("dithering").Dithering(block=32),
    "momentum_top_k": example("momentum_top_k").MomentumTopK(ratio=0.05),
}

IN_PAGES = [("compressors.md", "BFloat16")]


def bad(given: Compressor | Codec, *only: str) -> list[Finding]:
    return [one for one in check(given, only=only) if one.is_bad]


# Dithering takes longest. The page's codec, which rounds at random too, is tried in each run.
@pytest.mark.parametrize("name", [*thorough(["dithering"]), *rows(["own_compressor"]), "momentum_top_k"])
def test_the_guides_examples_obey_every_law(name: str) -> None:
    found = check(OF_EXAMPLES[name])
    assert [one.law for one in found] == [law.key for law in LAWS]
    assert [str(one) for one in found if one.is_bad] == []
    assert sum(one.verdict == "kept" for one in found) >= 16


@pytest.mark.parametrize(("page", "name"), IN_PAGES)
def test_the_compressors_that_the_guide_defines_obey_every_law(
    page: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look their module up
    for block in blocks_of(ROOT / "docs" / "guide" / page):
        if not block.title and f"class {name}(" in block.code:
            exec(compile(block.code, block.place, "exec", dont_inherit=True), vars(module))
    found = check(vars(module)[name]())
    assert [str(one) for one in found if one.is_bad] == []


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallLoss(mistaken.Halves):
    """A random half, of which a tenth is declared to be left out."""

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        return Loss(0.1)


def test_a_broken_law_is_told_with_its_rule_and_its_usual_causes() -> None:
    (found,) = bad(SmallLoss(), "loss")
    assert found.verdict == "broken" and "and 0.1 declared" in found.why
    assert str(found).startswith(f"broken: {found.rule}; ") and f"; usual causes: {found.causes}" in str(found)


def test_a_broken_law_names_parameter_step_and_how_far_it_is_off() -> None:
    (found,) = bad(mistaken.MISTAKES["WrongSign"][0](), "conservation")
    said = r"off by 2 of the largest element; the residual is -1 times what was not sent: a float32 parameter of"
    assert re.match(f"{said} shape 24×40 in step 0, with 3 workers", found.why)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrong(Int8):
    """int8 with one mistake."""

    mistake: str

    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        if self.mistake == "nearest":
            noise = torch.full_like(noise, 0.5)
        if self.mistake == "half the noise":
            noise = noise / 2
        return super().encode(blocks, noise)

    @property
    def compiled(self) -> tuple[str, int] | None:
        return None

    def decode_into(self, code: Sequence[Tensor], blocks: Tensor) -> Tensor:
        return super().decode_into(code, blocks).mul_(0.99 if self.mistake == "shrunk" else 1.0)

    def relative_error(self) -> float:
        return super().relative_error() * (0.25 if self.mistake == "a quarter of the error" else 1.0)


@A_ROW
@pytest.mark.parametrize("mistake", rows(["nearest", "half the noise", "shrunk"], unless="nearest".__eq__))
def test_a_codec_that_is_not_unbiased_but_says_so_is_found(mistake: str) -> None:
    (found,) = bad(Wrong(mistake=mistake, block=32), "unbiased")
    assert "standard errors" in found.why


@A_ROW
def test_the_codec_without_a_mistake_obeys_both_laws_about_rounding() -> None:
    assert bad(Wrong(mistake="", block=32), "unbiased", "loss") == []


@A_ROW
def test_an_error_that_is_too_small_is_found_for_unbiased_codes() -> None:
    assert bad(Wrong(mistake="a quarter of the error", block=32), "loss")


def test_what_is_checked_is_what_would_be_used() -> None:
    assert as_used(Int4(block=32)) == ErrorFeedback(inner=TwoHop(codec=Int4(block=32)))
    assert as_used(QSGD(block=32, levels=1)) == TwoHop(codec=QSGD(block=32, levels=1), server_feedback=False)
    top_k, bare = make_compressor("top-k", ratio=0.1), make_compressor("top-k", ratio=0.1, error_feedback=False)
    assert as_used(TopK(ratio=0.1)) == as_used(top_k) == top_k and as_used(bare) == bare
    for name in ("all-reduce", "fp16", "random-k:unbiased=true", "signum"):
        assert as_used(make_compressor(name)) == make_compressor(name)


def test_a_law_that_does_not_exist_and_what_is_no_compressor_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"check\(only=\['replica'\]\): there is no such law; there are replicas, "):
        check(make_compressor("fp16"), only=("replica",))
    with pytest.raises(SettingsError, match="expected a Compressor"):
        check("top-k")  # type: ignore[arg-type]  # "str"; expected "Compressor | Codec"
