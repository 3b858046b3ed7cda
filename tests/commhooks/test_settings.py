"""Settings: what a field says of itself is what is refused, for every compressor and codec that there is."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import pytest
import torch

import commhooks
from commhooks import Compressor, Match, SettingsError, WireDtype, compressors, language
from commhooks.codecs import Codec, Int8
from commhooks.compressors import AllReduceMean, TopK
from commhooks.language.settings import setting

GIVEN: dict[str, Any] = {
    "inner": TopK(),
    "codec": Int8(),
    "dtype": torch.float16,
    "rules": (("*", AllReduceMean()),),
    "steps": 3,
    "size": 2,
    "threshold": 0.1,
}
"""What a class must be given that has no default for it."""
OFFERED = {name: getattr(package, name) for package in (commhooks, compressors, language) for name in package.__all__}
CLASSES = sorted(
    {
        one
        for one in OFFERED.values()
        if isinstance(one, type) and issubclass(one, (Compressor, Codec, Match)) and dataclasses.is_dataclass(one)
        if not getattr(one, "__abstractmethods__", None)
    },
    key=lambda one: one.__name__,
)


def made(kind: type, **settings: Any) -> Any:
    """Return an instance, of a wrapper around something that it takes."""
    needed = {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
    given = {name: value for name, value in GIVEN.items() if name in needed}
    if kind is WireDtype:
        given["inner"] = AllReduceMean()
    return kind(**(given | settings))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda one: one.__name__)
def test_a_number_out_of_its_bounds_is_refused_by_name_and_value(kind: type) -> None:
    """What is just outside of each bound of each field, and what is no number."""
    for field in dataclasses.fields(kind):
        bounds = field.metadata.get("bounds")
        if bounds is None:
            continue
        name, fine = field.name, getattr(made(kind), field.name)
        is_whole = str(field.type).startswith("int")
        step = 1 if is_whole else 1e-6
        ends = [bounds.above, None if bounds.least is None else bounds.least - step, bounds.below]
        ends += [None if bounds.most is None else bounds.most + step]
        wrong = [end for end in ends if end is not None]
        assert wrong, name
        wrong += [math.nan, "1", True, *([1.5] if is_whole else [])]
        wrong += [] if "None" in str(field.type) else [None]
        for value in wrong:
            with pytest.raises(SettingsError) as told:
                made(kind, **{name: value})
            assert str(told.value).startswith(f"{kind.__name__}({name}={value!r}): {name} must be ")
        assert getattr(made(kind, **{name: fine}), name) == fine


OUTSIDE: dict[str, dict[str, Any]] = {
    "AdaptiveRank": {"min_rank": 0, "rank": 1, "max_rank": 3, "every": 2, "eta": -0.1, "min_compression_rate": 0},
    "Affine": {"channel": 0},
    "DGC": {"ratio": 2, "momentum": 1, "clip": 0, "warm_up": -1},
    "ErrorFeedback": {"decay": 0.0},
    "Hierarchical": {"size": 0},
    "Match": {"max_elements": -1},
    "PowerSGD": {"rank": 0, "min_compression_rate": 0, "epsilon": -1e-8, "iterations": 0},
    "QSGD": {"levels": 128},
    "SVD": {"rank": 0, "min_compression_rate": 0.0},
    "Signum": {"beta": 1.0},
    "StartAfter": {"steps": -1},
    "Threshold": {"threshold": 0},
    "TopK": {"ratio": 0},
    "UnbiasedPowerSGD": {"rank": 0, "min_compression_rate": 0.0},
}
"""What the bounds themselves are to leave out."""


@pytest.mark.parametrize("kind", [one for one in CLASSES if one.__name__ in OUTSIDE], ids=lambda one: one.__name__)
def test_bounds_leave_out_what_makes_no_sense(kind: type) -> None:
    for name, value in OUTSIDE[kind.__name__].items():
        with pytest.raises(SettingsError, match=rf"{kind.__name__}\({name}={value}\): {name} must be "):
            made(kind, **{name: value})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounded(AllReduceMean):
    """Fields of every form."""

    among: Literal["a", "b"] = "a"
    either: int | None = setting(None, least=1)
    is_on: bool = False
    ratio: float = setting(0.5, above=0, most=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Closer(Bounded):
    """Another default, which keeps the bounds."""

    ratio: float = 0.25
    size: int = setting(2, least=2, most=7)
    long: float = setting(0.0, least=0)


WHOLE = commhooks.make_compressor("powersgd", matrices="whole-bucket")
MACHINES = commhooks.Hierarchical(inner=commhooks.make_compressor("top-k"), size=2)
REFUSED: list[tuple[str, str]] = [
    ("Bounded(among='c')", r"Bounded\(among='c'\): among must be one of a, b\."),
    ("Bounded(either=0.5)", r"Bounded\(either=0.5\): either must be an integer of at least 1, or None\."),
    ("Bounded(is_on=1)", r"Bounded\(is_on=1\): is_on must be a bool\."),
    ("Bounded(ratio=torch.tensor(0.5))", r"ratio must be in \(0, 1\]\."),
    ("Closer(ratio=1.5)", r"Closer\(ratio=1.5\): ratio must be in \(0, 1\]\."),
    ("Closer(size=8)", r"Closer\(size=8\): size must be an integer from 2 to 7\."),
    ("TwoHop(codec='sign')", r"TwoHop\(codec='sign'\): codec must be a Codec, such as Sign\(\)\."),
    ("ErrorFeedback(inner='top-k')", r"inner must be a Compressor; make one from a name with make_compressor\."),
    ("StartAfter(inner=AllReduceMean(), steps=1, before=None)", r"before must be a Compressor"),
    ("Match(dtype='fp16')", r"Match\(dtype='fp16'\): dtype must be a torch.dtype, or None\."),
    ("Match(min_elements=5, max_elements=4)", r"max_elements must be at least min_elements=5\."),
    ("PerParameter(rules=(('*', AllReduceMean()),), otherwise='fp16')", "otherwise must be a Compressor"),
    ("Cast(dtype=torch.int8)", "dtype must be a floating-point torch.dtype of at least 16 bits"),
    ("SparseLoCo(chunk=4, k=17)", r"k must be at most chunk² = 16\."),
    ("AdaptiveRank(rank=4, max_rank=3)", r"max_rank must be an integer of at least 4, which is rank\."),
    ("Sign(block=12)", r"Sign\(block=12\): block must be a multiple of 8\."),
    (
        "PowerSGD(skip=('a',), matrices='whole-bucket')",
        r"PowerSGD\(skip=\('a',\)\): skip must be empty if matrices='whole-bucket'",
    ),
    ("Half(dtype=torch.float32)", "dtype must be torch.float16 or torch.bfloat16"),
    ("Half(dtype=torch.float16, stochastic=True)", "stochastic must be False for torch.float16"),
    ("PowerSGD(skip='a')", r"PowerSGD\(skip=.*\): skip must"),
    ("TopK(indices='int8')", r"TopK\(indices='int8'\): indices must be one of auto, int32"),
    (
        "ErrorFeedback(inner=ErrorFeedback(inner=Cast(dtype=torch.float16)))",
        r"ErrorFeedback\(inner=.*inner must not hold ErrorFeedback itself",
    ),
    ("ErrorFeedback(inner=RandomK(unbiased=True))", "inner must leave something unsent"),
    ("ErrorFeedback(inner=StartAfter(inner=RandomK(unbiased=True), steps=3))", "inner must leave something unsent"),
    ("make_compressor('dgc', error_feedback=True)", "inner must leave something unsent"),
    ("ErrorFeedback(inner=UnbiasedPowerSGD())", "this one's mean is right on average, or it remembers by itself"),
    ("WireDtype(inner=AllReduceMean(), dtype=torch.int8)", "dtype must be a (floating-point )?torch.dtype"),
    (
        "WireDtype(inner=make_compressor('top-k'), dtype=torch.bfloat16)",
        "inner must request sums only, since nothing else can be cast",
    ),
    ("WireDtype(inner=make_compressor('fp16', error_feedback=True), dtype=torch.float16)", "not choose its own wire"),
    (
        "make_compressor('sparse-loco', error_feedback=False, decay=0.9)",
        "keeps no residual, so decay=0.9 has no effect",
    ),
    ("Hierarchical(inner=StartAfter(inner=MACHINES, steps=3), size=2)", "inner must not hold another Hierarchical"),
    (
        "ErrorFeedback(inner=StartAfter(inner=MACHINES, steps=3))",
        r"write Hierarchical\(inner=ErrorFeedback\(...\)\) instead",
    ),
    ("PerParameter(rules=[('a', AllReduceMean())])", "must be a tuple of"),
    ("PerParameter(rules=(('a', WHOLE),))", "must be given whole buckets"),
    (
        "PerParameter(rules=(('*', StartAfter(inner=TopK(), before=WHOLE, steps=2)),))",
        "must be given whole buckets, and not some parameters",
    ),
    ("schedule((1, AllReduceMean()))", "must begin at steps that ascend from 0"),
    (
        "schedule((0, AllReduceMean()), (5, AllReduceMean()), (3, AllReduceMean()))",
        "must begin at steps that ascend from 0",
    ),
    ("make_compressor('top-k(ratoi=1)')", "has no setting 'ratoi'; .* Did you mean 'ratio'?"),
    ("make_compressor(\"TopK(ratio='a')\")", r"TopK\(ratio='a'\): ratio must be in \(0, 1\]\."),
    ("make_compressor('hierarchical:inner=(top-k:ratoi=1)')", "'top-k' has no setting 'ratoi'; .* you mean 'ratio'?"),
    ("make_compressor('')", "does not parse: expected a name"),
    ("make_compressor('top-k:')", "does not parse: expected 'name' or 'name:setting=value,setting=value'"),
    ("make_compressor('top-k:ratio=')", "does not parse: expected a value"),
    ("make_compressor('top-k:ratio=0.1)')", "does not parse: unexpected '.'"),
    (r"""make_compressor(r"powersgd:skip='\x'")""", r"does not parse: .* is no text in quotes \("),
    (r"""make_compressor("powersgd:skip='a\n'")""", r"does not parse: .* is no text in quotes \("),
    ("make_compressor('TopK(ratio=0.1, ratio=0.2)')", "does not parse: ratio is given twice"),
    ("make_compressor(\"top-k(error_feedback='no')\")", "error_feedback must be True or False .got 'no'"),
    ("make_compressor(\"__import__('os').getcwd()\")", "does not parse"),
    ("make_compressor(\"TopK(ratio=open('x').read())\")", "does not parse"),
    ("make_compressor('Match()')", "expected a compressor"),
    ("make_compressor('hierarchical:inner=(match),size=2')", "inner must be"),
    ("make_compressor('no_such_package:TopK')", "there is no module 'no_such_package' on the search path"),
    ("make_compressor('commhooks:NoSuch')", "commhooks has no 'NoSuch'"),
    ("make_compressor('pathlib:Path')", "Path'> is not a dataclass, as compressors must be"),
    ("make_compressor('top-k:ratio=0.1', ratio=0.2)", "ratio is given twice, in the text and beside it"),
    ("make_compressor('powersgd:wire=torch.load')", "wire must be one of fp16, bf16, .* .got 'torch.load'"),
    ("make_compressor('TopK(ratio={[]: 1})')", r"ratio must be in \(0, 1\]\."),
    ("make_compressor('TwoHop(codec=Codec(block=8))')", "does not take these settings, .*abstract"),
    ("make_compressor('threshold')", "'threshold' has no default for threshold: write \"threshold:threshold=...\""),
    ("make_compressor('hierarchical')", 'no default for inner and size: write "hierarchical:inner=...,size=..."'),
    ("Entry(kind='rest')", r"Entry\(kind='rest'\): kind must be one of replicated, residual, private, share"),
    ("Entry(kind='share')", r"Entry\(kind='share', block=0\): a share has a block, and nothing else has"),
]
"""What is written, with the names of commhooks and of here, and words of the SettingsError that it raises."""


@pytest.mark.parametrize(("written", "words"), REFUSED)
def test_what_cannot_work_is_refused_in_words(written: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        eval(written, {**OFFERED, **globals()})


def test_a_whole_number_is_a_number() -> None:
    assert Closer(ratio=1).ratio == 1 and Closer(long=3).long == 3 and Closer(either=4).either == 4
