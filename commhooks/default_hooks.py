"""The stateless hooks, under a module name familiar from PyTorch."""

from commhooks.hooks.default import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]
