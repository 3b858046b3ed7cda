"""What ties one model's compressor, state, scheduler and statistics together."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.communicators import ProcessGroupCommunicator
from commhooks.communicators.connection import Address, Agreements, WrapCommunicator
from commhooks.communicators.parent_group import backend_of, warn_of_bypass
from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.engine.buckets import Bucket, Buckets
from commhooks.engine.guards import has_joined, keep_what_is_unused, refuse_what_is_not_declared, take_part_with_zeros
from commhooks.engine.replay import Part, parts_of, put_together
from commhooks.engine.undo import Journal
from commhooks.errors import AttachError, CheckpointError, GradientError
from commhooks.language.compressor import BucketView, Compressor, Context, Exchange, Slot, StepVerdict
from commhooks.scheduling.inline import InlineScheduler, SideStream
from commhooks.scheduling.ledger import ParameterTraffic, Statistics
from commhooks.scheduling.task import BucketTask
from commhooks.scheduling.thread import Scheduler, ThreadScheduler
from commhooks.state.loss_scale import LossScale
from commhooks.state.memory import MemoryReport, memory_report
from commhooks.state.snapshot import LoadRules, Snapshot, refuse, settings_of
from commhooks.state.table import ParameterState, StateTable


class Engine:
    """Average buckets with one compressor: hand-in on the training thread, everything else on the scheduler.

    It holds no reference to the process group (but on NCCL, through a proxy), so that a group which is destroyed is
    free.
    """

    def __init__(
        self,
        compressor: Compressor,
        process_group: dist.ProcessGroup,
        *,
        label: str = "attached",
        policy: str = "fifo",
        by_parameter: bool = True,
        terms: str = "",
        refusal: Exception | None = None,
        wrap_communicator: WrapCommunicator | None = None,
        hook_timeout: float | None = None,
        residuals: str = "fp32",
        atomic: bool = False,
        may_be_unused: bool = False,
        may_bypass: bool = False,
    ) -> None:
        self.compressor = compressor
        self.state = StateTable(residuals)
        self.state.declare(compressor.local_entries())
        self.loss_scale = LossScale()
        self.step = 0
        self._journal = Journal() if atomic else None
        self.may_be_unused = may_be_unused
        self.uncut_steps = 1
        """So many steps the DDP begins with, before it cuts its buckets; those of a resumed run are cut here."""
        self._resumed = ""
        self._replayed: list[list[str]] = []
        self._replays_left = 0
        self._process_group = weakref.ref(process_group)
        self._address = Address.under(process_group, label)
        self._policy = policy
        self._by_parameter = by_parameter
        self._refusal = refusal
        self._terms = f"policy {policy!r}\n{terms}"
        self._wrap = wrap_communicator
        self._may_bypass = may_bypass  # the user knows that a group which is not Gloo's is only asked for its ranks
        self._hook_timeout = hook_timeout
        self._scheduler: Scheduler | None = None
        self._buckets = Buckets(self.state)
        self._names_checked = False
        self._last_index = -1
        self._verdict: StepVerdict | None = None

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        """Which of how many ranks this is."""
        return self._address.rank, self._address.world_size

    @property
    def timeout(self) -> float:
        """The process group's timeout, in seconds."""
        return self._address.timeout.total_seconds()

    def is_of_another_model(self, bucket: Bucket) -> bool:
        """Return whether a bucket begins a step and has no parameter that was met or named before."""
        begins = self._last_index < 0 or self._buckets.come_again_with(bucket, self._last_index)
        return begins and self.state.knows_none_of(bucket.parameters())

    @property
    def is_bound(self) -> bool:
        """Whether it was told which parameters one model has."""
        return self._buckets.are_one_models

    def run(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """Take a bucket, and return the future of its mean; called in the same order on every rank."""
        self._begin_step_if(bucket)
        parts = self._parts(bucket) if self._replayed else []
        if not parts:
            return self._hand_in(bucket)
        futures = [self._hand_in(part) for part in parts]
        return torch.futures.collect_all(futures).then(functools.partial(put_together, parts, bucket.buffer()))

    def _parts(self, bucket: Bucket) -> list[Part]:
        self._buckets.learn_names(bucket, bucket.parameters())
        return parts_of(bucket, self._replayed, self.state)

    def _hand_in(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        memory = bucket.buffer()
        compressor = self._compressor_for(memory, bucket)
        view = self._buckets.view(bucket, memory) if self._by_parameter else BucketView(bucket.index(), memory)
        context = Context(self._address.rank, self._address.world_size, self.step, self._verdict)
        task = BucketTask(
            exchange=self._guarded(compressor, view, context),
            future=_future_for(memory),
            memory=memory,
            step=self.step,
            index=bucket.index(),
            is_last=bucket.is_last(),
            parameters=lambda: self.state.describe(bucket.parameters()),
            layout=view.layout,
            world_size=self._address.world_size,
            verdict=self._verdict,
            journal=self._journal,
            ready=_event_for(memory),
        )
        if task.is_last and self._by_parameter and not self._names_checked:
            self._names_checked = True
            compressor.check_parameters(self.state.names())
            self.state.end_loading()
        if self._journal is not None:
            self._journal.expect(last=task.is_last)
        self._scheduler_for(memory.device).submit(task)
        if task.is_last:
            self._end_step()
        return task.future

    def replace(self, compressor: Compressor, device: torch.device, refusal: Exception | None = None) -> None:
        """Let another compressor go on from the next step; every rank must do so between the same two steps.

        Raises `AttachError` in the middle of a step, and where ranks disagree; `refusal`, why this rank cannot, once
        the other ranks know. The old compressor then stays.
        """
        self._stand_between_steps("replace")
        try:
            self._scheduler_for(device).agree(self._terms_with(compressor, refusal))
        finally:
            if refusal is not None:
                raise refusal
        self.compressor = compressor
        self.state.declare(compressor.local_entries())
        self._buckets.forget_views()

    def snapshot(self, bucket_plan: dict[str, Any] | None = None) -> Snapshot:
        """Return what a checkpoint holds, without copying tensors; between two steps, on every rank.

        Raises `CheckpointError` where names are not known, and after a step that failed, whose buckets may have
        committed in part.
        """
        self._stand_between_steps("state_dict")
        failure = self._scheduler.failure() if self._scheduler is not None else None
        if failure is not None:
            raise CheckpointError(
                f"state_dict: a step failed, and some of its buckets may have changed their state and others not; "
                f"go on from the last checkpoint. The failure was: {failure}"
            )
        if self.state.storage == "host" and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # copies to the host are not waited for by anybody else
        replicated, local = self.state.export()
        return Snapshot(
            step=self.step,
            world_size=self._address.world_size,
            policy=self._policy,
            grad_scale=self.loss_scale.value(),
            settings=settings_of(self.compressor),
            shapes={name: list(parameter.shape) for name, parameter in self.state.named().items()},
            bucket_plan={"handed_in": self._buckets.names() or self._replayed} | (bucket_plan or {}),
            replicated=replicated,
            local={self._address.rank: local},
        )

    def differences(self, snapshot: Snapshot, rules: LoadRules) -> list[str]:
        """Name everything in which a snapshot does not fit."""
        shapes = {name: list(parameter.shape) for name, parameter in self.state.named().items()}
        return snapshot.differences(self.compressor, shapes, self._address.world_size, self._address.rank, rules)

    def restore(self, read: Snapshot | CheckpointError, rules: LoadRules) -> None:
        """Go on from a snapshot; between two steps, on every rank.

        Raises `CheckpointError` on every rank if it does not fit on any, or if ranks bring different ones; all then
        stay as they were. A rank that cannot even read it hands in why.
        """
        self._stand_between_steps("load_state_dict")
        named, rank, world_size = self.state.named(), self._address.rank, self._address.world_size
        checked = self._checked(read, rules) if isinstance(read, Snapshot) else read
        self._agree_on(checked, next(iter(named.values()), None))
        if isinstance(checked, CheckpointError):
            raise checked
        if rules.missing == "reset":
            checked = checked.without_entries_unknown_to(self.compressor)
        unchecked = checked.shapes if not named and rules.missing == "refuse" else None
        self.state.load(checked.replicated, checked.entries_for(rank, world_size, rules), unchecked)
        self.loss_scale.load(checked.grad_scale)
        self.step = checked.step
        self._names_checked = False
        self._buckets.forget_views()
        self._buckets.forget_last_step()
        self._replayed, self._replays_left = checked.buckets_handed_in(), self.uncut_steps

    def _checked(self, read: Snapshot, rules: LoadRules) -> Snapshot | CheckpointError:
        what = f"rank {self._address.rank}: the checkpoint does not fit"
        try:
            faults = self.differences(read, rules)
        except Exception as error:  # whatever damaged data make of it: the other ranks wait for an answer
            faults = [f"it is damaged ({type(error).__name__}: {error})"]
        return refuse(what, faults) if faults else read

    def lay_out(self, sparse: set[Tensor]) -> None:
        """Make all state that the compressor is ever to keep, as its first steps would; none for `sparse` parameters.

        A checkpoint that is read into what is there (`torch.distributed.checkpoint`) finds a place for everything.
        """
        first_steps = self.compressor.first_steps()
        if self._buckets.have_all_state and self.step > max(first_steps, default=0):
            return
        for parameter in self.state.named().values():
            memory = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
            if parameter in sparse or not self.compressor.takes(memory):
                continue
            there = self.state.of(parameter)
            fresh = ParameterState(there.key, storage=there.storage)
            view = BucketView(0, memory, [Slot(parameter, memory, fresh)])
            for step in first_steps:
                exchange = self.compressor.compress(view, Context(self._address.rank, self._address.world_size, step))
                next(exchange, None)
                exchange.close()
            there.replicated = fresh.replicated | there.replicated
            there.local = fresh.local | there.local

    def open(self, device: torch.device) -> None:
        """Connect to the other ranks now, and not at the first bucket; raise the refusal once they know of it."""
        try:
            self._scheduler_for(device).wait_until_open()
        finally:
            if self._refusal is not None:
                self.stop()
                raise self._refusal

    def stop(self) -> None:
        """End the scheduler."""
        if self._scheduler is not None:
            self._scheduler.stop()

    def statistics(self) -> Statistics:
        """Return what was counted so far."""
        return self._scheduler.ledger.totals(self._scheduler.traffic()) if self._scheduler else Statistics()

    def last_step(self) -> Statistics:
        """Return what the last whole step counted."""
        return self._scheduler.ledger.last_step() if self._scheduler else Statistics()

    def by_parameter(self) -> dict[str, ParameterTraffic]:
        """Return what was counted so far for each parameter, by name."""
        return self._scheduler.ledger.by_parameter() if self._scheduler else {}

    def memory_report(self) -> MemoryReport:
        """Return how many bytes are taken, and for what."""
        copies = self._journal.tensors() if self._journal is not None else []
        packed = self._scheduler.working_memory() if self._scheduler is not None else []
        return memory_report(self.state, self._buckets.views(), copies, packed)

    def bind(self, named_parameters: Sequence[tuple[str, Tensor]]) -> None:
        """Learn the names of one model's parameters."""
        self._buckets.are_one_models = True
        self.state.bind(named_parameters)

    def _compressor_for(self, memory: Tensor, bucket: Bucket) -> Compressor:
        if not (memory.is_floating_point() or memory.is_complex()):
            raise GradientError(
                f"bucket {bucket.index()} ({self.state.describe(bucket.parameters())}) holds gradients "
                f"of dtype {memory.dtype}; a mean needs a floating-point or complex dtype."
            )
        return self.compressor if self.compressor.takes(memory) else AllReduceMean()

    def _guarded(self, compressor: Compressor, view: BucketView, context: Context) -> Exchange:
        """Return a bucket's exchange, with what keeps state around it where this step, or run, is not like others."""
        exchange = compressor.compress(view, context)
        if not compressor.remembers(context.step):  # on every rank alike; what waits for another one is not touched
            return exchange
        if not view.slots or view.memory.is_sparse:
            return exchange if self._journal is None else self._journal.watch(view, exchange)
        exchange = refuse_what_is_not_declared(view, exchange)
        if self.may_be_unused:
            exchange = keep_what_is_unused(view, exchange)
        if has_joined(view.memory):
            exchange = take_part_with_zeros(view, exchange)
        # The journal is outermost: it undoes a step after its last bucket, when what was put by is back.
        return exchange if self._journal is None else self._journal.watch(view, exchange)

    def _stand_between_steps(self, caller: str) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise AttachError(f"{caller}: step {self.step} is under way; call it between two steps.")
        if self._last_index >= 0:  # a DDP skipped the last bucket, or the backward pass was cut short
            self._end_step()

    def _agree_on(self, loaded: Snapshot | CheckpointError, parameter: Tensor | None) -> None:
        """Raise unless every rank loads the same: now if the line stands, otherwise when it is opened."""
        if isinstance(loaded, CheckpointError):
            terms = f"refusal: {loaded}"
        else:
            terms = f"state of step {loaded.step}, {loaded.digest()}"
        if self._scheduler is not None and parameter is not None:
            try:
                self._scheduler.agree(terms)
            except AttachError as error:
                if not isinstance(loaded, CheckpointError):
                    raise CheckpointError(f"load_state_dict: nothing was loaded. {error}") from error
        if not isinstance(loaded, CheckpointError):
            self._resumed = terms

    def _begin_step_if(self, bucket: Bucket) -> None:
        """Begin a step with its first bucket; a DDP may skip the one that would have ended the step before."""
        if self._by_parameter and self._last_index >= 0 and self._buckets.come_again_with(bucket, self._last_index):
            self._end_step()
        if self._last_index < 0:
            self._verdict = StepVerdict() if self._policy == "fused" else None
            self.loss_scale.apply_to(self.state.local_by_units(), bucket.buffer().device)
            if self._journal is not None:
                self._journal.begin_step()
        self._last_index = bucket.index()

    def _end_step(self) -> None:
        self._buckets.end_step(self.step)
        self._replays_left -= 1
        if self._replays_left <= 0:
            self._replayed = []
        self.step += 1
        self._last_index = -1

    def _terms_with(self, compressor: Compressor, refusal: Exception | None = None) -> str:
        if refusal is not None:
            return f"refusal: {refusal}"
        counted = "counted" if self.may_be_unused else "not counted"
        return f"compressor {compressor!r}\nunused parameters are {counted}\n{self._resumed}\n{self._terms}"

    def _scheduler_for(self, device: torch.device) -> Scheduler:
        if self._scheduler is None:
            self._scheduler = self._make_scheduler(device)
        return self._scheduler

    def _make_scheduler(self, device: torch.device) -> Scheduler:
        process_group = self._process_group()
        backend = backend_of(process_group, device) if process_group is not None else "gloo"
        if backend == "nccl":
            assert process_group is not None, "its backend was just asked for"
            # A proxy: the engine is found by its group, and must not keep it alive.
            carrier: Any = ProcessGroupCommunicator(weakref.proxy(process_group))
            agreements = Agreements(carrier, self._address, device)
            communicator = self._wrap(carrier) if self._wrap else carrier
            stream = SideStream(device)
            inline = InlineScheduler(
                communicator, agreements.agree, stream, self._policy, self._hook_timeout, self._address.noticeboard()
            )
            inline.agree(self._terms_with(self.compressor, self._refusal))
            return inline
        if process_group is not None and backend != "gloo" and not self._may_bypass:
            warn_of_bypass(process_group, backend)
        terms = self._terms_with(self.compressor, self._refusal)
        return ThreadScheduler(self._address, terms, self._wrap, self._policy, self._hook_timeout)


def _future_for(memory: Tensor) -> torch.futures.Future[Tensor]:
    return torch.futures.Future(devices=[memory.device]) if memory.is_cuda else torch.futures.Future()


def _event_for(memory: Tensor) -> Any:
    return torch.cuda.current_stream(memory.device).record_event() if memory.is_cuda else None
