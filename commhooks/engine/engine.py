"""The path of a bucket: from the hook's call to the completed future."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from commhooks.communicators.disagreement import refusal_as_fingerprint
from commhooks.communicators.failure_store import FIRST_SCALE, OUT_OF_INPUTS
from commhooks.communicators.kernels import Kernels, kernels_of
from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.devices import future_on, mark_of
from commhooks.engine.buckets import Bucket, Buckets
from commhooks.engine.guards import are_zeros, keep_what_is_unused, take_part_with_zeros, weigh
from commhooks.engine.replay import Resumed, put_together
from commhooks.engine.undo import UndoLog
from commhooks.engine.units import Handed, Units
from commhooks.errors import AttachError, CommHooksError, CompressorError, GradientError, SettingsError
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import (
    Compressor,
    Context,
    Exchange,
    begin_exchange,
    compares_kernels,
    judged,
)
from commhooks.native.library import in_use
from commhooks.scheduling.channels import ConnectionChannel
from commhooks.scheduling.connection import Connection, ProcessGroupConnection
from commhooks.scheduling.ledger import Statistics
from commhooks.scheduling.policy import PolicyName
from commhooks.scheduling.scheduler import Scheduler
from commhooks.scheduling.task import BucketTask
from commhooks.state.loss_scale import LossScale
from commhooks.state.memory import MemoryReport, memory_report
from commhooks.state.table import ResidualStorage, StateTable
from commhooks.version import VERSION
from commhooks.wrappers.hierarchical import machines_send_slices


class Engine:
    """Averages buckets with one compressor; `commhooks.saving.resumption` saves and restores it."""

    def __init__(
        self,
        compressor: Compressor,
        connection: Connection,
        *,
        fingerprint: str = "",
        residuals: ResidualStorage = "fp32",
        atomic: bool = False,
        may_be_unused: bool = False,
        by_parameter: bool = True,
        may_join: bool = True,
        loss_scale: LossScale | None = None,
        policy: PolicyName | None = None,
        name: str = "",
        is_sharded: bool = False,
        joins_buckets: bool = False,
    ) -> None:
        self.compressor: Compressor = compressor
        self.connection = connection
        self.policy = policy or connection.policy
        # Before the channel: it may be refused.
        self.state: StateTable = StateTable(connection.rank, connection.world_size, residuals, is_sharded=is_sharded)
        self.channel: ConnectionChannel = ConnectionChannel(connection.join(name), name, self.policy)
        """The engine's place on its connection, and its counts."""
        self.scheduler: Scheduler | None = None
        """The scheduler of the channel; None before the first bucket or `open`."""
        self.why_stopped: str = ""
        """The failure, outside the channel, because of which it was closed; "" if there was none."""
        self._leave = weakref.finalize(self, connection.leave)
        self._leave.atexit = False
        self.buckets: Buckets = Buckets(self.state, by_parameter=by_parameter)
        self.loss_scale: LossScale = loss_scale or LossScale()
        self.step: int = 0
        self._begun = 0
        """The number of steps that have begun here; `step` may go back."""
        self._scale = FIRST_SCALE
        """The loss scale that the other ranks know of."""
        self._told: tuple[int, int, str] | None = None
        """When it changed, as `_begun` and `step`, and to what, until it is compared."""
        self._fingerprint = fingerprint
        self._may_be_unused = may_be_unused
        self._may_join = may_join  # zeros outside a backward pass come from a rank that has run out of inputs
        self._undo = UndoLog() if atomic else None
        self.resumed: Resumed = Resumed()
        self._units = Units(self.policy, joins=joins_buckets)
        self._names_are_checked = not by_parameter

    def run(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """Start averaging a bucket, and return the future of its mean at once; every rank runs buckets in one order.

        The bucket's memory belongs to the exchange until the future is done, and then holds the mean, unless the
        bucket has an `output`. If any rank fails, waiting for the future raises the cause on every rank, and the
        memory holds no mean. Raises `CompressorError` if the last mean of the same parameters is still under way, and
        `AttachError` for parameters that were not named.
        """
        if torch.is_inference_mode_enabled():  # what is made in it, nobody may write on another thread, or later
            with torch.inference_mode(mode=False), torch.no_grad():
                return self.run(bucket)
        self._begin_step_if(bucket)
        if self.resumed.plan:
            self.buckets.learn_names(bucket, bucket.parameters())
        parts = self.resumed.parts_of(bucket, self.state) if self.resumed.plan else []
        if not parts:
            return self._submit(bucket)
        futures = [self._submit(part) for part in parts]
        return torch.futures.collect_all(futures).then(functools.partial(put_together, parts, bucket.buffer()))

    def _submit(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        memory = bucket.buffer()
        if not (memory.is_floating_point() or memory.is_complex()):
            raise GradientError(
                f"bucket {bucket.index()} ({self.state.describe(bucket.parameters())}) holds gradients "
                f"of dtype {memory.dtype}; a mean needs a floating-point or complex dtype."
            )
        view = self.buckets.view(bucket, memory)
        # After a failure, a DDP's next step may come before that failure has reached the futures of the last one.
        if view.future is not None and not view.future.done() and self.failure() is None:
            why = (
                f"rank {self.connection.rank}, step {self.step}: bucket {bucket.index()} "
                f"({self.state.describe(bucket.parameters())}) was handed in again before the future of its last mean "
                "was done, and its memory and state are in use until then; wait for the future first."
            )
            self.stop(why)
            raise CompressorError(why)
        if view.is_sharded and (self._undo is not None or not self.compressor.scatters):
            why = "a step on shards cannot be undone" if self._undo else f"{self.compressor!r} averages whole gradients"
            raise SettingsError(f"bucket {bucket.index()} consists of shards, one for each rank: {why}.")
        handed = Handed(bucket, view, future_on(memory.device), mark_of(memory.device))
        view.future = handed.future
        units, is_last = self._units.add(handed, may_join=self._may_join_others(handed)), bucket.is_last()
        try:
            tasks = [self._task(unit) for unit in units]
            if is_last and not self._names_are_checked:
                self._names_are_checked = True
                self.compressor.check(self.state.described(), self.connection.world_size)
                self.state.end_loading()
        except Exception as error:  # the buckets of a unit that were handed in before wait for it
            for one in itertools.chain(*units):
                one.future.set_exception(error)  # type: ignore[arg-type]  # torch declares "expected Tensor"
            raise
        for task in tasks:
            (self.scheduler or self.scheduler_for(memory.device)).submit(self.channel, task)
        if is_last:
            self.end_step()
        return handed.future

    def _may_join_others(self, handed: Handed) -> bool:
        """Return whether a bucket may be averaged together with others."""
        view, weight = handed.view, getattr(handed.bucket, "weight", None)
        is_plain = bool(view.slots) and not view.is_sharded and weight is None and self.compressor.takes(view.memory)
        return is_plain and self.compressor.may_join_buckets(self.step)

    def _task(self, unit: Sequence[Handed]) -> BucketTask:
        """Return the task of averaging the buckets of a unit."""
        view = self.buckets.joined([handed.view for handed in unit])
        buckets = [handed.bucket for handed in unit]
        exchange = self._exchange(view)
        weight: float | None = getattr(buckets[0], "weight", None)
        if weight is not None:
            exchange = weigh(view, weight, exchange)
        if self._undo is not None:
            for bucket in buckets:
                self._undo.expect(last=bucket.is_last())
        # The last mark is behind what has just laid out state, too.
        marks = [*(handed.ready for handed in unit[:-1]), mark_of(view.memory.device)]
        return BucketTask(
            exchange=exchange,
            bucket=view,
            futures=[handed.future for handed in unit],
            step=self.step,
            is_last=buckets[-1].is_last(),
            parameters=lambda: self.state.describe([p for bucket in buckets for p in bucket.parameters()]),
            world_size=self.connection.world_size,
            undo=self._undo,
            ready=[mark for mark in marks if mark is not None],
        )

    def _exchange(self, view: BucketView) -> Exchange:
        """Return a bucket's exchange, wrapped in the guards of state that this step and run need."""
        compressor, scale = self.compressor, self.loss_scale.of_gradients
        context = Context(self.connection.rank, self.connection.world_size, self.step, loss_scale=scale)
        if not compressor.takes(view.memory):
            exchange = begin_exchange(AllReduceMean(), view, context)
            return judged(view, exchange) if self.buckets.phase.is_guarded else exchange
        if not self.buckets.phase.is_guarded:  # the same on every rank; state of other compressors stays
            return begin_exchange(compressor, view, context)
        if self.buckets.lay_out(view, compressor) and self._undo is not None:
            for known in (view, *view.joined):
                self._undo.forget(known)
        exchange = judged(view, begin_exchange(compressor, view, context))
        if view.slots and self._may_be_unused:
            exchange = keep_what_is_unused(view, exchange)
        # A DDP passes zeros, outside any backward pass, for a rank that has run out of inputs.
        is_out = view.slots and self._may_join and torch._C._current_graph_task_id() == -1
        if is_out and all(are_zeros(member.memory) for member in view.members):
            exchange = take_part_with_zeros(view, exchange)
        # The undo log is outermost: it undoes a step after its last bucket, when the other guards have restored state.
        return exchange if self._undo is None else self._undo.watch(view, exchange)

    def _begin_step_if(self, bucket: Bucket) -> None:
        """Begin a step with its first bucket; end the previous one first if the DDP skipped its last bucket."""
        if self.buckets.cannot_contain(bucket):
            self.end_step(f"step {self.step + 1} began before its end")
        if not self.buckets.is_step_under_way:
            self._check_ranks()
            self.buckets.hand_over(self.compressor, self.step)
            self.loss_scale.apply_to(self.state.by_units, bucket.buffer().device)
            self._compare_scales()
            self.state.choose(self.compressor, self.step)
            if self._undo is not None:
                self._undo.begin_step()
        self.buckets.follow(bucket)

    def _check_ranks(self) -> None:
        """Fail before a step, on every rank that still waits for this one, if the ranks are not the connection's."""
        try:
            self.connection.check_ranks()
        except AttachError as error:
            failure = f"rank {self.connection.rank}, before step {self.step}: {error}"
            self._post(failure)
            raise AttachError(failure) from None

    def _compare_scales(self) -> None:
        """Tell the other ranks of a loss scale that has changed, and one step later find those that had another.

        All ranks have begun a step that has ended here, and told their scales before. In steps in which the scale stays
        this costs nothing. On a GPU the host does not know it. A rank that has run out of inputs updates no scale.
        """
        self._begun += 1
        failures, scale = self.scheduler.failures if self.scheduler is not None else None, self.loss_scale.of_gradients
        if failures is None or not self.channel.is_first or isinstance(scale, Tensor):
            return
        if self._told is not None:
            (begun, step, told), self._told = self._told, None
            if others := failures.other_scales(begun, told):
                named = ", ".join(f"{other} on rank {rank}" for rank, other in others.items())
                failure = (
                    f"rank {self.connection.rank}, step {step}: the loss scale is {told} here, and {named}: a mean of "
                    "gradients of several scales is wrong. Give all ranks the same GradScaler settings and state, and "
                    "call scaler.update() on all of them after each step."
                )
                self.stop(failure)
                raise GradientError(failure)
        is_out_of_inputs = self._may_join and torch._C._current_graph_task_id() == -1
        known = OUT_OF_INPUTS if is_out_of_inputs else str(scale)
        if known != self._scale:
            self._scale = known
            if not is_out_of_inputs:
                self._told = self._begun, self.step, known
            failures.note_scale(self._begun, known)

    def end_step(self, why: str = "") -> None:
        """End the current step, even if its last bucket never came, because of `why`."""
        self._units.end_step(f"step {self.step} was cut short: {why}.")
        self.buckets.end_step(self.step)
        if self.resumed.plan:
            self.resumed.end_step()
        self.step += 1

    def stand_between_steps(self, caller: str) -> None:
        """Wait until every bucket that was handed in has ended; raise `AttachError` in a backward pass."""
        if torch._C._current_graph_task_id() != -1:
            raise AttachError(f"{caller}: step {self.step} is under way; call it between two steps.")
        if self.buckets.is_step_under_way:
            self.end_step(f"{caller} came before its last bucket")
        if self.scheduler is not None:
            self.scheduler.drain(self.channel, caller)

    def begin_with(self, compressor: Compressor) -> None:
        """Use another compressor before the first step; ranks have not compared it yet."""
        assert self.step == 0, "use `replace` once steps have been made"
        self.compressor = compressor

    def expect(self, successors: Sequence[Compressor]) -> None:
        """Expect that these compressors may take over, so that saved state may also hold theirs."""
        self.state.successors = tuple(successors)

    @torch.inference_mode(False)  # as run
    @torch.no_grad()
    def replace(self, compressor: Compressor, device: torch.device, refusal: Exception | None = None) -> None:
        """Switch to another compressor from the next step on; every rank must do so between the same two steps.

        Raises `AttachError` in the middle of a step, or if ranks disagree; raises `refusal`, the reason why this rank
        cannot switch, after the other ranks have learned of it. In each case the old compressor stays.
        """
        self.stand_between_steps("replace")
        self._compare_kernels_of(compressor, device)
        try:
            self.agree(self._fingerprint_with(compressor, refusal), "replace", device)
        finally:
            if refusal is not None:
                raise refusal
        self.compressor = compressor
        self.buckets.hand_over(compressor, self.step)

    def go_on_from(self, step: int, grad_scale: float, resumed: Resumed) -> None:
        """Continue from a step of another run, whose state the table now holds."""
        self.step = step
        self.loss_scale.load(grad_scale)
        self.resumed = resumed
        self._units.expect(resumed.plan)
        self._names_are_checked = False
        self.buckets.forget_last_step()
        if self._undo is not None:
            self._undo.forget()

    def bind(self, named_parameters: Sequence[tuple[str, Tensor]], *, may_be_unused: bool = False) -> None:
        """Learn the names of one model's parameters, and whether a step may leave some of them unused."""
        self.buckets.are_one_models = True
        self.state.bind(named_parameters)
        self._may_be_unused = may_be_unused

    def scheduler_for(self, device: torch.device, refusal: Exception | None = None) -> Scheduler:
        """Return the scheduler of the engine's channel; the first call opens the channel."""
        if self.scheduler is None:
            self._compare_kernels_of(self.compressor, device)
            fingerprint = self._fingerprint_with(self.compressor, refusal)
            self.scheduler = self.connection.open(self.channel, device, fingerprint)
        return self.scheduler

    def agree(self, fingerprint: str, caller: str, device: torch.device) -> None:
        """Return once every rank has passed the same fingerprint, between the same two steps; see `Scheduler.agree`."""
        caller = f"{caller} before step {self.step}"
        try:
            self.scheduler_for(device).agree(self.channel, fingerprint, caller)
        except KeyboardInterrupt:  # the others may have agreed, and go on with what this rank does not have
            self.stop(f"rank {self.connection.rank}: {caller} was interrupted.")
            raise

    def open(self, device: torch.device, refusal: Exception | None = None) -> None:
        """Connect to the other ranks now, not at the first bucket; raise the refusal once they have learned of it."""
        try:
            self.scheduler_for(device, refusal)
            self.channel.opened.result()
        finally:
            if refusal is not None:
                self.stop()
                raise refusal

    def stop(self, why: str = "") -> None:
        """Close the channel; the connection stops with its last one, or on every rank if this one tells them `why`."""
        self.channel.is_closed = True
        self.why_stopped = self.why_stopped or why
        self._units.end_step(f"step {self.step}: not started, because the attachment was stopped. {why}".rstrip())
        if why:
            self._post(why)
            # If the connection's first use has failed here, no later connection may meet the others' first use: it
            # takes its place.
            if isinstance(self.connection, ProcessGroupConnection) and self.scheduler is None:
                with contextlib.suppress(AttachError):  # no such ranks are left; the caller raises why it stopped
                    self.connection.take_place(self._fingerprint_with(self.compressor))
        self._leave()

    def fail(self, what: str) -> NoReturn:
        """Raise `AttachError`, and close the channel, so that the other ranks learn of it."""
        why = f"rank {self.connection.rank}, {self.channel.title}: {what}."
        self.stop(why)
        raise AttachError(why)

    def _post(self, why: str) -> None:
        if self.scheduler is not None and self.scheduler.failures is not None:
            self.scheduler.failures.post(why)

    def _compare_kernels_of(self, compressor: Compressor, device: torch.device) -> None:
        is_needed = compares_kernels(compressor) and self.connection.world_size > 1
        self.channel.kernels = Kernels(str(compressor), kernels_of(device)) if is_needed else Kernels()

    def _fingerprint_with(self, compressor: Compressor, refusal: Exception | None = None) -> str:
        """Return the text that must be the same on every rank."""
        if refusal is not None:
            return refusal_as_fingerprint(refusal)
        # Compiled searches choose other elements among equal ones, and return them in another order.
        passes = f"passes: {'eager' if in_use() is None else 'compiled'}\n" if machines_send_slices(compressor) else ""
        return (
            f"compressor: {compressor!r}\ncommhooks: {VERSION}\n"
            f"unused parameters: {self._may_be_unused}\npolicy: {self.policy!r}\nunits: {self._units.fingerprint}\n"
            f"atomic: {self._undo is not None}\n{passes}channel, in the order of first use: {self.channel.unique}\n"
            f"{self.resumed.fingerprint}\n{self._fingerprint}"
        )

    def failure(self) -> CommHooksError | None:
        """Return the error that ended the channel's work; None while it continues or if it was stopped deliberately."""
        return self.scheduler.failure(self.channel) if self.scheduler is not None else None

    def statistics(self) -> Statistics:
        """Return the totals so far."""
        return self.channel.ledger.totals(self.channel.traffic)

    def working_memory(self) -> list[Tensor]:
        """Return the memory that is kept between steps: messages, and the pool of exchanges."""
        return [*self.channel.working_memory(), *self.buckets.pool.blocks()]

    def memory(self) -> MemoryReport:
        """Return the bytes in use, by purpose."""
        copies = self._undo.tensors() if self._undo is not None else []
        return memory_report(self.state, self.buckets.views(), copies, self.working_memory())
