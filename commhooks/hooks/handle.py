"""The user's handle on a hook: statistics and state for one model's engine."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from typing import Any, TypeGuard, Unpack

import numpy
from torch import Tensor
from torch.nn import Module

from commhooks.communicators.ranks import Ranks
from commhooks.engine.engine import Engine
from commhooks.errors import AttachError, CheckpointError, SettingsError
from commhooks.hooks.facts import uncut_steps
from commhooks.hooks.metrics import Writer, metrics_of, write_to
from commhooks.language.compressor import Compressor, check_compressor
from commhooks.making import make_compressor
from commhooks.native.library import in_use
from commhooks.saving.parts import merge_state_dicts
from commhooks.saving.resumption import differences, lay_out, restore, snapshot_of
from commhooks.saving.rules import LoadOptions, LoadRules
from commhooks.saving.saved import Saved, read
from commhooks.scheduling.ledger import ParameterTraffic, Statistics
from commhooks.scheduling.line import Line, ProcessGroupLine
from commhooks.scheduling.policy import POLICIES
from commhooks.state.memory import MemoryReport
from commhooks.tensors import cloned
from commhooks.wrappers.hierarchical import is_hierarchical


class Handle(ABC):
    """The compressor, statistics, checkpoints and loss scale of one engine; `print` shows a summary.

    See `Attachment`, `PowerSGDState` and `Exchanger` for how to make one.
    """

    _engine: Engine | None
    """None until a process group exists."""
    _model: Callable[[], Module | None] = staticmethod(lambda: None)
    """A weak reference: the handle must not keep the model alive."""
    keeps_own_model = False
    """Every rank has the same model, and the same optimizer's state."""
    _sparse: Set[Tensor] = frozenset()
    """The parameters whose gradients are sparse; they have no state."""

    @abstractmethod
    def _made_engine(self) -> Engine:
        """Return the engine, creating it if there is none yet."""

    def _settled_engine(self) -> Engine:
        """Return the engine; raise `CheckpointError` if loaded state still waits for its parameters."""
        return self._made_engine()

    @property
    def compressor(self) -> Compressor:
        """The compressor in use."""
        return self._made_engine().compressor

    def __str__(self) -> str:
        """Return a summary: the compressor, the ranks, any failure, and the statistics so far."""
        if self._engine is None:
            return f"{type(self).__name__}: there is no process group yet"
        engine = self._engine
        where = f"rank {engine.line.rank} of {engine.line.world_size}, policy {engine.policy!r}"
        failure = engine.failure()
        state = f"\nended by: {failure}" if failure is not None else "\nclosed" if engine.lane.is_closed else ""
        return f"{type(self).__name__}: {engine.compressor}\n{where}{state}\n{self.statistics()}"

    def checked(self, compressor: Compressor | str) -> Compressor:
        """Return the compressor that `replace` would switch to, made if a name is given; nothing changes.

        Raises `AttachError` if this handle was closed, or does not know the parameters' names yet, and `SettingsError`
        for a compressor that does not exist or does not suit the parameters or the ranks.
        """
        candidate, refusal = self._candidate(compressor)
        if refusal is not None:
            raise refusal
        return candidate

    def expect(self, *compressors: Compressor) -> None:
        """Announce the compressors that may take over later: a `state_dict` may then also hold their state."""
        self._made_engine().expect(compressors)

    def replace(self, compressor: Compressor | str) -> None:
        """Switch to another compressor from the next step on, keeping the existing state.

        Every rank must replace between the same two steps. Residuals are kept for whichever compressor next uses them;
        a server error that it does not use is added to its residual, or named in a warning if it has none; a basis of
        another size starts from scratch. Raises `AttachError` if ranks disagree or a step is under way, and
        `SettingsError` for settings that do not suit the parameters; in either case the old compressor stays.
        """
        candidate, refusal = self._candidate(compressor)
        engine = self._settled_engine()
        device = next(iter(engine.state.named().values())).device
        engine.replace(candidate, device, refusal)

    def _candidate(self, compressor: Compressor | str) -> tuple[Compressor, SettingsError | None]:
        """Return the compressor, and the error if this rank cannot switch to it, for all ranks to learn of."""
        self._check_open("replace")
        engine = self._settled_engine()
        named = engine.state.named()
        if not named:
            raise AttachError("replace: the parameters' names are not known yet; see PowerSGDState.bind.")
        try:
            candidate = checked_compressor("replace", compressor)
        except SettingsError as refusal:
            return engine.compressor, refusal
        return candidate, refusal_of(candidate, named, engine.line)

    def _check_open(self, caller: str) -> None:
        """Raise `AttachError` if the lane is closed."""
        if self._made_engine().lane.is_closed:
            raise AttachError(f"{caller}: this {type(self).__name__} was closed.")

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        """The rank of this process and the number of ranks, in the hook's process group."""
        return self._made_engine().line.rank, self._made_engine().line.world_size

    def statistics(self) -> Statistics:
        """Return this rank's totals so far."""
        return self._engine.statistics() if self._engine is not None else Statistics()

    def last_step(self) -> Statistics:
        """Return this rank's counts for the last complete step."""
        return self._engine.lane.ledger.last_step() if self._engine is not None else Statistics()

    def by_parameter(self) -> dict[str, ParameterTraffic]:
        """Return each parameter's share of this rank's totals so far, by name.

        PyTorch's DDP does not pass parameter names to a hook; `attach` and `PowerSGDState.bind` do.
        """
        return self._engine.lane.ledger.by_parameter() if self._engine is not None else {}

    def memory_report(self) -> MemoryReport:
        """Return the bytes that the hook uses on this rank, by purpose."""
        return self._settled_engine().memory_report()

    def state_dict(self) -> dict[str, Any]:
        """Return the hook's state as plain data, for a checkpoint; `commhooks.saving.saved` describes its layout.

        It holds only this rank's residuals, so call it on every rank, between two steps. Tensors are copies. Raises
        `CheckpointError` after a step that failed, or if the parameters' names are not known (see
        `PowerSGDState.bind`).
        """
        state: dict[str, Any] = cloned(self.snapshot().as_dict())
        return state

    def gathered(self, *, to: int | None = None) -> dict[str, Any]:
        """Return the `state_dict` with the per-rank state of all ranks, for a checkpoint that one rank writes.

        Call it on every rank, between the same two steps; the hook's own process group carries the states. With `to`,
        only that rank gets all of it, and every other rank gets its own `state_dict`. Every rank can load the complete
        state with `load_state_dict`. It takes as much memory as the residuals of all ranks together.

        Raises `CheckpointError` on every rank if any rank cannot return its state, or if the states differ where they
        must agree.
        """
        line = self._made_engine().line
        if not isinstance(line, ProcessGroupLine):
            raise CheckpointError("gathered: workers of one process gather with merge_state_dicts.")
        if to is not None and not 0 <= to < line.world_size:
            raise CheckpointError(f"gathered(to={to}): to must be a rank from 0 to {line.world_size - 1}, or None.")
        if line.process_group is None and line.world_size > 1:
            raise CheckpointError(
                "gathered: the process group was destroyed, so the other ranks cannot be reached; gather before that."
            )
        ranks = Ranks(line.process_group)
        if to is None:
            return merge_state_dicts(ranks.gather("gather the hook's state", self.state_dict))
        own = ranks.each("take the hook's state", self.state_dict)
        states = ranks.gather_to(to, own)
        return merge_state_dicts(states) if states is not None else own

    def metrics(self, *, by_parameter: bool = False) -> dict[str, float]:
        """Return this rank's metrics by tag; call it after the optimizer's step and before `zero_grad`.

        - commhooks/bytes_sent_total and bytes_sent_per_step: bytes that this rank sent, since attaching and in the last
          step
        - commhooks/compression_ratio and collectives_per_step: values of the last step
        - commhooks/seconds_compressing, seconds_waiting, seconds_exposed: values of the last step, as in `Statistics`
        - commhooks/residual_norm_over_gradient_norm: this rank's residuals over the mean gradients in `.grad`, if there
          are both and the gradients are not zero; clipped gradients are smaller
        - with `by_parameter`, also bytes_sent_total and residual_norm_over_gradient_norm of every parameter, whose name
          follows after a slash

        Reading the norms makes the host wait for a GPU, so do not log in every step.
        """
        return metrics_of(self._engine, by_parameter=by_parameter) if self._engine is not None else {}

    def log_to(self, writer: Writer, step: int, *, by_parameter: bool = False) -> None:
        """Write `metrics` to a TensorBoard `SummaryWriter`, a Lightning logger, or a function of (metrics, step)."""
        write_to(writer, self.metrics(by_parameter=by_parameter), step)

    def snapshot(self) -> Saved:
        """Return the same as `state_dict`, with the tensors themselves instead of copies."""
        # Allocate now everything that the state will ever hold: torch.distributed.checkpoint loads only into existing
        # tensors, and may be given the state_dict of a run that has taken no step. And after `replace`, what the next
        # step would start from scratch is saved as it will be.
        lay_out(self._settled_engine(), self._sparse)
        plan: Any = getattr(self._model(), "bucket_plan", None)  # ddp_core's DDP has one
        return snapshot_of(self._settled_engine(), {"ddp_core": plan()} if plan is not None else {})

    def differences(self, snapshot: object, rules: LoadRules) -> list[str]:
        """List every difference between a snapshot and this run that would cause an error on loading."""
        if not isinstance(snapshot, Saved):
            return ["hooks: it was saved with the state of several exchangers, such as DiLoCo's"]
        return differences(self._made_engine(), snapshot, rules)

    def load_state_dict(
        self,
        state: Mapping[str, Any] | CheckpointError,
        **rules: Unpack[LoadOptions],
    ) -> None:
        """Restore the state that `state_dict` returned; call it on every rank, between the same two steps.

        `LoadRules` describes which differences may be allowed. Raises `CheckpointError` on every rank, and changes
        nothing, if the state is damaged or does not match the run on any rank, or if ranks pass different states. A
        rank that could not even read its state passes the `CheckpointError` that explains why, so that the other ranks
        learn of it.

        A `PowerSGDState` that does not know its parameters' names yet checks the state once it learns them; if that is
        before its first step, ranks that passed different states raise at their first bucket.
        """
        self._load(state, LoadRules(**rules))

    def _load(self, state: object, rules: LoadRules) -> None:
        """Restore the engine's state, and make ddp_core's DDP lay out its buckets as they were when it was saved."""
        loaded = read(Saved.from_dict, state)
        restore(self._made_engine(), loaded, rules, uncut_steps(self._model()))
        load_bucket_plan: Any = getattr(self._model(), "load_bucket_plan", None)
        if load_bucket_plan is not None and isinstance(loaded, Saved) and "ddp_core" in loaded.bucket_plan:
            load_bucket_plan(loaded.bucket_plan["ddp_core"])

    def set_grad_scale(self, scale: float) -> None:
        """Set the loss scale from the next step on, and rescale residuals to it. Not needed with a `scaler`."""
        self._made_engine().loss_scale.announce(scale)


