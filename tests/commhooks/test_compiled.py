"""Codecs whose passes are compiled send and decode what their `encode` and `decode` say, and mix with eager ranks."""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import commhooks
from commhooks import SettingsError
from commhooks.codecs import FP8, MXFP4, QSGD, Codec, Half, Int4, Int8, Natural, Sign, TernGrad, Vote
from commhooks.compressors.kernels import codes
from commhooks.compressors.kernels.codes import CodecPasses, CodePlaces, passes_for
from commhooks.language.noise import Keys, Noise
from commhooks.native import library
from commhooks.native.passes import CodeKernels
from tests import bounds
from tests.tiers import in_turn, thorough
from tests.world import on_ranks

pytestmark = pytest.mark.kernels

BUILT = library.opened(library.PATH)
LEVELS = () if isinstance(BUILT, str) else library.levels_of(BUILT)
needs_library = pytest.mark.skipif(isinstance(BUILT, str), reason=f"compiled passes: {BUILT}")
CODECS: list[Codec] = [
    Int8(), Int8(stochastic=False), Int8(block=100), Int4(), Int4(stochastic=False), Sign(), Sign(block=24), Vote(),
    FP8(), QSGD(), QSGD(levels=7), QSGD(levels=1), TernGrad(), Natural(), MXFP4(),
]  # fmt: skip
QUICK = (Int8(), FP8(), TernGrad(), MXFP4())
BLOCKS, RANKS = 10_000, 4
SERVED = BLOCKS // RANKS
CPU = torch.device("cpu")
ON_CPU = (torch.float32, CPU)


def given(codec: Codec) -> tuple[Tensor, Noise | None]:
    """Return blocks of many sizes, some of them with special numbers, and noise for them."""
    generator = torch.Generator().manual_seed(7)
    blocks = torch.randn(BLOCKS, codec.block, generator=generator)
    blocks *= 10.0 ** torch.randint(-30, 30, (BLOCKS, 1), generator=generator)
    blocks[0], blocks[1, 3], blocks[2] = 0.0, -0.0, -0.0
    blocks[3] *= 1e-40 / blocks[3].abs().max()
    blocks[4:8, 5] = torch.tensor([math.inf, -math.inf, math.nan, torch.finfo(torch.float32).max])
    noise = Noise.of(Keys.of("weight", BLOCKS, codec.block), codec.block, 1, 2) if codec.draws else None
    return blocks, noise


def message_for(codec: Codec, blocks: Tensor) -> list[Tensor]:
    code = codec.encode(blocks[:1], blocks[:1].clone().fill_(0.5) if codec.draws else blocks.new_empty(0))
    return [torch.zeros(RANKS, SERVED, *one.shape[1:], dtype=one.dtype) for one in code]


