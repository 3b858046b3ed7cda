"""PowerSGD as a communication hook, under PyTorch's names, arguments and defaults."""

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn import Module
from torch.utils.weak import WeakTensorKeyDictionary

from commhooks.compressors import PowerSGD
from commhooks.compressors.powersgd.matrices import MatrixRule
from commhooks.engine.engine import Engine
from commhooks.errors import CheckpointError, SettingsError
from commhooks.hooks.attach import check_run_settings, check_step_has_an_end, deliver, group_or_default
from commhooks.hooks.default import on_wire
from commhooks.language.compressor import Compressor
from commhooks.scheduling.ledger import ParameterTraffic, Statistics
from commhooks.state.loss_scale import Scaler
from commhooks.state.memory import MemoryReport
from commhooks.state.resume import load_state, saved_state, searches_for_unused, snapshot_of, uncut_steps
from commhooks.state.snapshot import LoadRules, Snapshot
from commhooks.state.table import StateTable
from commhooks.wrappers import StartAfter, WireDtype


class PowerSGDState:
    """Hold the settings and the memory of PowerSGD for one model.

    For `model.register_comm_hook(PowerSGDState(process_group, ...), powerSGD_hook)`, or `batched_powerSGD_hook`, on
    ddp_core's DDP or PyTorch's; make one for each model, on every rank in the same order. If it is used with another
    model afterwards, everything begins anew, the warm-up too; models that take turns raise `SettingsError`. The
    arguments that may be given by position, and their defaults, are PyTorch's:

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
    names, for which see `bind`); `wire` casts what is sent; `policy`, `hook_timeout`, `residuals` and `atomic` are
    those of `attach`.

    It can be pickled once it knows the parameters' names, with this rank's residuals; the process group is not saved,
    and a state that was unpickled uses the default one. `torch.load` takes it at its defaults.
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
        residuals: str = "fp32",
        atomic: bool = False,
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
        self.residuals = residuals
        self.atomic = atomic
        check_run_settings("PowerSGDState", policy, hook_timeout)
        self._form = (wire, matrices)
        self._compressor = self._make_compressor(wire, matrices)
        self._model: Callable[[], Module | None] = _no_model
        self._warm_up: Statistics | None = None
        """What was counted before the first step that compresses."""
        self._earlier: Any = WeakTensorKeyDictionary()
        """The parameters of models that this state was used with before."""
        self._last_pass = -1
        """The backward pass that the last bucket came from; -1 outside of any."""
        self._to_load: tuple[Mapping[str, Any] | CheckpointError, LoadRules] | None = None
        # Made here where that is possible: the order in which states are built is the same on every rank, the order in
        # which two models' first buckets come need not be.
        self._engine = self._make_engine() if dist.is_initialized() else None

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, "_engine") and name in vars(self) and not name.startswith("_"):
            raise SettingsError(f"PowerSGDState: {name} cannot be changed to {value!r} any more; make a new state.")
        super().__setattr__(name, value)

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        """Which of how many ranks this is, in the process group."""
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine.rank_and_world_size

    @property
    def iter(self) -> int:
        """How many steps were synchronised."""
        return self._engine.step if self._engine is not None else 0

    @property
    def parameters(self) -> StateTable | None:
        """What is remembered, by parameter; None before the first bucket without a process group."""
        return self._engine.state if self._engine is not None else None

    def bind(self, model: Module, *, scaler: Scaler | None = None) -> None:
        """Learn the names of a model's parameters, which PyTorch's DDP does not tell a hook (ddp_core's does).

        Call it before the first backward pass, with the DDP: what it does with unused parameters, and ddp_core's
        buckets, are learned too. `scaler`, a `torch.amp.GradScaler`: residuals follow the scale of the loss. Raises
        `SettingsError` if `skip` fits none, `CheckpointError` if state was loaded that does not fit, and `AttachError`
        for a DDP that does not say which bucket ends a step, where `policy` or `atomic` need to know.
        """
        check_step_has_an_end("PowerSGDState.bind", model, self.policy, atomic=self.atomic)
        if self._engine is None:
            self._engine = self._make_engine()
        inner = getattr(model, "module", None)
        named = list((inner if isinstance(inner, Module) else model).named_parameters())
        self._compressor.check_parameters(name for name, _ in named)
        if self._engine.state.knows_none_of(parameter for _, parameter in named):
            self._engine = self._begin_anew(self._engine)
        self._engine.bind([(name, parameter) for name, parameter in named if parameter.requires_grad])
        self._engine.may_be_unused = searches_for_unused(model)
        self._engine.uncut_steps = uncut_steps(model)
        self._model = weakref.ref(model)
        if scaler is not None:
            self._engine.loss_scale.follow(scaler)
        self._load_what_waits()

    def memory_report(self) -> MemoryReport:
        """Return how many bytes the hook takes on this rank, and for what."""
        return self._ready_engine().memory_report()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, as plain data: see `Attachment.state_dict`.

        Raises `CheckpointError` where names are not known, for which see `bind`.
        """
        return saved_state(self._ready_engine(), self._model())

    def snapshot(self) -> Snapshot:
        """Return what `state_dict` does, with the tensors themselves and not copies."""
        return snapshot_of(self._ready_engine(), self._model())

    def differences(self, snapshot: Snapshot, rules: LoadRules) -> list[str]:
        """List every difference between a snapshot and this run that would make loading the snapshot raise."""
        if self._engine is None:
            self._engine = self._make_engine()
        self._take_form_of(snapshot.settings)
        return self._engine.differences(snapshot, rules)

    def load_state_dict(
        self,
        state: Mapping[str, Any] | CheckpointError,
        *,
        world_size: str = "refuse",
        settings: str = "refuse",
        missing: str = "refuse",
    ) -> None:
        """Go on from what `state_dict` returned; see `Attachment.load_state_dict`.

        Before the first step: ranks that bring different states hear of it at their first bucket. Where names are not
        known yet, the state is checked when they are.
        """
        self._to_load = state, LoadRules(world_size=world_size, settings=settings, missing=missing)
        if self._engine is not None:
            self._load_what_waits()

    def set_grad_scale(self, scale: float) -> None:
        """Set the loss scale from the next step on; residuals are rescaled to it. See also `scaler` of `bind`."""
        if self._engine is None:
            self._engine = self._make_engine()
        self._engine.loss_scale.announce(scale)

    def __getstate__(self) -> dict[str, Any]:
        settings = {name: value for name, value in vars(self).items() if name in _SETTINGS}
        return {"settings": settings | {"wire": str(self.wire) if self.wire else ""}, "state": self.state_dict()}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        if not isinstance(saved, dict) or not isinstance(saved.get("settings"), dict) or "state" not in saved:
            raise CheckpointError("PowerSGDState: the pickle is damaged: it has no settings, or no state.")
        settings = dict(saved["settings"])
        unknown = settings.keys() - _SETTINGS
        if unknown:
            raise CheckpointError(f"PowerSGDState: settings {', '.join(sorted(map(str, unknown)))} are not known.")
        wire = settings.get("wire", "")
        if wire not in _WIRES:
            raise CheckpointError(f"PowerSGDState: wire must be one of {', '.join(map(repr, _WIRES))} (got {wire!r}).")
        settings["wire"] = _WIRES[wire]
        PowerSGDState.__init__(self, None, **settings)
        self.load_state_dict(saved["state"])

    def _ready_engine(self) -> Engine:
        if self._to_load is not None:
            raise CheckpointError(
                "PowerSGDState: state was loaded that has not found its parameters; call bind(model)."
            )
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine

    def _load_what_waits(self) -> None:
        assert self._engine is not None, "names are learned by an engine"
        if self._to_load is not None:
            waiting, self._to_load = self._to_load, None
            self._warm_up = None
            if isinstance(waiting[0], Mapping):
                self._take_form_of(waiting[0].get("settings"))
            load_state(self._engine, *waiting, self._model())

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
        """Return (rate, elements before compression, elements sent) of the steps since warm-up, as PyTorch's does.

        What is sent includes one count for each parameter if some may be unused, which PyTorch's hook does not send.
        Loading a state begins the count anew. `statistics()` counts all steps.
        """
        if self._warm_up is None:
            return 0.0, 0, 0
        counted = self.statistics().since(self._warm_up)
        before, after = counted.gradient_elements, counted.payload_elements
        return (before / after if after else 0.0, before, after)

    def run(
        self, bucket: GradBucket, wire: torch.dtype | None = None, matrices: MatrixRule | None = None
    ) -> torch.futures.Future[Tensor]:
        """Average a bucket; `wire` and `matrices`, where given, override the state's, and must stay the same."""
        if self._engine is None:
            self._engine = self._make_engine()
        self._load_what_waits()
        if self._engine.is_of_another_model(bucket):
            if self._engine.is_bound:
                raise _two_models("bind was called with one, and gradients of the other came")
            if self._last_pass == torch._C._current_graph_task_id() != -1:
                raise _two_models("both have gradients in one backward pass")
            self._engine = self._begin_anew(self._engine)
        if self._earlier and any(parameter in self._earlier for parameter in bucket.parameters()):
            raise _two_models("the one before has come again")
        self._last_pass = torch._C._current_graph_task_id()
        form = (wire or self.wire, matrices or self.matrices)
        if form != self._form:
            if self._engine.step or bucket.index():
                raise SettingsError(
                    f"PowerSGDState: wire dtype and matrices were {self._form} and cannot become {form} in between; "
                    "use one hook with one state."
                )
            self._form = form
            self._engine.compressor = self._make_compressor(*form)
        if self._warm_up is None and self._engine.step >= self.start_powerSGD_iter:
            self._warm_up = self._engine.statistics()
        return deliver(self._engine.run(bucket), bucket)

    def _begin_anew(self, last: Engine) -> Engine:
        """End the last model's engine, and return a fresh one for another model."""
        for parameter in last.state.parameters():
            self._earlier[parameter] = True
        last.stop()
        self._form, self._warm_up = (self.wire, self.matrices), None
        fresh = self._make_engine()
        fresh.loss_scale = last.loss_scale  # announced, or followed, whatever the model
        return fresh

    def _take_form_of(self, settings: object) -> None:
        """Expect the hook that saved these settings: which one it is decides wire dtype and matrices, in `run`."""
        if self._engine is None or self._engine.step or not isinstance(settings, Mapping):
            return
        wire = next((dtype for dtype in _WIRES.values() if repr(dtype) == settings.get("dtype")), None)
        inner = "inner.matrices" if wire is None else "inner.inner.matrices"
        matrices = next((rule for rule in get_args(MatrixRule) if repr(rule) == settings.get(inner)), self._form[1])
        self._form = (wire, matrices)
        self._engine.compressor = self._make_compressor(*self._form)

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
            residuals=self.residuals,
            atomic=self.atomic,
        )


def _no_model() -> None:
    return None


def _two_models(how: str) -> SettingsError:
    return SettingsError(
        f"PowerSGDState: it is used with two models that have no parameter in common, and {how}; make one state for "
        "each model, or, if they are parts of one that take turns, call bind with the whole."
    )


_SETTINGS = set(inspect.signature(PowerSGDState).parameters) - {"process_group"}
_WIRES = {"": None} | {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16)}


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

# PyTorch's documentation saves hook and state together; `torch.load` takes them at its defaults, and nothing else.
torch.serialization.add_safe_globals([PowerSGDState, powerSGD_hook, batched_powerSGD_hook])
