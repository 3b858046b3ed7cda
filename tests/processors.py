"""Run what depends on a processor's kernels under others than its own: `python -m tests.processors`.

Variables make one x86 machine three: its own kernels, those for AVX2, and those for SSE4. ATen, MKL and oneDNN each
mind a variable of their own. `--kernels SSE4` asks for these alone; other arguments go on to pytest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "SSE4": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
OFF_INTEL = {"AVX2": {"MKL_CBWR": "AUTO"}, "SSE4": {"MKL_CBWR": "COMPATIBLE"}}
"""MKL minds MKL_ENABLE_INSTRUCTIONS on Intel's processors alone. Elsewhere this variable gives it other kernels: with
AUTO for products with vectors and for QR, with COMPATIBLE for all."""


@dataclass(frozen=True)
class Kernels:
    """Which kernels a process computes with, by what can be seen of them."""

    aten: str
    """The name that ATen gives them: AVX512, AVX2, DEFAULT."""
    draws: str
    """Digests of random numbers (ATen),"""
    products: str
    """of products of matrices and vectors (MKL),"""
    convolution: str
    """and of a convolution (oneDNN)."""


def kernels_here(_rank: int = 0) -> Kernels:
    """Return what this process computes with."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.arange(300 * 300, dtype=torch.float64).view(300, 300)
    M, N = (((numbers * factor).frac() - 0.5).float() for factor in (0.7390851, 0.5671433))
    images, weights = M[:, :256].reshape(1, 3, 160, 160), N[:4, :27].reshape(4, 3, 3, 3)
    return Kernels(
        aten=torch.backends.cpu.get_cpu_capability(),
        draws=digest(torch.randn(50, 50, generator=generator)),
        products=digest(M @ N) + digest(M @ N[0]),
        convolution=digest(torch.nn.functional.conv2d(images, weights)),
    )


def digest(tensor: Tensor) -> str:
    """Return a short digest of the elements' bits."""
    return hashlib.blake2b(tensor.contiguous().numpy().tobytes(), digest_size=4).hexdigest()


def environment_for(name: str) -> dict[str, str]:
    """Return the variables that choose kernels."""
    cpu = Path("/proc/cpuinfo")
    is_intels = not cpu.exists() or "GenuineIntel" in cpu.read_text()
    return SETTINGS[name] | ({} if is_intels else OFF_INTEL[name])


def asked_for() -> str | None:
    """Return the setting that this process was started under; None if it may use the processor's own kernels."""
    return next((name for name, setting in SETTINGS.items() if setting.items() <= os.environ.items()), None)


def kernels_under(variables: dict[str, str]) -> tuple[Kernels, str]:
    """Return what a process with these variables computes with, and what oneDNN says that it is limited to."""
    code = "import json; from tests.processors import kernels_here; print(json.dumps(vars(kernels_here())))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ONEDNN_VERBOSE": "1", **variables}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    isa = re.search(r"info,cpu,isa:(.*)", said)
    return Kernels(**json.loads(said.splitlines()[-1])), isa.group(1) if isa else "?"


def check_that_kernels_change() -> None:
    """Raise SystemExit if the variables do not do what they are for."""
    own, _ = kernels_under({})
    avx2, avx2_isa = kernels_under(environment_for("AVX2"))
    sse4, sse4_isa = kernels_under(environment_for("SSE4"))
    print(f"own kernels: {own}\nAVX2: {avx2}, oneDNN {avx2_isa}\nSSE4: {sse4}, oneDNN {sse4_isa}", flush=True)
    facts = {
        "ATen's kernels are called AVX2 and DEFAULT": (avx2.aten, sse4.aten) == ("AVX2", "DEFAULT"),
        "random numbers differ": sse4.draws not in (own.draws, avx2.draws),
        "products differ": sse4.products not in (own.products, avx2.products),
        "convolutions differ": sse4.convolution not in (own.convolution, avx2.convolution),
        "oneDNN is limited": "AVX2" in avx2_isa and "SSE4" in sse4_isa,
    }
    wrong = ", ".join(fact for fact, holds in facts.items() if not holds)
    if wrong:
        raise SystemExit(f"the kernels did not change as they should on an x86 processor with AVX2; not true: {wrong}")


def main() -> int:
    """Run the tests marked `kernels` under every setting; return 0 if all pass."""
    parser = argparse.ArgumentParser(prog="python -m tests.processors", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", action="append", choices=SETTINGS, help="only these; may be repeated")
    asked, options = parser.parse_known_args()
    check_that_kernels_change()
    failed = False
    for name in asked.kernels or SETTINGS:
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "kernels and not soak and not gpu", *options]
        ended = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment_for(name)}, check=False)
        print(f"kernels for {name}: {time.monotonic() - began:.0f} s", flush=True)
        failed |= ended.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
