"""Compiled passes: each kind of code at each level that this processor has, against the formats in NumPy."""

from __future__ import annotations

import _ctypes
import itertools
import os
import platform
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from commhooks import SettingsError
from commhooks.errors import CompressorError
from commhooks.native import compiled, library
from commhooks.native.passes import CodeFormat, CodeKernels, NoiseTable
from tests.commhooks.native_oracle import Array, Oracle
from tests.tiers import in_turn

BUILT = library.opened(library.PATH)
LEVELS = () if isinstance(BUILT, str) else library.levels_of(BUILT)
needs_library = pytest.mark.skipif(isinstance(BUILT, str), reason=f"compiled passes: {BUILT}")
KINDS = {
    "int8": ("uniform", 127, True, 1),
    "int8-nearest": ("uniform", 127, False, 1),
    "levels-8": ("uniform", 8, True, 1),
    "int4": ("uniform", 7, True, 2),
    "int4-nearest": ("uniform", 7, False, 2),
    "levels-2": ("uniform", 2, True, 2),
    "terngrad": ("uniform", 1, True, 4),
    "terngrad-nearest": ("uniform", 1, False, 4),
    "qsgd-8": ("qsgd", 127, True, 1),
    "qsgd-4": ("qsgd", 7, True, 2),
    "qsgd-2": ("qsgd", 1, True, 4),
    "sign": ("sign", 0, False, 8),
    "vote": ("vote", 0, True, 8),
    "fp8": ("fp8", 0, False, 1),
    "natural": ("natural", 0, True, 1),
    "mxfp4": ("mxfp4", 0, False, 32),
}
"""Kind, levels, whether it draws, and what its blocks are a multiple of."""
every_kind_at_a_level = pytest.mark.parametrize(("name", "level"), in_turn(list(KINDS), LEVELS))
OF_SUMS = {"sign", "qsgd"}
"""Kinds whose scales are sums in double, in whatever order."""


