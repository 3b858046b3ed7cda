"""The formats of codes in two hops, in NumPy: what compiled passes must compute, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import numpy.typing

Array = numpy.typing.NDArray[Any]
SMALLEST = numpy.float32(2.0**-149)
E2M1 = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=numpy.float32)


def _array(found: Any) -> Array:
    """Return what NumPy's types say less about."""
    assert isinstance(found, numpy.ndarray)
    return found


@dataclasses.dataclass(frozen=True)
class Oracle:
    """One kind of code; `kind` and `levels` are those of `Form`. Blocks are [k, n] in fp32."""

    kind: str
    levels: int = 0

    def encode(self, x: Array, draws: Array | None) -> list[Array]:
        """Return scales [k, 1] (exponents [k, n/32]; none of votes) and bytes; `draws` are [k, n] of uint16."""
        with numpy.errstate(all="ignore"):
            if self.kind == "mxfp4":
                return _to_mxfp4(x)
            if self.kind == "vote":
                assert draws is not None
                return [_pack_signs(numpy.where(x == 0, draws >> 15 == 1, numpy.signbit(x)))]
            scales = self.scales(x)
            if self.kind == "sign":
                return [scales, _pack_signs(numpy.signbit(x))]
            values = _divided(x, scales)
            if self.kind == "fp8":
                return [scales, _to_e4m3(values)]
            if self.kind == "natural":
                assert draws is not None
                carried = values.view(numpy.int32) + (draws.astype(numpy.int32) * 128 + 64)
                return [scales, ((carried >> 31 & 1) << 7 | carried >> 23 & 127).astype(numpy.uint8)]
            return [scales, self._pack_digits(self._rounded(values, draws))]

    def scales(self, x: Array) -> Array:
        """Return scales [k, 1] of all kinds but MXFP4 and vote."""
        largest = numpy.abs(x).max(1, keepdims=True)  # NaN if there is one
        if self.kind == "sign":
            return _array(numpy.abs(x).astype(numpy.float64).mean(1, keepdims=True).astype(numpy.float32))
        if self.kind == "natural":
            fraction, exponent = numpy.frexp(largest.astype(numpy.float64))
            power = numpy.ldexp(1.0, numpy.where(fraction == 0.5, exponent - 1, exponent)).astype(numpy.float32)
            power = numpy.where(largest == 0, SMALLEST, power)
            return _at_least_smallest(numpy.where(numpy.isfinite(largest), power, numpy.float32("nan")))
        if self.kind == "qsgd":
            norm = numpy.sqrt((x.astype(numpy.float64) ** 2).sum(1, keepdims=True)) / self.levels
            most = numpy.finfo(numpy.float32).max
            return _at_least_smallest(
                numpy.where(numpy.isfinite(norm), norm.clip(max=most), norm).astype(numpy.float32)
            )
        return _at_least_smallest(largest / numpy.float32(448 if self.kind == "fp8" else self.levels))

    def decode(self, code: list[Array], n: int, damping: float) -> Array:
        """Return blocks [k, n]."""
        with numpy.errstate(all="ignore"):
            codes = code[-1]
            if self.kind in ("sign", "vote"):
                scales = code[0] if self.kind == "sign" else numpy.ones((len(codes), 1), dtype=numpy.float32)
                bits = numpy.concatenate([codes >> bit & 1 for bit in range(8)], axis=1)
                decoded = numpy.where(bits == 1, -scales, scales)
            elif self.kind == "mxfp4":
                nibbles = numpy.concatenate([codes & 15, codes >> 4], axis=1)
                numbers = numpy.where(nibbles & 8, -E2M1[nibbles & 7], E2M1[nibbles & 7])
                decoded = numbers * numpy.repeat(_powers(code[0]), 32, axis=1)
            elif self.kind == "fp8":
                decoded = _from_e4m3(codes) * code[0]
            elif self.kind == "natural":
                bits = (codes & 128).astype(numpy.uint32) << 24 | (codes & 127).astype(numpy.uint32) << 23
                decoded = bits.view(numpy.float32) * code[0]
            else:
                decoded = self._digits(codes, n).astype(numpy.float32) * code[0]
            return _array(decoded * numpy.float32(damping))

    def mean(self, received: list[Array], n: int, damping: float) -> Array:
        """Return the mean [k, n] of codes [W, k, ...]."""
        ranks = len(received[0])
        share = numpy.float32(2.0 ** -int(numpy.ceil(numpy.log2(ranks))))
        with numpy.errstate(all="ignore"):
            parts = [self.decode([payload[rank] for payload in received], n, damping) * share for rank in range(ranks)]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            return _array(total / (ranks * share))

    @property
    def _digits_per_byte(self) -> int:
        return 1 if self.levels > 7 else 2 if self.levels > 1 else 4

    def _rounded(self, values: Array, draws: Array | None) -> Array:
        if draws is None:
            rounded = numpy.rint(values)
        else:
            rounded = numpy.floor(values + ((draws + 0.5) * 2.0**-16).astype(numpy.float32))
        return numpy.nan_to_num(rounded).clip(-self.levels, self.levels).astype(numpy.int64)

    def _pack_digits(self, integers: Array) -> Array:
        parts = numpy.split(integers, self._digits_per_byte, axis=1)
        base = 2 ** (8 // self._digits_per_byte)
        return _array(
            numpy.sum([part * base**place for place, part in enumerate(parts)], axis=0)
            .astype(numpy.int8)
            .view(numpy.uint8)
        )

    def _digits(self, codes: Array, n: int) -> Array:
        rest, base, parts = codes.view(numpy.int8).astype(numpy.int64), 2 ** (8 // self._digits_per_byte), []
        for _ in range(self._digits_per_byte):
            digit = (rest + base // 2) % base - base // 2
            parts.append(digit)
            rest = (rest - digit) // base
        return numpy.concatenate(parts, axis=1)[:, :n]


def _at_least_smallest(scales: Array) -> Array:
    return _array(numpy.where(scales < SMALLEST, SMALLEST, scales).astype(numpy.float32))


def _divided(x: Array, scales: Array) -> Array:
    up = numpy.where(scales < numpy.float32(2.0**-64), numpy.float32(2.0**64), numpy.float32(1))
    return _array((x * up) * (numpy.float32(1) / (scales * up)))


def _pack_signs(negative: Array) -> Array:
    parts = numpy.split(negative.astype(numpy.uint8), 8, axis=1)
    return _array(numpy.sum([part << bit for bit, part in enumerate(parts)], axis=0).astype(numpy.uint8))


def _to_e4m3(values: Array) -> Array:
    """Round to three fraction bits, or to multiples of 2^-9 below 2^-6."""
    magnitudes = numpy.abs(numpy.nan_to_num(values.astype(numpy.float64))).clip(max=448)
    exponents = numpy.frexp(magnitudes.clip(min=2.0**-6))[1] - 1
    eighths = numpy.rint(numpy.ldexp(magnitudes, 3 - exponents)).astype(numpy.int64)  # 16 carries into the exponent
    return _array(((exponents + 6) * 8 + eighths + numpy.signbit(values) * 128).astype(numpy.uint8))


def _from_e4m3(codes: Array) -> Array:
    exponents, fractions = (codes >> 3 & 15).astype(numpy.int64), codes & 7
    normal = numpy.ldexp(1 + fractions / 8, exponents - 7)
    magnitudes = numpy.where(exponents == 0, numpy.ldexp(fractions / 8.0, -6), normal)
    magnitudes = numpy.where(codes & 127 == 127, numpy.nan, magnitudes)
    return _array(numpy.where(codes & 128, -magnitudes, magnitudes).astype(numpy.float32))


def _powers(exponents: Array) -> Array:
    with numpy.errstate(over="ignore"):
        return _array(numpy.ldexp(1.0, exponents.astype(numpy.int64) - 127).astype(numpy.float32)) * numpy.where(
            exponents == 255, numpy.float32("inf"), numpy.float32(1)
        )


def _to_mxfp4(x: Array) -> list[Array]:
    groups = x.reshape(len(x), -1, 32)
    largest = numpy.abs(groups).max(2)
    exponents = (numpy.frexp(largest.astype(numpy.float64))[1] - 1 - 2 + 127).clip(0, 255)
    exponents = numpy.where(largest == 0, 0, exponents)
    exponents = numpy.where(numpy.isfinite(largest), exponents, 255).astype(numpy.uint8)
    values = (groups * (numpy.float32(1) / _powers(exponents))[..., None]).reshape(x.shape)
    distances = numpy.abs(numpy.abs(numpy.nan_to_num(values))[..., None].clip(max=6) - E2M1)
    is_nearest = distances == distances.min(-1, keepdims=True)
    nearest = numpy.where(is_nearest, [0, 2, 0, 2, 0, 2, 0, 2], 4).argmin(-1)  # of two, the even one
    nibbles = nearest + 8 * (values < 0)
    low, high = numpy.split(nibbles, 2, axis=1)
    return [exponents, (low | high << 4).astype(numpy.uint8)]
