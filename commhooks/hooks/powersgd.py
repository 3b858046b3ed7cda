"""PowerSGD as a communication hook, under PyTorch's names, arguments and defaults."""

import hashlib
import inspect
import weakref
from collections.abc import Callable, Mapping, Set
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch._compile import _disable_dynamo
from torch.nn import Module
from torch.utils.weak import WeakTensorKeyDictionary

from commhooks.communicators.parent_group import group_or_default
from commhooks.compressors import PowerSGD
from commhooks.compressors.powersgd.matrices import MatrixRule
from commhooks.engine.engine import Engine
from commhooks.errors import CheckpointError, HookTypeError, SettingsError
from commhooks.exchange.feed import Channel, Feed
from commhooks.exchange.handle import Handle
from commhooks.exchange.options import Settings, settings_of
from commhooks.hooks.default import on_wire
from commhooks.hooks.facts import (
    check_bucket,
    check_step_has_an_end,
    load_plan,
    plan_of,
    searches_for_unused,
    sparse_parameters,
    uncut_steps,
)
from commhooks.hooks.hook_functions import deliver
from commhooks.language.compressor import Compressor
from commhooks.saving.rules import LoadRules
from commhooks.saving.saved import ONLY, Differences, Saved
from commhooks.scheduling.connection import ProcessGroupConnection
from commhooks.scheduling.ledger import Statistics
from commhooks.scheduling.policy import PolicyName
from commhooks.state.loss_scale import Scaler
from commhooks.state.memory import MemoryReport
from commhooks.state.table import ResidualStorage, StateTable
from commhooks.unwrapping import is_ddp, plain_name, trained_parameters, unwrapped
from commhooks.wrappers import ErrorFeedback, StartAfter, WireDtype
from ddp_core.guard import hook_ran