class Case:
    """A kind of code, and random blocks and noise for it."""

    def __init__(self, name: str, block: int, seed: int = 0) -> None:
        kind, levels, self.draws, _ = KINDS[name]
        self.form, self.oracle = CodeFormat(kind, block, levels), Oracle(kind, levels)
        self.random = numpy.random.default_rng([seed, block])
        self.rows = max(1, 65536 // block)
        self.table = self.random.integers(0, 65536, (self.rows, block), dtype=numpy.uint16)

    def at(self, level: str, damping: float = 1.0) -> CodeKernels:
        """Return the passes at a level."""
        return CodeKernels(level, self.form, damping)

    def blocks(self, k: int) -> Array:
        """Return blocks of all magnitudes, some with zeros, -0, denormal numbers, equal ones, or a power of two."""
        x = self.random.standard_normal((k, self.form.block)) * 10.0 ** self.random.uniform(-44, 37.5, (k, 1))
        what = self.random.integers(0, 8, (k, 1))
        x = numpy.where((what == 0) & (self.random.random(x.shape) < 0.9), self.random.choice([0.0, -0.0], x.shape), x)
        x = numpy.where(what == 1, numpy.sign(x) * 2.0 ** self.random.integers(-149, 127, (k, 1)), x)
        x = numpy.where(what == 2, x * 2.0 ** self.random.integers(-30, 1, x.shape), x)
        return x.clip(-3e38, 3e38).astype(numpy.float32)

    def noise(self, k: int) -> tuple[NoiseTable | None, Array | None]:
        """Return noise for k blocks, and all that they draw [k, block]."""
        if not self.draws:
            return None, None
        rows = self.random.integers(0, self.rows, k, dtype=numpy.int32)
        shifts = self.random.integers(0, 65536, k, dtype=numpy.uint16)
        kind = self.random.choice(["int16", "uint16", "int32", "int64"])
        noise = NoiseTable(torch.from_numpy(self.table), torch.from_numpy(rows), torch.from_numpy(shifts.astype(kind)))
        return noise, self.table[rows] + shifts[:, None]

    def message(self, ranks: int, b: int) -> list[Tensor]:
        """Return payloads [W, b, ...], filled with ones, of larger memory."""
        found = []
        for dtypes, width, _ in self.form.payloads:
            dtype = min(dtypes, key=str)
            found.append(torch.ones(ranks, b + 2, width + 3, dtype=dtype)[:, 1:-1, 3:])
        return found

    def arrays(self, message: list[Tensor]) -> list[Array]:
        return [p.numpy() if p.dtype == torch.float32 else p.numpy().astype(numpy.uint8) for p in message]


def sizes_of(name: str) -> list[int]:
    """Return sizes of blocks: the smallest, odd ones, and those that are common."""
    multiple = KINDS[name][3]
    return [multiple * times for times in (1, 3, 5, 11)] + [128, 352, 512, 1024, 4096 + 32 * multiple]


def same(actual: Array | Tensor, expected: Array | Tensor) -> None:
    """Assert that arrays are equal bit for bit."""
    actual, expected = numpy.asarray(actual), numpy.asarray(expected)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    bits = {4: numpy.uint32, 1: numpy.uint8}[actual.dtype.itemsize]
    numpy.testing.assert_array_equal(
        numpy.ascontiguousarray(actual).view(bits), numpy.ascontiguousarray(expected).view(bits)
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_library_that_was_built_is_in_use() -> None:
    """One of other sources, or a damaged one, would leave out the tests below."""
    assert not library.PATH.exists() or LEVELS, f"{BUILT}: make builds it again"


@needs_library
@every_kind_at_a_level
def test_codes_and_what_they_leave_out_are_those_of_the_formats(name: str, level: str) -> None:
    """Thousands of blocks of many sizes for each kind and level; scales that are sums are within n·eps."""
    for block in sizes_of(name):
        case = Case(name, block)
        b, ranks, damping = min(1200, 15_000 // block), 3, [1.0, 0.7][block % 3 == 0]
        k = ranks * b
        x, (noise, draws) = case.blocks(k), case.noise(k)
        rows = case.random.permutation(k)
        left, sent = torch.from_numpy(x.copy()), case.message(ranks, b)
        most = case.at(level, damping).send(left, sent, rows=torch.from_numpy(rows), noise=noise)
        assert name != "vote" or most == numpy.abs(x).max().view(numpy.int32)

        code = [array.reshape(k, -1)[rows] for array in case.arrays(sent)]
        expected = case.oracle.encode(x, draws)
        if case.form.kind in OF_SUMS:
            numpy.testing.assert_allclose(code[0], expected[0], rtol=block * 2.0**-52 + 2.0**-23, atol=2.0**-149)
            is_same = (code[0] == expected[0]).flatten()
            assert is_same.mean() > 0.95
            same(code[-1][is_same], expected[-1][is_same])
        else:
            for own, other in zip(code, expected, strict=True):
                same(own, other)
        with numpy.errstate(all="ignore"):
            decoded = case.oracle.decode(code, block, damping)
            same(left, x - decoded)

        unchanged, again = torch.from_numpy(x), case.message(ranks, b)
        case.at(level).send(unchanged, again, rows=torch.from_numpy(rows), noise=noise, keeps=False)
        same(unchanged, x.copy())
        for own, other in zip(case.arrays(again), case.arrays(sent), strict=True):
            same(own, other)
        written = torch.empty(k, block)
        case.at(level, damping).write(sent, written, rows=torch.from_numpy(rows))
        same(written, decoded)
        case.at(level, damping).write(sent, written)
        same(written, case.oracle.decode([a.reshape(k, -1) for a in case.arrays(sent)], block, damping))


@needs_library
@every_kind_at_a_level
def test_means_are_sums_in_rank_order_and_are_encoded_with_the_error(name: str, level: str) -> None:
    for block, ranks in itertools.product(sizes_of(name)[1:6:2], (1, 2, 3, 8, 11)):
        case = Case(name, block, seed=ranks)
        k = 20
        received = case.message(ranks, k)
        x = case.blocks(ranks * k)
        case.at(level).send(torch.from_numpy(x), received, noise=case.noise(ranks * k)[0], keeps=False)
        with numpy.errstate(all="ignore"):
            y = case.oracle.mean(case.arrays(received), block, 0.9)
            error = (y * numpy.float32(0.3)).astype(numpy.float32)
            (noise, draws), y_and_error = case.noise(k), y + error
        for given, expected in ((None, y), (error, y_and_error)):
            left, coded = torch.zeros(k, block), [payload[0] for payload in case.message(1, k)]
            error_given = None if given is None else torch.from_numpy(given)
            case.at(level, 0.9).serve(received, coded, error=error_given, left=left, noise=noise)
            code = case.arrays(coded)
            if case.form.kind in OF_SUMS:
                numpy.testing.assert_allclose(
                    code[0], case.oracle.scales(expected), rtol=block * 2.0**-52 + 2.0**-23, atol=2.0**-149
                )
            else:
                for own, other in zip(code, case.oracle.encode(expected, draws), strict=True):
                    same(own, other)
            with numpy.errstate(all="ignore"):
                same(left, expected - case.oracle.decode(code, block, 0.9))
            again = [payload[0] for payload in case.message(1, k)]
            case.at(level, 0.9).serve(received, again, error=error_given, noise=noise)
            for own, other in zip(case.arrays(again), code, strict=True):
                same(own, other)


@needs_library
@pytest.mark.parametrize("name", KINDS)
def test_all_levels_compute_the_same_bits(name: str) -> None:
    for block in sizes_of(name):
        case = Case(name, block, seed=1)
        x, (noise, _), (other_noise, _), results = case.blocks(42), case.noise(42), case.noise(21), []
        for level in LEVELS:
            written, served = torch.empty(42, block), torch.empty(21, block)
            left, sent = torch.from_numpy(x.copy()), case.message(2, 21)
            case.at(level).send(left, sent, noise=noise)
            case.at(level).write(sent, written)
            coded = [payload[0] for payload in case.message(1, 21)]
            case.at(level).serve(sent, coded, error=left[:21], left=served, noise=other_noise)
            results.append([*(one.numpy() for one in (left, written, served)), *case.arrays(sent), *case.arrays(coded)])
        for other in results[1:]:
            for own, expected in zip(other, results[0], strict=True):
                same(own, expected)


@needs_library
@pytest.mark.parametrize("name", KINDS)
def test_a_block_that_is_not_finite_shows_in_its_scales_alone(name: str) -> None:
    block = 96
    for level, value in itertools.product(LEVELS, (float("inf"), float("-inf"), float("nan"))):
        case = Case(name, block, seed=2)
        x = case.blocks(12).clip(-1e38, 1e38)
        x[3, 5] = x[7, block - 1] = value
        sent = case.message(1, 12)
        largest = case.at(level).send(torch.from_numpy(x), sent, noise=case.noise(12)[0])
        assert (largest >= 0x7F800000) == (name == "vote"), (level, value)
        scales = case.arrays(sent)[0][0]
        finite = scales != 255 if name == "mxfp4" else numpy.isfinite(scales)
        assert name == "vote" or numpy.flatnonzero(~finite.all(1)).tolist() == [3, 7], (level, value)


@needs_library
@pytest.mark.parametrize("name", ["int8", "sign", "vote", "mxfp4"])
def test_threads_change_nothing(name: str) -> None:
    """Three threads, for more blocks than each must have."""
    case, k, ranks = Case(name, 1024), 300, 4
    x, (noise, _), level, results = case.blocks(k), case.noise(k), LEVELS[0], []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        left, sent = torch.from_numpy(x.copy()), case.message(1, k)
        largest = case.at(level).send(left, sent, noise=noise)
        received = [payload.expand(ranks, *payload.shape[1:]) for payload in sent]
        coded, error = [payload[0] for payload in case.message(1, k)], torch.zeros_like(left)
        case.at(level).serve(received, coded, error=left, left=error, noise=noise)
        written = torch.empty(k, 1024)
        case.at(level).write(sent, written)
        results.append([left, error, written, *sent, *coded, torch.tensor([largest], dtype=torch.int32)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)) or torch.equal(one, other)


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    """The child makes no tensors: PyTorch's own threads do not survive a fork."""
    case, k = Case("int8-nearest", 128), 3000
    x, sent, level = torch.from_numpy(case.blocks(k)), case.message(1, k), LEVELS[0]
    torch.set_num_threads(2)
    case.at(level).send(x, sent)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # it would wait for ever for threads that only the parent has
        case.at(level).send(x, sent)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@needs_library
@pytest.mark.parametrize("level", LEVELS)
def test_tensors_that_are_not_as_they_must_be_are_refused(level: str) -> None:
    case, vote, sign = Case("int8", 128), Case("vote", 128), Case("sign", 128)
    x, sent, (noise, _) = torch.ones(6, 128), case.message(2, 3), case.noise(6)
    assert noise is not None
    send, write, serve = case.at(level).send, case.at(level).write, case.at(level).serve
    scales, codes = sent
    blocks, rows = r"blocks on a CPU, \[k, 128\], contiguous, of torch.float32 \(got", r"rows on a CPU, \[6\], contig"
    payload, beyond = r"need a payload on a CPU, \[2, 3, 128\]", "a row is beyond the message's, or the noise's"
    calls: list[tuple[Callable[[], object], str]] = [
        *((partial(send, wrong, sent, noise=noise), blocks) for wrong in (x.double(), x[:, :64], x.to("meta"), x[0])),
        (lambda: send(x.t().contiguous().t(), sent, noise=noise), blocks),
        *((partial(send, x, sent, torch.arange(n), noise), rows) for n in (5, 7)),
        (lambda: send(x, sent, torch.arange(6).int(), noise), rows),
        (lambda: send(x, sent, torch.arange(12)[::2], noise), rows),
        (lambda: send(x, [], noise=noise), "has 2 payloads .got 0."),
        (lambda: send(x, [scales[0], codes[0]], noise=noise), r"\[W, b, 1\], of torch.float32 \(got \[3, 1\]"),
        (lambda: send(x, [scales.double(), codes], noise=noise), r"\[2, 3, 1\], of torch.float32"),
        (lambda: send(x, [scales, codes.float()], noise=noise), payload + ", of torch.int8 or torch.uint8"),
        (lambda: send(x, [scales, codes[:, :2]], noise=noise), payload),
        (lambda: send(x, [scales, codes.mT.contiguous().mT], noise=noise), payload),
        (lambda: send(x, sent, noise=noise._replace(table=noise.table[:, :64])), r"table on a CPU, \[R, 128\]"),
        (lambda: send(x, sent, noise=noise._replace(rows=noise.rows.long())), rows + "uous, of torch.int32"),
        (lambda: send(x, sent, noise=noise._replace(shifts=noise.shifts[:5])), r"shifts on a CPU, \[6\], of"),
        (lambda: serve(sent, [payload[0, :2] for payload in sent], noise), "coded must have 3 rows .got 2."),
        (lambda: serve(sent, [payload[0] for payload in sent], noise, left=x), "left must have 3 blocks .got 6."),
        (lambda: vote.at(level).send(x, vote.message(1, 6)), r"\(kind='vote', block=128, levels=0\) need noise"),
        (lambda: sign.at(level).send(x, sign.message(1, 6), noise=vote.noise(6)[0]), "take no noise"),
    ]
    for call, what in calls:
        with pytest.raises(CompressorError, match=what):
            call()
    assert torch.equal(x, torch.ones(6, 128)) and all((one == 1).all() for one in sent)
    for row in (-1, 6, 2**40):
        at = torch.tensor([0, 1, 2, 3, 4, row])
        for call in (partial(send, x, sent, at, noise), partial(write, sent, x, at)):
            with pytest.raises(CompressorError, match=beyond):
                call()
    for row in (-1, 512):
        with pytest.raises(CompressorError, match=beyond):
            send(x, sent, noise=noise._replace(rows=torch.full((6,), row, dtype=torch.int32)))


@pytest.mark.parametrize(
    ("kind", "block", "levels", "what"),
    [
        ("int8", 128, 127, "kind must be one of uniform, qsgd, sign, vote, fp8, natural, mxfp4"),
        ("qsgd", 128, 0, "levels must be from 1 to 127"),
        ("sign", 128, 1, "levels must be 0"),
        ("mxfp4", 48, 0, "block must be a multiple of 32"),
        ("fp8", 0, 0, "block must be a multiple of 1, at least 1"),
        ("fp8", 2**31, 0, r"and below 2\*\*31"),
    ],
)
def test_a_form_that_does_not_exist_is_refused(kind: str, block: int, levels: int, what: str) -> None:
    with pytest.raises(SettingsError, match=what):
        CodeFormat(kind, block, levels)


@pytest.fixture
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where the library is looked for: a place of this test's own. Nothing is known of it, and nobody warned."""
    monkeypatch.setattr(library, "PATH", tmp_path / "_kernels.so")
    monkeypatch.delenv(library.VARIABLE, raising=False)
    library._warn.cache_clear()
    return tmp_path / "_kernels.so"


UNUSABLE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", ""),
    "text": (lambda _: b"text", ""),
    "elf": (lambda _: b"\x7fELF" + bytes(500), ""),
    "another": (lambda _: Path(_ctypes.__file__).read_bytes(), "is another library"),
    "another version": (lambda whole: whole, rf"has version {library.VERSION} and this commhooks needs 0: install it"),
    "cut off early": (lambda whole: whole[: len(whole) // 10], "is damaged: it is shorter"),
    "cut off late": (lambda whole: whole[: len(whole) * 999 // 1000], "is damaged: it is shorter"),
    "missing": (bytes, r"they are not built \(.* does not exist\)"),
}
"""What a file holds, by the library, and why that is not used."""


@needs_library
@pytest.mark.parametrize("what", UNUSABLE)
def test_a_library_that_cannot_be_used_is_told_once(what: str, placed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, expected = UNUSABLE[what]
    if what.startswith("cut") and sys.platform != "linux":
        pytest.skip("other systems' loaders find this themselves")
    if what != "missing":
        placed.write_bytes(content(Path(library.__file__).with_name("_kernels.so").read_bytes()))
    if what == "another version":
        monkeypatch.setattr(library, "VERSION", 0)
    with pytest.warns(UserWarning, match="commhooks has no compiled passes") as warned:
        found, again, level = compiled(), compiled(), library.chosen()
    assert again == found and level is None and (found.level, found.levels, found.kinds) == (None, (), ())
    assert len(warned) == 1 and found.reason in str(warned[0].message) and re.search(expected, found.reason)
    assert str(placed) in found.reason and str(found) == f"compiled passes: none, since {found.reason}"


def test_off_is_no_warning(placed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert library.chosen() is None and compiled().level is None
    monkeypatch.setenv(library.VARIABLE, "plain")
    with pytest.raises(SettingsError, match="COMMHOOKS_COMPILED is 'plain', but they are not built"):
        library.chosen()


@needs_library
def test_a_level_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "avx")
    with pytest.raises(SettingsError, match="COMMHOOKS_COMPILED must be avx512, avx2, sse42, plain or off .got 'avx'."):
        compiled()
    monkeypatch.setattr(library, "levels_of", lambda _: ("plain",))
    monkeypatch.setenv(library.VARIABLE, "avx2")
    with pytest.raises(SettingsError, match="is 'avx2', but this processor, or the compiler of .* has only plain"):
        compiled()
    library.function.cache_clear()
    with pytest.raises(SettingsError, match="there is no level 'avx512'"):
        CodeKernels("avx512", CodeFormat("sign", 8)).write(Case("sign", 8).message(1, 1), torch.zeros(1, 8))


@needs_library
@pytest.mark.parametrize("level", LEVELS)
def test_the_variable_chooses_a_level_and_the_highest_is_taken_without(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    found = compiled()
    assert found.level == LEVELS[0] and found.levels == LEVELS and library.chosen() == LEVELS[0]
    assert str(found).startswith(f"compiled passes: {LEVELS[0]} (the highest that this processor has; of ")
    monkeypatch.setenv(library.VARIABLE, level)
    assert library.chosen() == level
    assert f"{level} (COMMHOOKS_COMPILED says so" in str(compiled())


@needs_library
def test_every_level_that_the_kernel_reports_is_found() -> None:
    """The library asks the processor itself; Linux lists the same in a file."""
    file = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not file.exists():
        pytest.skip("Linux on x86 lists them")
    flags = next(line for line in file.read_text().splitlines() if line.startswith("flags")).split()
    wanted = {"sse42": {"sse4_2"}, "avx2": {"avx2"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}
    assert {*LEVELS} == {"plain", *(level for level, needed in wanted.items() if needed <= {*flags})}


@needs_library
@every_kind_at_a_level
def test_state_that_a_pass_adds_is_exchanged_for_what_the_code_leaves_out(name: str, level: str) -> None:
    """State lies in several tensors; the passes are those of sums that were formed before, also on two threads."""
    torch.set_num_threads(2)
    for block, k in ((128, 1100), (4096 + 32 * KINDS[name][3], 32)):
        case = Case(name, block)
        kernels, (noise, _) = case.at(level, 0.7), case.noise(k)
        x, e = (torch.from_numpy(case.blocks(k)) for _ in range(2))
        rows = torch.from_numpy(case.random.permutation(k))
        left, sent = x + e, case.message(1, k)
        kernels.send(left, sent, rows, noise)
        blocks, again = x.clone(), case.message(1, k)
        parts = [part.clone() for part in e.split([1, k // 2, k - 1 - k // 2])]
        kernels.send(blocks, again, rows, noise, residuals=[part.flatten() for part in parts])
        same(blocks, e)
        same(torch.cat(parts), left)
        coded, other = ([payload[0] for payload in case.message(1, k)] for _ in range(2))
        kernels.serve(sent, coded, noise, error=e, left=left)
        before, parts = torch.empty_like(e), [part.clone() for part in e.split([k - 3, 3])]
        kernels.serve(sent, other, noise, errors=parts, left=before)
        same(before, e)
        same(torch.cat(parts), left)
        for own, expected in zip(
            (*case.arrays(again), *case.arrays(other)), (*case.arrays(sent), *case.arrays(coded)), strict=True
        ):
            same(own, expected)
        with pytest.raises(CompressorError, match=f"residuals must have {k} blocks"):
            kernels.send(blocks, again, rows, noise, residuals=parts[:1])
        with pytest.raises(CompressorError, match="need left for their old values"):
            kernels.serve(sent, other, noise, errors=parts)