def places() -> CodePlaces:
    rows = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3))
    return CodePlaces(rows // SERVED, rows % SERVED, rows)


@needs_library
@pytest.mark.parametrize(
    ("codec", "level"),
    in_turn(CODECS, LEVELS, fast=QUICK.__contains__),
    ids=str,
)
def test_compiled_passes_are_the_eager_ones(codec: Codec, level: str) -> None:
    """Bit for bit, but for scales that are sums: those are within n·ε, and so may be what is rounded by them."""
    blocks, noise = given(codec)
    eager, fast = CodecPasses(codec, 0.75), CodecPasses(codec, 0.75, level)
    sent, sent_fast = message_for(codec, blocks), message_for(codec, blocks)
    unsent, unsent_fast = blocks.clone(), blocks.clone()
    eager.send(unsent, noise, sent, places(), keeps=True)
    fast.send(unsent_fast, noise, sent_fast, places(), keeps=True)
    decoded = fast.write(sent_fast, places(), torch.empty_like(blocks))
    assert equal(eager.write(sent_fast, places(), torch.empty_like(blocks)), decoded)
    assert equal(unsent_fast, blocks - decoded)
    finite = torch.empty(RANKS, SERVED, dtype=torch.bool)
    finite.view(-1)[places().flat] = blocks.isfinite().all(1)
    check_code(codec, sent, sent_fast, finite)

    left = torch.randn(SERVED, codec.block, generator=torch.Generator().manual_seed(4)) * 1e-3
    left_fast = left.clone()
    coded, coded_fast = ([torch.empty_like(one[0]) for one in sent] for _ in range(2))
    own = noise and noise.at(slice(0, SERVED))
    eager.serve(sent_fast, own, coded, left)
    fast.serve(sent_fast, own, coded_fast, left_fast)
    check_code(codec, coded, coded_fast, finite.all(0))
    same = torch.stack([(a == b).all(1) for a, b in zip(coded, coded_fast, strict=True)]).all(0)
    assert equal(left[same], left_fast[same])


def is_compiled(passes: CodecPasses) -> bool:
    return passes._native is not None


def sums(codec: Codec) -> bool:
    return isinstance(codec, (Sign, QSGD))


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether all elements are equal, or NaN in both."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def check_code(codec: Codec, eager: Sequence[Tensor], fast: Sequence[Tensor], finite: Tensor) -> None:
    """Beside a scale that is inf or NaN, as it must be in both, a code may be any; and MXFP4 has two zeros."""
    if isinstance(codec, MXFP4):
        assert equal(*(codec.decode([payload[finite] for payload in code]) for code in (eager, fast)))
        return
    for one, other in zip(eager, fast, strict=True):
        if one.is_floating_point():
            assert torch.equal(one.isfinite(), other.isfinite())
            finite = finite & one.isfinite().all(-1)
        mine, its = one[finite], other[finite]
        if not sums(codec):
            assert torch.equal(mine, its)
        elif one.is_floating_point():
            assert ((mine - its).abs() <= codec.block * bounds.unit_roundoff(torch.float32) * mine.abs()).all()
        else:
            assert (mine != its).float().mean() <= 1e-3


@needs_library
def test_passes_that_do_not_agree_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_compiled(passes_for(Int8(block=40), None, *ON_CPU))

    def wrong(kernels: CodeKernels, message: Sequence[Tensor], blocks: Tensor, rows: Tensor | None = None) -> None:
        write(kernels, message, blocks, rows)
        blocks.add_(1e-3)

    write = CodeKernels.write
    monkeypatch.setattr(CodeKernels, "write", wrong)
    with pytest.warns(UserWarning, match=r"compiled passes \(\w+\) of Int8\(block=44, .* do not agree"):
        assert not is_compiled(passes_for(Int8(block=44), None, *ON_CPU))


def test_others_are_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "off")
    assert not is_compiled(passes_for(Int8(), None, *ON_CPU))
    monkeypatch.delenv(library.VARIABLE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a library that is not built
        assert not is_compiled(passes_for(Half(dtype=torch.bfloat16), None, *ON_CPU))
        assert not is_compiled(passes_for(Int8(), None, torch.float64, CPU))
        assert not is_compiled(passes_for(Int8(), None, torch.float32, torch.device("meta")))


class WithoutSmall(Int8):
    """Sends nothing of small blocks."""

    def scales(self, blocks: Tensor) -> Tensor:
        scales = super().scales(blocks)
        return torch.where(scales < 1e-12, 1.0, scales)


@needs_library
def test_a_subclass_that_encodes_otherwise_is_eager() -> None:
    """Blocks in which it differs may be too rare to be found by a comparison."""
    assert codes._agree(WithoutSmall(), LEVELS[0])
    assert not is_compiled(passes_for(WithoutSmall(), None, *ON_CPU))


@needs_library
@on_ranks(2)
@pytest.mark.parametrize("steps", [10, *thorough([40])])
def test_a_rank_without_them_has_the_same_replica(rank: int, steps: int) -> str:
    """Steps of every code: what ranks return must be equal, so it is a digest of all means."""
    if rank:
        os.environ[library.VARIABLE] = "off"
    generator, digest = torch.Generator().manual_seed(rank), hashlib.sha256()
    for number, name in enumerate(["int8", "int4", "sign", "signum", "fp8", "qsgd", "natural", "terngrad", "mxfp4"]):
        dtype = torch.bfloat16 if number % 2 else torch.float32
        like = {"weight": torch.zeros(203, 100, dtype=dtype), "bias": torch.zeros(1500, dtype=dtype)}
        exchanger = commhooks.Exchanger(like, commhooks.make_compressor(name))
        for _ in range(steps):
            own = {key: torch.randn(one.shape, generator=generator).to(dtype) for key, one in like.items()}
            exchanger.average(own)
            for mean in own.values():
                digest.update(mean.float().numpy().tobytes())
        exchanger.close()
    return digest.hexdigest()


@on_ranks(2)
def test_a_wrong_level_on_one_rank_is_refused_on_every_rank_before_the_first_step(rank: int) -> None:
    if rank:
        os.environ[library.VARIABLE] = "fast"
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    error = SettingsError if rank else commhooks.AttachError
    with pytest.raises(error, match="COMMHOOKS_COMPILED must be avx512, avx2, sse42, plain or off .got 'fast'."):
        commhooks.attach(model, "int8")