class StateFeed(Feed):
    """The buckets of a DDP that calls a hook with its state: the model is known from the first of them."""

    caller = "PowerSGDState"
    may_join = True

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.label = "PowerSGDState"
        self.model: Callable[[], Module | None] = lambda: None
        """A weak reference to the DDP that was bound."""
        self._group = process_group

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The hook's group, or the default one."""
        return group_or_default(self._group)

    def like(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return no tensors: a hook learns of its parameters from buckets, and of their names from `bind`."""
        return {ONLY: {}}

    def bind(self, model: Module) -> None:
        """Learn how a DDP treats unused parameters and sparse gradients, and whose buckets to save."""
        self.model = weakref.ref(model)
        self.sparse: Set[Tensor] = sparse_parameters(model)
        self.uncut_steps: int = uncut_steps(model)

    def bucket_plan(self) -> dict[str, Any]:
        """Return ddp_core's layout of buckets, if the model is bound."""
        return plan_of(self.model())

    def load_bucket_plan(self, plan: Mapping[str, Any]) -> None:
        """Make ddp_core's DDP lay out its buckets as they were when they were saved."""
        load_plan(self.model(), plan)


class PowerSGDState(Handle[Channel]):
    """The settings and the state of PowerSGD for one model.

    Use it as `model.register_comm_hook(PowerSGDState(process_group, ...), powerSGD_hook)`, or with
    `batched_powerSGD_hook`, on ddp_core's or PyTorch's DDP; make one for each model. Making, unpickling or copying one
    has no effect on other ranks: they meet at its first bucket. States are told apart by the shapes of that bucket's
    parameters and, on ddp_core's DDP, by their names. Those of equal models are paired in the order of their first
    buckets, as with a plain DDP, so make and use them in the same order on every rank. One that only some ranks use in
    another order than that of making raises `AttachError`, after earlier ones may have been averaged with each other.
    If ranks differ in both orders, nothing shows it. If a state is later used with another model, everything starts
    over, including the warm-up; models that take turns raise `SettingsError`. The arguments that may be passed by
    position, and their defaults, are PyTorch's:

    - `matrix_approximation_rank`: lower: smaller messages, but more left in the residual.
    - `start_powerSGD_iter`: the number of initial steps that use a plain all-reduce. Unlike in PyTorch, 0 and 1 are
      allowed.
    - `min_compression_rate`: a matrix n×m is compressed if (n + m)·rank·rate < n·m. Unlike in PyTorch, a rate below 1
      does not make messages larger than the gradient, and vectors are never factorised.
    - `use_error_feedback`, `warm_start`: keep these on.
    - `orthogonalization_epsilon`: not needed here, as zero columns do no harm; damps directions of P whose norm is
      about this large.
    - `random_seed`: seeds the first Q, together with the parameter's name.
    - `compression_stats_logging_frequency`, `batch_tensors_with_same_shape`: accepted without effect: nothing is logged
      (see `statistics()`), and the result does not depend on batching.

    The keyword-only arguments are additions. `PowerSGD` describes `alternating`, `iterations`, `matrices`, `stacked`
    and `skip` (the last two need names: see `bind`); `wire` is the dtype in which messages are sent; `attach` describes
    `policy`, `hook_timeout`, `residuals` and `atomic`.

    Once it knows the parameters' names it can be pickled, with this rank's residuals; the process group is not saved,
    and an unpickled state uses the default one. `torch.load` accepts it with its default arguments.
    """

    process_group: dist.ProcessGroup | None = None
    hook_timeout: float | None = None
    _connection: Any = None

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
        stacked: tuple[str, ...] = (),
        skip: tuple[str, ...] = (),
        wire: torch.dtype | None = None,
        policy: PolicyName = "fifo",
        hook_timeout: float | None = None,
        residuals: ResidualStorage = "fp32",
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
        self.compression_stats_logging_frequency: int = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.alternating = alternating
        self.iterations = iterations
        self.matrices = matrices
        self.stacked = stacked
        self.skip = skip
        self.wire = wire
        self.policy = policy
        self.hook_timeout = hook_timeout
        self.residuals = residuals
        self.atomic = atomic
        self._settings_of_exchange()  # raises for those that cannot work
        self._form = (wire, matrices)
        """The wire dtype and matrix form that the hook in use requires; known from the first bucket on."""
        self._make_compressor()  # raises for settings that cannot work
        self._feed: Feed = StateFeed(process_group)
        self._watches, self._made = [], {}
        self._warm_up: Statistics | None = None
        """The statistics before the first step that compresses; None until then."""
        self._earlier: Any = WeakTensorKeyDictionary()
        """The parameters of models that this state was used with earlier."""
        self._last_pass = -1
        """The backward pass that the last bucket came from; -1 outside a backward pass."""
        self._engine: Engine | None = None
        """None until a process group exists."""
        if dist.is_initialized():
            self._made_engine()
        self._to_load: tuple[Saved | CheckpointError, LoadRules] | None = None
        """Loaded state that is waiting for the engine, or for the parameters' names."""

    def __setattr__(self, name: str, value: object) -> None:
        # Settings are fixed from the moment __init__ sets _to_load, its last attribute.
        if hasattr(self, "_to_load") and name in vars(self) and not name.startswith("_"):
            raise SettingsError(f"PowerSGDState: {name} cannot be changed to {value!r} any more; make a new state.")
        super().__setattr__(name, value)

    @property
    def iter(self) -> int:
        """The number of steps synchronised so far."""
        return self._engine.step if self._engine is not None else 0

    @property
    def parameters(self) -> StateTable | None:
        """The state by parameter; None before the first bucket if there is no process group."""
        return self._engine.state if self._engine is not None else None

    def bind(self, model: Module, *, scaler: Scaler | None = None) -> None:
        """Learn the names of a model's parameters, which PyTorch's DDP does not pass to a hook (ddp_core's does).

        Call it with the DDP, before the first backward pass: the state then also knows how the DDP treats unused
        parameters, and saves ddp_core's buckets. `scaler` is a `torch.amp.GradScaler`, whose changes of the loss scale
        rescale the residuals. Raises `SettingsError` if a pattern of `skip` matches no parameter, `CheckpointError` if
        loaded state does not match the model, and `AttachError` if `policy` or `atomic` needs to know which bucket ends
        a step and the DDP does not mark it.
        """
        model = unwrapped(model)
        check_step_has_an_end("PowerSGDState.bind", model, self.policy, atomic=self.atomic)
        engine = self._made_engine()
        inner = getattr(model, "module", None)
        within = inner if isinstance(inner, Module) else model
        named = [(plain_name(name), parameter) for name, parameter in within.named_parameters()]
        self._make_compressor().check(dict(named), engine.connection.world_size)
        if engine.state.knows_none_of(parameter for _, parameter in named):
            engine = self._begin_anew(engine)
        if is_ddp(model):  # what is in buckets, also if an adapter is frozen now
            trained = trained_parameters(model, model)
        else:
            trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        engine.bind(trained, may_be_unused=searches_for_unused(model))
        assert isinstance(self._feed, StateFeed), "it makes no other"
        self._feed.bind(model)
        if scaler is not None:
            engine.loss_scale.follow(scaler)
        self._load_what_waits()

    def differences(self, saved: Saved, rules: LoadRules) -> list[str]:
        """List every difference between a saved state and this run that would cause an error on loading."""
        if ONLY in saved.channels:
            self._take_form_of(self._made_engine(), saved.channels[ONLY].settings)
        return super().differences(saved, rules)

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

    def _settings_of_exchange(self) -> Settings:
        return settings_of(
            "PowerSGDState",
            {
                "policy": self.policy,
                "hook_timeout": self.hook_timeout,
                "residuals": self.residuals,
                "atomic": self.atomic,
            },
        )

    def _made_engine(self) -> Engine:
        if self._engine is None:
            # Nothing is opened: ranks meet at the first bucket.
            Handle.__init__(self, StateFeed(self.process_group), self._make_compressor(), self._settings_of_exchange())
            self._engine = self._made[ONLY].engine
        return self._engine

    def _channels(self) -> Mapping[str, Channel]:
        self._made_engine()
        return self._made

    def _existing(self) -> Mapping[str, Channel]:
        return self._channels() if dist.is_initialized() else self._made

    def _check_open(self, caller: str) -> None:
        self._check_is_settled()
        super()._check_open(caller)

    def _check_is_settled(self) -> None:
        if self._to_load is not None:
            raise CheckpointError(
                "PowerSGDState: loaded state has not been matched to parameters yet; call bind(model)."
            )

    def memory(self) -> MemoryReport:
        """Return the bytes in use on this rank, by purpose."""
        self._check_is_settled()
        return self._only().memory()

    def snapshot(self) -> Saved:
        """Return the same as `state_dict`, with the tensors themselves instead of copies."""
        self._check_is_settled()
        return super().snapshot()

    def restore(self, saved: Saved | CheckpointError, rules: LoadRules, differences: Differences | None = None) -> None:
        """Restore a state, now or as soon as there is an engine."""
        self._to_load = saved, rules
        if self._engine is not None:
            self._load_what_waits()

    def _load_what_waits(self) -> None:
        if self._to_load is not None:
            (saved, rules), self._to_load = self._to_load, None
            self._warm_up = None
            super().restore(saved, rules)

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements before compression, elements sent) for the steps since warm-up, as PyTorch's does.

        If parameters may be unused, one count for each of them is also sent, and is included; PyTorch's hook sends
        none. Loading a state resets these counts. `statistics()` counts all steps.
        """
        if self._warm_up is None:
            return 0.0, 0, 0
        counted = self.statistics().since(self._warm_up)
        before, after = counted.gradient_elements, counted.payload_elements
        return (before / after if after else 0.0, before, after)

    @_disable_dynamo  # as run_stateless
    def run(
        self, bucket: GradBucket, wire: torch.dtype | None = None, matrices: MatrixRule | None = None
    ) -> torch.futures.Future[Tensor]:
        """Average a bucket; `wire` and `matrices`, if given, override the state's and must never change."""
        check_bucket(bucket)
        hook_ran(bucket)
        engine = self._made_engine()
        self._load_what_waits()
        # If every parameter of a step's first bucket is new, either the model was replaced, and everything starts over,
        # or two models share this state, which is an error. The second case is detected in one of three ways: by the
        # names given to bind, by one backward pass through both models, or when the earlier model appears again.
        if engine.buckets.are_of_another_model(bucket):
            if engine.buckets.are_one_models:
                raise _two_models("bind was called with one, and gradients of the other came")
            if self._last_pass == torch._C._current_graph_task_id() != -1:
                raise _two_models("both have gradients in one backward pass")
            engine = self._begin_anew(engine)
        if self._earlier and any(parameter in self._earlier for parameter in bucket.parameters()):
            raise _two_models("the earlier one is used again")
        self._last_pass = torch._C._current_graph_task_id()
        # The wrappers and batched_powerSGD_hook pass the form with each bucket; it is fixed by the first one.
        form = (wire or self.wire, matrices or self.matrices)
        if form != self._form:
            if engine.step or bucket.index():
                raise SettingsError(
                    f"PowerSGDState: wire dtype and matrices were {self._form} and cannot change to {form}; "
                    "use one hook with one state."
                )
            self._form = form
            engine.begin_with(self._make_compressor())
        if self._warm_up is None and engine.step >= self.start_powerSGD_iter:
            self._warm_up = engine.statistics()
        if engine.scheduler is None:
            # Two models' first buckets may come in another order on each rank. Names only from a bucket, as ddp_core's
            # has them: of those that `bind` tells, another rank may not know. Plain ones: one rank alone may compile.
            names: Callable[[], list[str]] = getattr(bucket, "names", list)
            what = repr(
                ([plain_name(name) for name in names()], [tuple(parameter.shape) for parameter in bucket.parameters()])
            )
            assert isinstance(self._connection, ProcessGroupConnection), "it makes no other"
            self._connection.label = f"PowerSGDState {hashlib.blake2b(what.encode(), digest_size=16).hexdigest()}"
        return deliver(engine.run(bucket), bucket)

    def _begin_anew(self, last: Engine) -> Engine:
        """Stop the previous model's engine, and return a new one for another model."""
        for parameter in last.state.parameters():
            self._earlier[parameter] = True
        last.stop()
        self._form, self._warm_up, self._engine = (self.wire, self.matrices), None, None
        engine = self._made_engine()
        engine.loss_scale = last.loss_scale  # the scale belongs to the run, not to the model
        return engine

    def _take_form_of(self, engine: Engine, settings: Mapping[str, str]) -> None:
        """Before the first step, take over the wire dtype and matrix form of the hook that saved these settings."""
        if engine.step:
            return
        wire = next((dtype for dtype in _WIRES.values() if repr(dtype) == settings.get("dtype")), None)
        rules = {text for name, text in settings.items() if name.endswith(".matrices")}
        matrices = next((rule for rule in get_args(MatrixRule) if repr(rule) in rules), self._form[1])
        self._form = (wire, matrices)
        engine.begin_with(self._make_compressor())

    def _make_compressor(self) -> Compressor:
        wire, matrices = self._form
        inner: Compressor = PowerSGD(
            rank=self.matrix_approximation_rank,
            min_compression_rate=self.min_compression_rate,
            warm_start=self.warm_start,
            epsilon=self.orthogonalization_epsilon,
            seed=self.random_seed,
            alternating=self.alternating,
            iterations=self.iterations,
            matrices=matrices,
            stacked=self.stacked,
            skip=self.skip,
        )
        if self.use_error_feedback:
            inner = ErrorFeedback(inner=inner)
        started = StartAfter(inner=inner, steps=self.start_powerSGD_iter)
        return started if wire is None else WireDtype(inner=started, dtype=wire)


