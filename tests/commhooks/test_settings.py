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
from commhooks.compressors import AllReduceMean, Threshold, TopK
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
OFFERED = {name: getattr(room, name) for room in (commhooks, compressors, language) for name in room.__all__}
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


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A value that a field must refuse, and the nearest that it takes."""

    kind: type
    name: str
    value: Any
    fine: Any

    def __str__(self) -> str:
        return f"{self.kind.__name__}({self.name}={self.value!r})"


def wrong_values() -> list[Wrong]:
    """Return, for each bound of each field, a value just outside, and what no number is."""
    found = []
    for kind in CLASSES:
        for field in dataclasses.fields(kind):
            bounds = field.metadata.get("bounds")
            if bounds is None:
                continue
            is_whole = str(field.type).startswith("int")
            step = 1 if is_whole else 1e-6
            fine = getattr(made(kind), field.name)
            ends = [bounds.above, None if bounds.least is None else bounds.least - step, bounds.below]
            ends += [None if bounds.most is None else bounds.most + step]
            none = [] if "None" in str(field.type) else [None]
            no_number = [math.nan, "1", True, *none, *([1.5] if is_whole else [])]
            outside = [value for value in ends if value is not None]
            found += [Wrong(kind, field.name, value, fine) for value in (*outside, *no_number)]
    return found


@pytest.mark.parametrize("wrong", wrong_values(), ids=str)
def test_a_number_out_of_its_bounds_is_refused_by_name_and_value(wrong: Wrong) -> None:
    with pytest.raises(SettingsError) as told:
        made(wrong.kind, **{wrong.name: wrong.value})
    assert str(told.value).startswith(f"{wrong.kind.__name__}({wrong.name}={wrong.value!r}): {wrong.name} must be ")
    assert getattr(made(wrong.kind, **{wrong.name: wrong.fine}), wrong.name) == wrong.fine


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


def test_every_class_has_settings_that_are_looked_at() -> None:
    assert len(CLASSES) >= 30 and len(wrong_values()) >= 150


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
    ("Bounded(either='1')", r"either must be an integer of at least 1, or None\."),
    ("Bounded(is_on=1)", r"Bounded\(is_on=1\): is_on must be a bool\."),
    ("Bounded(ratio=0)", r"Bounded\(ratio=0\): ratio must be in \(0, 1\]\."),
    ("Bounded(ratio=torch.tensor(0.5))", r"ratio must be in \(0, 1\]\."),
    ("Closer(ratio=1.5)", r"Closer\(ratio=1.5\): ratio must be in \(0, 1\]\."),
    ("Closer(size=8)", r"Closer\(size=8\): size must be an integer from 2 to 7\."),
    ("Closer(long=-1)", r"Closer\(long=-1\): long must be 0 or more\."),
    ("Closer(long=None)", r"Closer\(long=None\): long must be 0 or more\."),
    ("TwoHop(codec='sign')", r"TwoHop\(codec='sign'\): codec must be a Codec, such as Sign\(\)\."),
    ("ErrorFeedback(inner='top-k')", r"inner must be a Compressor; make one from a name with make_compressor\."),
    ("StartAfter(inner=AllReduceMean(), steps=1, before=None)", r"before must be a Compressor"),
    ("Match(dtype='fp16')", r"Match\(dtype='fp16'\): dtype must be a torch.dtype, or None\."),
    ("Match(dimensions=[2])", r"dimensions must be a tuple of ints\."),
    ("Match(min_elements=5, max_elements=4)", r"max_elements must be at least min_elements=5\."),
    ("Match(name=3)", r"Match\(name=3\): name must be a str\."),
    ("PerParameter(rules=(('*', AllReduceMean()),), otherwise='fp16')", "otherwise must be a Compressor"),
    ("Cast(dtype=torch.int8)", "dtype must be a floating-point torch.dtype of at least 16 bits"),
    ("SparseLoCo(chunk=4, k=17)", r"k must be at most chunk² = 16\."),
    ("DeMo(chunk=4, k=17)", r"k must be at most chunk² = 16\."),
    ("AdaptiveRank(rank=4, max_rank=3)", r"max_rank must be an integer of at least 4, which is rank\."),
    ("Sign(block=12)", r"Sign\(block=12\): block must be a multiple of 8\."),
    ("Signum(block=12)", r"block must be a multiple of 8\."),
    (
        "PowerSGD(skip=('a',), matrices='whole-bucket')",
        r"PowerSGD\(skip=\('a',\)\): skip must be empty if matrices='whole-bucket'",
    ),
    ("PowerSGD(matrices='any')", "matrices must be one of stacked, first-dimension, most-square, whole-bucket"),
    ("AdaptiveRank(rule='best')", "rule must be one of least-error, fewest-bytes, accordion"),
    ("Int4(block=3)", r"Int4\(block=3\): block must be a multiple of 2\."),
    ("Int8(block=0)", r"Int8\(block=0\): block must be an integer of at least 1\."),
    ("Int8(stochastic=1)", r"Int8\(stochastic=1\): stochastic must be a bool"),
    ("MXFP8(block=48)", r"MXFP8\(block=48\): block must be a multiple of 32\."),
    ("Half(dtype=torch.float32)", "dtype must be torch.float16 or torch.bfloat16"),
    ("Half(dtype=torch.float16, stochastic=True)", "stochastic must be False for torch.float16"),
    ("PowerSGD(skip='a')", r"PowerSGD\(skip=.*\): skip must"),
    ("PowerSGD(skip=['a'])", r"PowerSGD\(skip=.*\): skip must"),
    ("PowerSGD(skip=(1,))", r"PowerSGD\(skip=.*\): skip must"),
    ("TopK(indices='int8')", r"TopK\(indices='int8'\): indices must be one of auto, int32"),
    ("DeMo(mean_over='all')", r"\(mean_over='all'\): mean_over must be one of ranks, senders\."),
    ("SparseLoCo(mean_over='all')", r"\(mean_over='all'\): mean_over must be one of ranks, senders\."),
    ("SparseLoCo(clip_to_median='median')", r"SparseLoCo\(clip_to_median='median'\): clip_to_median must be a bool"),
    (
        "ErrorFeedback(inner=ErrorFeedback(inner=Cast(dtype=torch.float16)))",
        r"ErrorFeedback\(inner=.*inner must not hold ErrorFeedback itself",
    ),
    ("ErrorFeedback(inner=RandomK(unbiased=True))", "inner must leave something unsent"),
    ("ErrorFeedback(inner=StartAfter(inner=RandomK(unbiased=True), steps=3))", "inner must leave something unsent"),
    ("ErrorFeedback(inner=PerParameter(rules=(('*', RandomK(unbiased=True)),)))", "inner must leave something unsent"),
    ("make_compressor('dgc', error_feedback=True)", "inner must leave something unsent"),
    ("ErrorFeedback(inner=UnbiasedPowerSGD())", "this one's mean is right on average, or it remembers by itself"),
    ("WireDtype(inner=AllReduceMean(), dtype=torch.int8)", "dtype must be a (floating-point )?torch.dtype"),
    ("WireDtype(inner=AllReduceMean(), dtype=torch.float8_e4m3fn)", "dtype must be a (floating-point )?torch.dtype"),
    ("WireDtype(inner=AllReduceMean(), dtype='fp16')", "dtype must be a (floating-point )?torch.dtype"),
    (
        "WireDtype(inner=make_compressor('top-k'), dtype=torch.bfloat16)",
        "inner must request sums only, since nothing else can be cast",
    ),
    (
        "WireDtype(inner=StartAfter(steps=1000, inner=make_compressor('top-k')), dtype=torch.bfloat16)",
        "inner must request sums only, since nothing else can be cast",
    ),
    (
        "WireDtype(inner=ErrorFeedback(inner=SVD()), dtype=torch.float16)",
        "inner must request sums only, since nothing else can be cast",
    ),
    ("Hierarchical(inner=StartAfter(inner=MACHINES, steps=3), size=2)", "inner must not hold another Hierarchical"),
    (
        "ErrorFeedback(inner=StartAfter(inner=MACHINES, steps=3))",
        r"write Hierarchical\(inner=ErrorFeedback\(...\)\) instead",
    ),
    (
        "WireDtype(inner=Hierarchical(inner=make_compressor('powersgd'), size=2), dtype=torch.float16)",
        "inner must request sums only",
    ),
    ("PerParameter(rules=())", "must be a tuple of"),
    ("PerParameter(rules=[('a', AllReduceMean())])", "must be a tuple of"),
    ("PerParameter(rules=(('a', 'top-k'),))", "must be a tuple of"),
    ("PerParameter(rules=(('a', WHOLE),))", "must be given whole buckets"),
    (
        "PerParameter(rules=(('*', StartAfter(inner=WHOLE, steps=2)),))",
        "must be given whole buckets, and not some parameters",
    ),
    (
        "PerParameter(rules=(('*', StartAfter(inner=TopK(), before=WHOLE, steps=2)),))",
        "must be given whole buckets, and not some parameters",
    ),
    ("schedule()", "must begin at steps that ascend from 0"),
    ("schedule((1, AllReduceMean()))", "must begin at steps that ascend from 0"),
    ("schedule((0, AllReduceMean()), (0, AllReduceMean()))", "must begin at steps that ascend from 0"),
    (
        "schedule((0, AllReduceMean()), (5, AllReduceMean()), (3, AllReduceMean()))",
        "must begin at steps that ascend from 0",
    ),
    ("make_compressor('topk')", "known are adaptive-rank, .* Did you mean 'top-k'?"),
    ("make_compressor('top-k(ratoi=1)')", "has no setting 'ratoi'; .* Did you mean 'ratio'?"),
    ("make_compressor(\"TopK(ratio='a')\")", r"TopK\(ratio='a'\): ratio must be in \(0, 1\]\."),
    ("make_compressor('TopK(ratio=True)')", r"ratio must be in \(0, 1\]\."),
    ("make_compressor('top-k:ratoi=1')", "has no setting 'ratoi'; .* Did you mean 'ratio'?"),
    ("make_compressor('hierarchical:inner=(top-k:ratoi=1)')", "'top-k' has no setting 'ratoi'; .* you mean 'ratio'?"),
    ("make_compressor('top-k:ratio=a')", r"TopK\(ratio='a'\): ratio must be in \(0, 1\]\."),
    ("make_compressor('')", "does not parse: expected a name"),
    ("make_compressor('top-k(')", r"does not parse: expected '\)'"),
    ("make_compressor('top-k:')", "does not parse: expected 'name' or 'name:setting=value,setting=value'"),
    ("make_compressor('powersgd:rank')", "does not parse: expected 'name' or 'name:setting=value,setting=value'"),
    ("make_compressor('top-k:ratio=')", "does not parse: expected a value"),
    ("make_compressor('top-k:ratio=0.1)')", "does not parse: unexpected '.'"),
    ("make_compressor('hierarchical:inner=(top-k')", r"does not parse: expected '\)'"),
    ("make_compressor('top-k(ratio=0.1')", r"does not parse: expected '\)'"),
    ("make_compressor('TopK(0.1)')", "does not parse"),
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
    ("make_compressor('top-k:ratio=0.1,start_after=2', start_after=3)", "start_after is given twice"),
    ("make_compressor('powersgd', rank='4')", r"PowerSGD\(rank='4'\): rank must be an integer of at least 1\."),
    ("make_compressor('powersgd:wire=torch.load')", "wire must be one of fp16, bf16, .* .got 'torch.load'"),
    ("make_compressor(\"top-k(name='x')\")", "has no setting 'name'"),
    ("make_compressor('_0_(x=1)')", "'_0_' is not known"),
    ("make_compressor('TopK(ratio={[]: 1})')", r"ratio must be in \(0, 1\]\."),
    ("make_compressor('Cast()')", "'Cast' has no default for dtype"),
    ("make_compressor('TwoHop(codec=Codec(block=8))')", "does not take these settings, .*abstract"),
    ("make_compressor('powersdg')", "'powersdg' is not known; known are adaptive-rank, .* Did you mean 'powersgd'"),
    ("make_compressor('fp16', rank=3)", "'fp16' has no setting 'rank'"),
    ("make_compressor('threshold')", "'threshold' has no default for threshold: write \"threshold:threshold=...\""),
    ("make_compressor('start-after:inner=fp16')", "'start-after' has no default for steps"),
    ("make_compressor('hierarchical')", 'no default for inner and size: write "hierarchical:inner=...,size=..."'),
    ("Entry(kind='rest')", r"Entry\(kind='rest'\): kind must be one of replicated, residual, private, share"),
    ("Entry(kind='share')", r"Entry\(kind='share', block=0\): a share has a block, and nothing else has"),
    ("Entry(kind='private', block=8)", r"Entry\(kind='private', block=8\): a share has a block"),
]
"""What is written, with the names of commhooks and of here, and words of the SettingsError that it raises."""


@pytest.mark.parametrize(("written", "words"), REFUSED)
def test_what_cannot_work_is_refused_in_words(written: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        eval(written, {**OFFERED, **globals()})


def test_a_setting_without_a_default_must_be_given() -> None:
    with pytest.raises(TypeError, match="threshold"):
        Threshold()


def test_a_whole_number_is_a_number() -> None:
    assert Closer(ratio=1).ratio == 1 and Closer(long=3).long == 3 and Closer(either=4).either == 4
