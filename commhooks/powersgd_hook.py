"""PowerSGD as a communication hook, under PyTorch's names, arguments and defaults."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from commhooks.compressor import Compressor
from commhooks.compressors import PowerSGD
from commhooks.default_hooks import on_wire
from commhooks.engine import Engine
from commhooks.errors import SettingsError
from commhooks.hook import deliver, group_or_default
from commhooks.state import StateTable
from commhooks.statistics import Statistics
from commhooks.wrappers import StartAfter, WireDtype


class PowerSGDState:
    """Hold the settings and the memory of PowerSGD for one model.

    For `model.register_comm_hook(PowerSGDState(process_group, ...), powerSGD_hook)`, on ddp_core's DDP or PyTorch's;
    make one for each model, on every rank in the same order. Arguments and defaults are PyTorch's:

    - `matrix_approximation_rank`: lower: smaller messages, more left to the residual.
    - `start_powerSGD_iter`: so many steps of plain all-reduce come first. Unlike PyTorch's, 0 and 1 are allowed.
    - `min_compression_rate`: a matrix n×m is compressed if (n + m)·rank·rate < n·m. Unlike PyTorch's, a rate below
    1 does not make messages larger than the gradient, and vectors are never factorised.
    - `use_error_feedback`, `warm_start`: leave them on.
    - `orthogonalization_epsilon`: not needed here, zero columns do no harm; damps directions of P of about that norm.
    - `random_seed`: of the first Q, together with the parameter's name.
    - `compression_stats_logging_frequency`, `batch_tensors_with_same_shape`: accepted, and without effect: nothing is
      logged (see `statistics()`), and the result does not depend on batching.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self._compressor: Compressor = StartAfter(
            inner=PowerSGD(
                rank=matrix_approximation_rank,
                min_compression_rate=min_compression_rate,
                error_feedback=use_error_feedback,
                warm_start=warm_start,
                epsilon=orthogonalization_epsilon,
                seed=random_seed,
            ),
            steps=start_powerSGD_iter,
        )
        self._wire: torch.dtype | None = None
        # Made here where that is possible: the order in which states are built is the same on every rank, the order in
        # which two models' first buckets come need not be.
        self._engine = self._make_engine() if dist.is_initialized() else None

    @property
    def iter(self) -> int:
        """How many steps were synchronised."""
        return self._engine.step if self._engine is not None else 0

    @property
    def parameters(self) -> StateTable | None:
        """What is remembered, by parameter; None before the first bucket without a process group."""
        return self._engine.state if self._engine is not None else None

    def statistics(self) -> Statistics:
        """Return what was counted so far, on this rank."""
        return self._engine.statistics() if self._engine is not None else Statistics()

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements before compression, elements after it), of all whole steps, warm-up included."""
        counted = self.statistics()
        before, after = counted.gradient_elements, counted.payload_elements
        return (before / after if after else 0.0, before, after)

    def run(self, bucket: GradBucket, wire: torch.dtype | None = None) -> torch.futures.Future[Tensor]:
        """Average a bucket; `wire` casts what is sent, and must be the same every time."""
        if self._engine is None:
            self._engine = self._make_engine()
        if wire != self._wire:
            if self._engine.step or bucket.index():
                raise SettingsError(
                    f"PowerSGDState: the wire's dtype was {self._wire} and cannot become {wire} in between."
                )
            self._wire = wire
            self._engine.compressor = (
                self._compressor if wire is None else WireDtype(inner=self._compressor, dtype=wire)
            )
        return deliver(self._engine.run(bucket), bucket)

    def _make_engine(self) -> Engine:
        return Engine(self._compressor, group_or_default(self.process_group))


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:  # noqa: N802
    """Average the bucket by PowerSGD; see `PowerSGDState` and `commhooks.compressors.powersgd`."""
    return state.run(bucket)


def _powersgd_on_wire(state: Any, bucket: GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    run: torch.futures.Future[Tensor] = state.run(bucket, wire=dtype)
    return run


on_wire[powerSGD_hook] = _powersgd_on_wire
