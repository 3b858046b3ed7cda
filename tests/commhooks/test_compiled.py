"""Codecs whose passes are compiled send and decode what their `encode` and `decode` say, and mix with eager ranks."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import commhooks
from commhooks import SettingsError
from commhooks.codecs import Half, Int8
from commhooks.compressors.kernels import codes
from commhooks.compressors.kernels.codes import CodecPasses, passes_for
from commhooks.native import library
from commhooks.native.passes import CodeKernels
from tests.tiers import thorough
from tests.world import on_ranks

pytestmark = pytest.mark.kernels

BUILT = library.opened(library.PATH)
LEVELS = () if isinstance(BUILT, str) else library.levels_of(BUILT)
needs_library = pytest.mark.skipif(isinstance(BUILT, str), reason=f"compiled passes: {BUILT}")
CPU = torch.device("cpu")
ON_CPU = (torch.float32, CPU)


def is_compiled(passes: CodecPasses) -> bool:
    return passes._native is not None


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
