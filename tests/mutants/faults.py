"""Sixty mistakes that the tests are to find (`make mutants`), by room.

They were chosen before the first was tried. None is exchanged for another, unless it turns out to change no behaviour.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.mutants.fault import Fault

_ENGINE = [
    Fault(
        name="the mean weight is forgotten",
        room="engine",
        says="A rank's tensors are multiplied by its weight, and not divided by the mean weight.",
        at="commhooks.engine.guards:weigh",
        old="bucket.memory.mul_(own / mean)",
        new="bucket.memory.mul_(own)",
    ),
    Fault(
        name="a joined rank loses its residual",
        room="engine",
        says="What is to be put back after a step with zeros is the zeroed memory itself, and no copy.",
        at="commhooks.engine.guards:take_part_with_zeros",
        old="copies = [kept.clone() for kept in own]",
        new="copies = list(own)",
    ),
    Fault(
        name="each rank counts for itself",
        room="engine",
        says="A parameter counts as unused if it is unused here, whatever the other ranks have said.",
        at="commhooks.engine.guards:_Rider.carry",
        old="        self._counts = torch.cat(counts)\n",
        new="",
    ),
    Fault(
        name="loss scales of different steps",
        room="engine",
        says="A rank's new loss scale is compared with what the others had one step before.",
        at="commhooks.engine.engine:Engine._compare_scales",
        old="failures.other_scales(begun, told)",
        new="failures.other_scales(begun - 1, told)",
    ),
    Fault(
        name="stale copies undo a step",
        room="engine",
        says="Copies are made in a bucket's first step and never again, so a later step is undone to that one.",
        at="commhooks.engine.undo:UndoLog.watch",
        old="        else:\n            copies.refresh()\n",
        new="",
    ),
    Fault(
        name="each part is the last",
        room="engine",
        says="Every part of a step's last bucket ends the step.",
        at="commhooks.engine.replay:BucketPart.is_last",
        old="return self.ends and self.whole.is_last()",
        new="return self.whole.is_last()",
    ),
]

_SCHEDULING = [
    Fault(
        name="nobody listens",
        room="scheduling",
        says="A waiting rank looks for others' failures only if it has just done so, which is never.",
        at="commhooks.scheduling.scheduler:Scheduler.listen",
        old="now - self._listened < SLICE_SECONDS",
        new="now - self._listened > SLICE_SECONDS",
    ),
    Fault(
        name="a comparison one place too early",
        room="scheduling",
        says="A rank that compares where this one's next bucket is goes unnoticed.",
        at="commhooks.scheduling.worker:Worker._stray",
        old="self._ended <= number < self._submitted",
        new="self._ended < number < self._submitted",
    ),
    Fault(
        name="each bucket has its own verdict",
        room="scheduling",
        says="The buckets of a fused step are judged one by one, so that one may keep what another drops.",
        at="commhooks.scheduling.policy:Fused._ask",
        old="        if to_judge:\n            self.judge(to_judge)\n",
        new="        for task in to_judge:\n            self.judge([task])\n",
    ),
    Fault(
        name="two lanes need no comparison",
        room="scheduling",
        says="Ranks compare whose turn it is only from three lanes on.",
        at="commhooks.scheduling.lanes:Lanes.add",
        old="if len(self._lanes) > 1 and",
        new="if len(self._lanes) > 2 and",
    ),
    Fault(
        name="payload and moved bytes change places",
        room="scheduling",
        says="A parameter's payload bytes are entered as its moved bytes, and these as its payload.",
        at="commhooks.scheduling.ledger:Ledger.enter",
        old="(0, 1, 0, request.payload_bytes, request.moved_bytes)",
        new="(0, 1, 0, request.moved_bytes, request.payload_bytes)",
    ),
    Fault(
        name="the ledger is read without its lock",
        room="scheduling",
        says="Shares are divided in the caller's thread while the worker's adds to them.",
        at="commhooks.scheduling.ledger:_Shares.by_parameter",
        old="with self._lock:",
        new="if True:",
    ),
]

_PACKING = [
    Fault(
        name="an order in place of its inverse",
        room="packing",
        says="Pieces that were sorted by name are given back as if sorting twice undid it.",
        at="commhooks.scheduling.packing:_Sum.__init__",
        old="back = sorted(range(len(pieces)), key=self._order.__getitem__)",
        new="back = self._order",
    ),
    Fault(
        name="rows are summed and not averaged",
        room="packing",
        says="Rows that are packed into a message are not divided by the number of ranks.",
        at="commhooks.scheduling.packing:_Rows.pack",
        old="            if is_mean:\n                memory /= world_size\n",
        new="",
    ),
    Fault(
        name="an answer stays in its message",
        room="packing",
        says="A sum that was cast for the wire is not written back into the memory that it is to overwrite.",
        at="commhooks.scheduling.packing:_answer_alone",
        old="return own if result.data_ptr() == own.data_ptr() else own.copy_(result)",
        new="return own",
    ),
    Fault(
        name="a sum overwrites what was lent to it",
        room="packing",
        says="A part that is not to be changed is sent from its own memory.",
        at="commhooks.scheduling.packing:_alone",
        old="    if not part.in_place:\n        own = own.clone()\n",
        new="",
    ),
    Fault(
        name="two tasks share a message",
        room="packing",
        says="A message is taken although another task has not given it back.",
        at="commhooks.scheduling.packing:Packer._take",
        old="            if message.is_free:\n                break\n",
        new="            break\n",
    ),
]

_STATE = [
    Fault(
        name="takers are divided evenly",
        room="state",
        says="A rank's residual is divided among more ranks, or fewer, than take a part of it.",
        at="commhooks.state.spread:spread",
        old="len(range(rank % old_size, new_size, old_size))",
        new="new_size // old_size",
    ),
    Fault(
        name="dealt shares keep their size",
        room="state",
        says="The errors of served blocks are not multiplied when they are dealt to another number of ranks.",
        at="commhooks.state.spread:deal_again",
        old="(whole[served].double() * times)",
        new="whole[served].double()",
    ),
    Fault(
        name="a share is handed over in other units",
        room="state",
        says="A server error, in units of the mean, is added to a residual, in units of a gradient, as it is.",
        at="commhooks.state.handover:_add",
        old="add_(kept, alpha=servers)",
        new="add_(kept)",
    ),
    Fault(
        name="state stored otherwise is lost",
        room="state",
        says="State of another dtype or on another device is laid out anew, and its values are not copied.",
        at="commhooks.state.table:StateTable.lay_out_entries",
        old="                fresh.copy_(kept)\n",
        new="",
    ),
    Fault(
        name="residuals in the gradients' dtype",
        room="state",
        says="The residuals of bf16 gradients are kept in bf16, unasked.",
        at="commhooks.state.table:StateTable._empty",
        old="entry.dtype or computing_dtype(gradient.dtype)",
        new="entry.dtype or gradient.dtype",
    ),
    Fault(
        name="a digest of shapes alone",
        room="state",
        says="States with other numbers in tensors of the same shapes have the same digest.",
        at="commhooks.saving.saved:_bytes_in",
        old="        yield bytes_of(data.cpu()).numpy().tobytes()\n",
        new="",
    ),
]

_SAVING = [
    Fault(
        name="a write that ends early is the whole",
        room="saving",
        says="What the operating system has not written in one call is never written.",
        at="commhooks.saving.files:_File.write",
        old="left = left[os.write(self._descriptor, left) :]",
        new="os.write(self._descriptor, left)\n                break",
    ),
    Fault(
        name="one checkpoint too many",
        room="saving",
        says="One more checkpoint is kept than was asked for.",
        at="commhooks.saving.folder:remove_all_but",
        old="[:-keep]",
        new="[: -keep - 1]",
    ),
    Fault(
        name="checkpoints in the order of letters",
        room="saving",
        says="Of two checkpoints with one number, step 10 comes before step 9.",
        at="commhooks.saving.folder:checkpoints_in",
        old="return [path for _, _, path in sorted(found)]",
        new="return sorted(path for _, _, path in found)",
    ),
    Fault(
        name="a checksum that is not compared",
        room="saving",
        says="A file that was written again since is loaded if the manifest names it.",
        at="commhooks.saving.contents:Folder._read",
        old='crc32 != (before := self._manifest["crc32"][name])',
        new='name not in (before := self._manifest["crc32"])',
    ),
    Fault(
        name="random numbers start again",
        room="saving",
        says="The state of the random number generator is saved and not restored.",
        at="commhooks.saving.contents:Contents.load_into",
        old='        torch.set_rng_state(self.own["generators"]["cpu"])\n',
        new="",
    ),
    Fault(
        name="a sharded optimizer's old state",
        room="saving",
        says="The state of an optimizer whose state is sharded is saved as it was last collected.",
        at="commhooks.saving.checkpoints:save_checkpoint",
        old='    ranks.each("consolidate the optimizer\'s state", run.consolidate_optimizer)\n',
        new="",
    ),
]

_COMPRESSORS = [
    Fault(
        name="a cast's error is too small",
        room="compressors",
        says="The rounding error of a rank's share of the mean is kept as if it were the gradient's.",
        at="commhooks.compressors.cast:Cast.compress",
        old="share.sub_(share.to(self.dtype)).mul_(context.world_size)",
        new="share.sub_(share.to(self.dtype))",
    ),
    Fault(
        name="a threshold in scaled units",
        room="compressors",
        says="The threshold is not multiplied by the loss scale of the gradients that it is compared with.",
        at="commhooks.compressors.threshold:Threshold.least",
        old="self.threshold * context.loss_scale",
        new="self.threshold",
    ),
    Fault(
        name="momentum that was sent goes on",
        room="compressors",
        says="The velocity of elements that were sent does not restart from zero.",
        at="commhooks.compressors.dgc:DGC.compress",
        old='slot.commit("velocity", u.index_fill_(0, own.places, 0.0), finite)',
        new='slot.commit("velocity", u, finite)',
    ),
    Fault(
        name="steps of several iterations begin alike",
        room="compressors",
        says="With alternating sides and two iterations, every second step begins with the other side.",
        at="commhooks.compressors.powersgd.powersgd:PowerSGD.sides",
        old="first = step * self.iterations",
        new="first = step",
    ),
    Fault(
        name="machine and place change places",
        room="compressors",
        says="A rank takes its place in the machine for the machine's number.",
        at="commhooks.wrappers.hierarchical:Hierarchical.compress",
        old="machine, place = divmod(context.rank, self.size)",
        new="place, machine = divmod(context.rank, self.size)",
    ),
    Fault(
        name="the residual never fades",
        room="compressors",
        says="The decay is forgotten, so that all of the residual comes back.",
        at="commhooks.wrappers.error_feedback:ErrorFeedback._with_residuals",
        old="self._is_lossy, self.decay",
        new="self._is_lossy, 1.0",
    ),
    Fault(
        name="a limit that excludes itself",
        room="compressors",
        says="A parameter with exactly the largest number of elements does not match.",
        at="commhooks.wrappers.per_parameter:Match.matches",
        old="<= parameter.numel() <= limit",
        new="<= parameter.numel() < limit + (self.max_elements is None)",
    ),
]

_CODECS = [
    Fault(
        name="the server error is never sent",
        room="codecs",
        says="Eager passes do not add the last step's error of a served block to its mean.",
        at="commhooks.compressors.kernels.codes:CodecPasses.serve",
        old="        if left is not None:\n            y.add_(left)\n",
        new="",
    ),
    Fault(
        name="a power of two is not its own scale",
        room="codecs",
        says="A block whose largest magnitude is a power of two gets the next one as its scale.",
        at="commhooks.compressors.codecs.natural:Natural.encode",
        old="fraction <= 0.5",
        new="fraction < 0.5",
    ),
    Fault(
        name="small numbers are rounded to zero",
        room="codecs",
        says="Numbers from 1/8 to 3/16 become 0, although 1/4 is nearer.",
        at="commhooks.compressors.codecs.e3m0:E3M0.encode",
        old="exponents.maximum(least).clamp_(max=7)",
        new="exponents.clamp_(min=0, max=7)",
    ),
    Fault(
        name="a forgotten borrow",
        room="codecs",
        says="Compiled code unpacks a digit next to a negative one as one too small.",
        at="commhooks/native/uniform.h:decode_uniform",
        old="rest = (rest - digit) >> bits;",
        new="rest = rest >> bits;",
        seen_at="commhooks.native.passes:CodeKernels.write",
    ),
    Fault(
        name="the last line is not searched",
        room="codecs",
        says="Compiled code overlooks the largest elements in the last line of a block if that line is short.",
        at="commhooks/native/largest.h:find_largest",
        old="for (int start = width; start < n; start += width) {",
        new="for (int start = width; start + width <= n; start += width) {",
        seen_at="commhooks.native.largest:SparseKernels._run",
    ),
]

_SHARDED = [
    Fault(
        name="the divide factor is ignored",
        room="sharded",
        says="A sum that FSDP2 wants divided by a factor of its own is divided by nothing.",
        at="commhooks.sharded.reducing:CompressedReduceScatter._reduce",
        old="output_tensor.div_(self._unit.divide_factor or ranks)",
        new="pass",
    ),
    Fault(
        name="blocks after the first run",
        room="sharded",
        says="A block's place in the row is counted from the message's first block, and not from its run's.",
        at="commhooks.sharded.gathering:Cut.pieces",
        old="run.first + (block - begin) * self.block",
        new="run.first + block * self.block",
    ),
    Fault(
        name="a kept gradient is overwritten",
        room="sharded",
        says="Of several backward passes without an average over replicas, only the last counts.",
        at="commhooks.sharded.replicas:Passes.keeps",
        old="self._kept[unit].reduced.add_(reduced)",
        new="self._kept[unit] = Kept(unit, reduced.clone())",
    ),
    Fault(
        name="zeros in place of no gradient",
        room="sharded",
        says="After a backward pass whose gradients are kept, parameters have zeros as gradients, and not None.",
        at="commhooks.sharded.replicas:Passes._end",
        old="        while self._to_empty:\n            self._to_empty.pop().grad = None\n",
        new="        self._to_empty.clear()\n",
    ),
]

_DILOCO = [
    Fault(
        name="a delay of exactly one gap",
        room="DiLoCo",
        says="Exchanges that begin in the step in which another's means are due are said not to overlap it.",
        at="commhooks.diloco.starting:Schedule.overlaps",
        old="self.delay >= min(gaps)",
        new="self.delay > min(gaps)",
    ),
    Fault(
        name="outer copies from before the warm-up",
        room="DiLoCo",
        says="After the first average, progress is still measured from where the models began.",
        at="commhooks.diloco.diloco:DiLoCo.begin_at_mean",
        old="        for fragment in self._fragments:\n            fragment.begin_here()\n",
        new="",
    ),
    Fault(
        name="a loaded state is trained on",
        room="DiLoCo",
        says="The outer optimizer goes on in the tensors of the state that it was loaded from.",
        at="commhooks.diloco.diloco:DiLoCo._load_outer_optimizer",
        old='cloned(shared["outer_optimizer"])',
        new='shared["outer_optimizer"]',
    ),
    Fault(
        name="left-out ranks count",
        room="DiLoCo",
        says="A mean over the ranks whose parameters are finite is divided by the number of all ranks.",
        at="commhooks.diloco.starting:average_over",
        old=".contiguous() / counted",
        new=".contiguous() / group.size()",
    ),
    Fault(
        name="progress from a point that nobody was at",
        room="DiLoCo",
        says="A bf16 parameter's progress is measured from the fp32 outer copy, and not from what it was rounded to.",
        at="commhooks.diloco.parts:Fragment.write",
        old="begun = outer if parameter.dtype == outer.dtype else outer.to(parameter.dtype).to(outer.dtype)",
        new="begun = outer",
    ),
]

_DDP_CORE = [
    Fault(
        name="a full bucket stays open",
        room="ddp_core",
        says="A bucket that has exactly reached its limit takes another parameter.",
        at="ddp_core.buckets:assign_buckets",
        old="nbytes[spec.kind] >= limits",
        new="nbytes[spec.kind] > limits",
    ),
    Fault(
        name="use without synchronisation is forgotten",
        room="ddp_core",
        says="A parameter that was used under no_sync alone counts as unused when gradients are reduced.",
        at="ddp_core.features.unused:UsedParameters.on_gradient",
        old="if reducer.layout.parameters[index].grad is not None:",
        new="if reducer.layout.parameters[index].grad is not None and not reducer.paused:",
    ),
    Fault(
        name="delayed gradients are summed",
        room="ddp_core",
        says="Gradients outside the buckets are not divided by the number of ranks.",
        at="ddp_core.features.delayed:DelayedGradients.launch_own",
        old="bucket.gather(range(len(bucket.members)), reducer.iteration.divisor)",
        new="bucket.gather(range(len(bucket.members)), None)",
    ),
    Fault(
        name="other last bits than PyTorch's",
        room="ddp_core",
        says="A long gradient is divided, where PyTorch multiplies it by the reciprocal.",
        at="ddp_core.buckets:Bucket.gather",
        old="torch.mul(grads[0], 1.0 / divisor, out=into[0])",
        new="torch.div(grads[0], divisor, out=into[0])",
    ),
    Fault(
        name="no bucket for what is not used",
        room="ddp_core",
        says="Rebuilt buckets of a static graph leave out parameters that this rank does not use.",
        at="ddp_core.features.static_graph:StaticGraph.at_end",
        old="reducer.iteration.order += self.here",
        new="pass",
    ),
    Fault(
        name="rank 0 has the last word",
        room="ddp_core",
        says="Ranks that ran out of inputs get rank 0's model, and not that of a rank that trained to the end.",
        at="ddp_core.features.joining:ShadowHook.post_hook",
        old="ddp.join_process_group, ddp._authoritative_rank)",
        new="ddp.join_process_group, 0)",
    ),
]

_PLANNING = [
    Fault(
        name="faster than without communication",
        room="planning",
        says="A step is predicted to be shorter than one without communication.",
        at="commhooks.experiments.planning.predicting:step_over",
        old="seconds = max(least, seconds)",
        new="least = max(least, seconds)",
    ),
    Fault(
        name="a transfer takes what it leaves",
        room="planning",
        says="While a transfer needs a share of the core, that share, and not the rest, is left for compute.",
        at="commhooks.experiments.timing.step_time:_Rank._when",
        old="free = (1 - share) * (end - moment)",
        new="free = share * (end - moment)",
    ),
    Fault(
        name="pieces at once",
        room="planning",
        says="A message that is predicted in pieces takes the time of one of them.",
        at="commhooks.experiments.planning.predicting:_InPieces.transfer",
        old="Transfer(pieces * one.seconds,",
        new="Transfer(one.seconds,",
    ),
    Fault(
        name="a margin on the wrong side",
        room="planning",
        says="The controller moves to a candidate that saves less than the margin.",
        at="commhooks.control.decider:Decider.decide",
        old="predicted[best] > (1 - self.rule.margin) * own",
        new="predicted[best] > (1 + self.rule.margin) * own",
    ),
]


def faults() -> Iterator[Fault]:
    """Yield all of them."""
    for room in (
        _ENGINE,
        _SCHEDULING,
        _PACKING,
        _STATE,
        _SAVING,
        _COMPRESSORS,
        _CODECS,
        _SHARDED,
        _DILOCO,
        _DDP_CORE,
        _PLANNING,
    ):
        yield from room
