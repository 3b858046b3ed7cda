"""PowerSGD as a communication hook, under PyTorch's names, arguments and defaults."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn import Module

from commhooks.compressor import Compressor
from commhooks.compressors import PowerSGD
from commhooks.default_hooks import on_wire
from commhooks.engine import Engine
from commhooks.errors import SettingsError
from commhooks.hook import check_run_settings, deliver, group_or_default
from commhooks.matrices import MatrixRule
from commhooks.state import StateTable
from commhooks.statistics import ParameterTraffic, Statistics
from commhooks.wrappers import StartAfter, WireDtype


class PowerSGDState:
    """Hold the settings and the memory of PowerSGD for one model.

    For `model.register_comm_hook(PowerSGDState(process_group, ...), powerSGD_hook)`, or `batched_powerSGD_hook`, on
    ddp_core's DDP or PyTorch's; make one for each model, on every rank in the same order. The arguments that may be
    given by position, and their defaults, are PyTorch's:

    - `matrix_approximation_rank`: lower: smaller messages, more left to the residual.
    - `start_powerSGD_iter`: so many steps of plain all-reduce come first. Unlike PyTorch's, 0 and 1 are allowed.
    - `min_compression_rate`: a matrix n×m is compressed if (n + m)·rank·rate < n·m. Unlike PyTorch's, a rate below
    1 does not make messages larger than the gradient, and vectors are never factorised.
    - `use_error_feedback`, `warm_start`: leave them on.
    - `orthogonalization_epsilon`: not needed here, zero columns do no harm; damps directions of P of about that norm.
    - `random_seed`: of the first Q, together with the parameter's name.
    - `compression_stats_logging_frequency`, `batch_tensors_with_same_shape`: accepted, and without effect: nothing is
      logged (see `statistics()`), and the result does not depend on batching.

    Those by name are ours; `PowerSGD` says what each does: `alternating`, `iterations`, `matrices`, `skip` (by
    names, for which see `bind`); `wire` casts what is sent; `policy` and `hook_timeout` are those of `attach`.
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
        *,
        alternating: bool = False,
        iterations: int = 1,
        matrices: MatrixRule = "first-dimension",
        skip: tuple[str, ...] = (),
        wire: torch.dtype | None = None,
        policy: str = "fifo",
        hook_timeout: float | None = None,
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
        self.alternating = alternating
        self.iterations = iterations
        self.matrices = matrices
        self.skip = skip
        self.wire = wire
        self.policy = policy
        self.hook_timeout = hook_timeout
        check_run_settings("PowerSGDState", policy, hook_timeout)
        self._form = (wire, matrices)
        self._compressor = self._make_compressor(wire, matrices)
        # Made here where that is possible: the order in which states are built is the same on every rank, the order in
        # which two models' first buckets come need not be.
        self._engine = self._make_engine() if dist.is_initialized() else None

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, "_engine") and name in vars(self) and not name.startswith("_"):
            raise SettingsError(f"PowerSGDState: {name} cannot be changed to {value!r} any more; make a new state.")
        super().__setattr__(name, value)

    @property
    def iter(self) -> int:
        """How many steps were synchronised."""
        return self._engine.step if self._engine is not None else 0

    @property
    def parameters(self) -> StateTable | None:
        """What is remembered, by parameter; None before the first bucket without a process group."""
        return self._engine.state if self._engine is not None else None

    def bind(self, model: Module) -> None:
        """Learn the names of a model's parameters, which PyTorch's DDP does not tell a hook (ddp_core's does).

        Call it before the first backward pass, with the model or its DDP. Raises `SettingsError` if `skip` fits none.
        """
        if self._engine is None:
            self._engine = self._make_engine()
        inner = getattr(model, "module", None)
        named = list((inner if isinstance(inner, Module) else model).named_parameters())
        self._compressor.check_parameters(name for name, _ in named)
        self._engine.bind(named)

    def statistics(self) -> Statistics:
        """Return what was counted so far, on this rank."""
        return self._engine.statistics() if self._engine is not None else Statistics()

    def last_step(self) -> Statistics:
        """Return what the last whole step counted, on this rank."""
        return self._engine.last_step() if self._engine is not None else Statistics()

    def by_parameter(self) -> dict[str, ParameterTraffic]:
        """Return each parameter's share of what was counted so far, on this rank; PyTorch's DDP tells no names."""
        return self._engine.by_parameter() if self._engine is not None else {}

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements before compression, elements after it), of all whole steps, warm-up included."""
        counted = self.statistics()
        before, after = counted.gradient_elements, counted.payload_elements
        return (before / after if after else 0.0, before, after)

    def run(
        self, bucket: GradBucket, wire: torch.dtype | None = None, matrices: MatrixRule | None = None
    ) -> torch.futures.Future[Tensor]:
        """Average a bucket; `wire` and `matrices`, where given, override the state's, and must stay the same."""
        if self._engine is None:
            self._engine = self._make_engine()
        form = (wire or self.wire, matrices or self.matrices)
        if form != self._form:
            if self._engine.step or bucket.index():
                raise SettingsError(
                    f"PowerSGDState: wire dtype and matrices were {self._form} and cannot become {form} in between; "
                    "use one hook with one state."
                )
            self._form = form
            self._engine.compressor = self._make_compressor(*form)
        return deliver(self._engine.run(bucket), bucket)

    def _make_compressor(self, wire: torch.dtype | None, matrices: MatrixRule) -> Compressor:
        inner = PowerSGD(
            rank=self.matrix_approximation_rank,
            min_compression_rate=self.min_compression_rate,
            error_feedback=self.use_error_feedback,
            warm_start=self.warm_start,
            epsilon=self.orthogonalization_epsilon,
            seed=self.random_seed,
            alternating=self.alternating,
            iterations=self.iterations,
            matrices=matrices,
            skip=self.skip,
        )
        started = StartAfter(inner=inner, steps=self.start_powerSGD_iter)
        return started if wire is None else WireDtype(inner=started, dtype=wire)

    def _make_engine(self) -> Engine:
        return Engine(
            self._compressor,
            group_or_default(self.process_group),
            label="PowerSGDState",
            policy=self.policy,
            hook_timeout=self.hook_timeout,
        )


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:  # noqa: N802
    """Average the bucket by PowerSGD, matrix by matrix; see `PowerSGDState` and `commhooks.compressors.powersgd`."""
    return state.run(bucket)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:  # noqa: N802
    """Average the bucket by PowerSGD as one nearly square matrix, vectors and all: fast, and coarser."""
    return state.run(bucket, matrices="whole-bucket")


def _powersgd_on_wire(state: Any, bucket: GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    run: torch.futures.Future[Tensor] = state.run(bucket, wire=dtype)
    return run


def _batched_powersgd_on_wire(state: Any, bucket: GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    run: torch.futures.Future[Tensor] = state.run(bucket, wire=dtype, matrices="whole-bucket")
    return run


on_wire[powerSGD_hook] = _powersgd_on_wire
on_wire[batched_powerSGD_hook] = _batched_powersgd_on_wire