def _two_models(how: str) -> SettingsError:
    return SettingsError(
        f"PowerSGDState: it is used with two models that have no parameter in common, and {how}; make one state for "
        "each model, or, if they are parts of one that take turns, call bind with the whole."
    )


_SETTINGS = set(inspect.signature(PowerSGDState).parameters) - {"process_group"}
_WIRES = {"": None} | {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16)}


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:  # noqa: N802
    """Average the bucket with PowerSGD, matrix by matrix; see `PowerSGDState` and `PowerSGD`."""
    return _checked("powerSGD_hook", state).run(bucket)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:  # noqa: N802
    """Average the bucket with PowerSGD as one nearly square matrix, vectors included: faster and coarser."""
    return _checked("batched_powerSGD_hook", state).run(bucket, matrices="whole-bucket")


def _checked(hook: str, state: object) -> PowerSGDState:
    """Return the state; raise `HookTypeError`, which says what to write, for anything else."""
    if isinstance(state, PowerSGDState):
        return state
    raise HookTypeError(
        f"{hook}: expected a commhooks.PowerSGDState as the hook's state (got {state}); write "
        f"model.register_comm_hook(commhooks.PowerSGDState(process_group=None, matrix_approximation_rank=4), {hook})."
    )


on_wire[powerSGD_hook] = lambda state, bucket, dtype: _checked("powerSGD_hook", state).run(bucket, wire=dtype)
on_wire[batched_powerSGD_hook] = lambda state, bucket, dtype: _checked("batched_powerSGD_hook", state).run(
    bucket, wire=dtype, matrices="whole-bucket"
)

# PyTorch's documentation saves hook and state together, so `torch.load` must accept them with its default arguments,
# both under their current names and under those from when they were defined in powersgd_hook.py.
for _safe in (PowerSGDState, powerSGD_hook, batched_powerSGD_hook):
    torch.serialization.add_safe_globals([_safe, (_safe, f"commhooks.powersgd_hook.{_safe.__name__}")])