def check_run_settings(caller: str, policy: str, hook_timeout: float | None) -> None:
    """Raise `SettingsError` if the policy does not exist or the timeout is not a positive, finite number."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise SettingsError(f"{caller}(policy={policy!r}): policy must be one of {', '.join(POLICIES)}.")
    number = int | float | numpy.floating | numpy.integer
    is_number = isinstance(hook_timeout, number) and not isinstance(hook_timeout, bool)
    if hook_timeout is not None and not (is_number and 0 < hook_timeout < math.inf):
        raise SettingsError(f"{caller}(hook_timeout={hook_timeout!r}): hook_timeout must be above 0 s, and finite.")


def check_flags(caller: str, **flags: object) -> None:
    """Raise `SettingsError` for the first of these settings that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool | numpy.bool_):
            raise SettingsError(f"{caller}({name}={value!r}): {name} must be True or False.")


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a setting is an int, and not True or False."""
    return isinstance(value, int) and not isinstance(value, bool)


def checked_compressor(caller: str, compressor: Compressor | str) -> Compressor:
    """Return the compressor, making it if a name is given; raise `SettingsError` for anything else."""
    if isinstance(compressor, str):
        compressor = make_compressor(compressor)
    check_compressor(caller, compressor)
    return compressor


def refusal_of(compressor: Compressor, named: Mapping[str, Tensor], line: Line) -> SettingsError | None:
    """Return the error for settings that do not suit the parameters or the ranks; it is raised once all ranks know."""
    try:
        check_compressor_for(compressor, named, line)
    except SettingsError as error:
        return error
    return None


def check_compressor_for(compressor: Compressor, named: Mapping[str, Tensor], line: Line) -> None:
    """Raise `SettingsError` for settings that do not suit these parameters, the ranks on this line or this process."""
    compressor.check(named, line.world_size)
    (device, *_) = (parameter.device for parameter in named.values())
    if device.type == "cpu":
        in_use()  # raises for a wrong environment variable, before the other ranks wait for this one's messages
    if is_hierarchical(compressor) and not line.carries_groups(device):
        raise SettingsError(
            f"{compressor!r} needs groups of some of the ranks, which NCCL does not support yet; use a Gloo group, "
            'with process_group=torch.distributed.new_group(backend="gloo").'
        )
