"""Compression of a model that Accelerate prepared: `compress`, one call after `prepare`."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, Unpack

from torch.nn import Module
from torch.optim import Optimizer

from commhooks.errors import AttachError
from commhooks.exchange.feed import Channel
from commhooks.exchange.handle import Handle
from commhooks.integrations.common import Compression, CompressionOptions, check_framework_has_no_hook, require
from commhooks.language.compressor import Compressor
from commhooks.saving.rank_files import load_rank_files, save_rank_files
from commhooks.saving.rules import LoadRules
from commhooks.unwrapping import described, find_ddp, is_ddp, unwrapped

require("accelerate", at_least="1.0")

from accelerate import Accelerator  # noqa: E402  # after the check, whose error says what to install
from accelerate.utils import DDPCommunicationHookType, DistributedType  # noqa: E402

_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def compress(
    accelerator: Accelerator,
    model: Module,
    compressor: Compressor | str,
    **options: Unpack[CompressionOptions],
) -> Handle[Channel]:
    """Attach `compressor` to a model that `accelerator` prepared, and return the `Handle`.

    Call it on every rank, after `prepare` was given the model and its optimizer, and before `load_state`.

    - `save_state` then writes the hook's state into its folder, one file for each rank, and `load_state` restores it.
      `world_size`, `settings` and `missing` allow differences between the two: see `LoadRules`.
    - The optimizers are watched: a step on gradients that bypassed the compressor raises `NotAveragedError`.
    - `options` are those of `attach`; `scaler` is the accelerator's own by default.

    `model` may also be a `ddp_core.DistributedDataParallel` around the result of `accelerator.prepare_model(module,
    evaluation_mode=True)`, which places and casts the module without wrapping it.

    Raises `AttachError` if there is only one process, if the model is not prepared, is wrapped twice or is sharded, if
    no prepared optimizer trains it, or if an optimizer already has state (unless `missing="reset"`); `SettingsError` if
    `DistributedDataParallelKwargs` names a hook too; and the errors of `attach`.
    """
    compression = Compression("compress", compressor, **options)
    check_accelerator("compress", accelerator)
    inner = _module_of(accelerator, model)
    optimizers = _optimizers_of(accelerator, inner)
    if compression.rules.missing == "refuse" and any(optimizer.state for optimizer in optimizers):
        raise AttachError(
            "compress: an optimizer has taken steps, or its state was loaded, before the hook was attached, so the "
            "hook's own state would be lost. Call compress before load_state; or pass missing='reset' to start the "
            "hook's state from zero."
        )
    attachment = compression.begin(model, optimizers, scaler=accelerator.scaler)
    number = next(n for n, known in enumerate(accelerator._models) if unwrapped(known) is inner)
    in_folder = _InFolder(attachment, f"commhooks_{number}" if number else "commhooks", compression.rules)
    accelerator.register_save_state_pre_hook(in_folder.save)
    accelerator.register_load_state_pre_hook(in_folder.load)
    return attachment


def check_accelerator(caller: str, accelerator: Accelerator) -> None:
    """Raise for an accelerator under which no hook can run, or that was told to register one itself."""
    if not isinstance(accelerator, Accelerator):
        raise AttachError(f"{caller}: expected an accelerate.Accelerator (got {type(accelerator).__name__}).")
    if accelerator.distributed_type in _SHARDED:
        raise AttachError(
            f"{caller}: expected data parallelism (got {accelerator.distributed_type.value}): only a "
            "DistributedDataParallel has a communication hook; configure Accelerate for multi-GPU or multi-CPU. "
            "For FSDP2 call commhooks.attach_sharded with the prepared model."
        )
    if accelerator.num_processes == 1:
        raise AttachError(
            f"{caller}: Accelerate sees one process, so no gradients are exchanged and there is nothing to compress. "
            "Launch several (accelerate launch or torchrun); on machines without a GPU, also pass "
            "Accelerator(cpu=True) or TrainingArguments(use_cpu=True), because otherwise each process trains alone."
        )
    for argument in ("comm_hook", "comm_wrapper"):
        hook = getattr(accelerator.ddp_handler, argument, DDPCommunicationHookType.NO)
        check_framework_has_no_hook(
            caller,
            f"DistributedDataParallelKwargs({argument}=...)",
            None if hook in (DDPCommunicationHookType.NO, DDPCommunicationHookType.NO.value) else hook,
        )


class _InFolder:
    """An attachment's state in the folders that `save_state` writes and `load_state` reads, until its model is gone.

    An accelerator outlives its models: `free_memory` makes room for others. So it must not keep them alive through
    this, nor write and read their state. An attachment lives as long as the model that it is attached to.
    """

    def __init__(self, attachment: Handle[Channel], name: str, rules: LoadRules) -> None:
        self._attachment = weakref.ref(attachment)
        self._name = name
        self._rules = rules

    def save(self, models: list[Module], weights: list[dict[str, Any]], folder: str) -> None:
        """Write this rank's file; `save_state` calls it, once the folder exists."""
        attachment = self._attachment()
        if attachment is not None and attachment.is_attached:
            save_rank_files(Path(folder), self._name, attachment)

    def load(self, models: list[Module], folder: str) -> None:
        """Resume; `load_state` calls it, before it loads anything."""
        attachment = self._attachment()
        if attachment is not None and attachment.is_attached:
            load_rank_files(Path(folder), self._name, attachment, self._rules)


def _module_of(accelerator: Accelerator, model: Module) -> Module:
    """Return the module in a DistributedDataParallel; raise `AttachError` unless the accelerator prepared it."""
    outer = getattr(unwrapped(model), "module", None) if isinstance(model, Module) else None
    if is_ddp(outer):
        raise AttachError(
            f"compress: {described(model)} is wrapped twice: gradients would be averaged twice, once by each. Give "
            "prepare the module itself; or, to use ddp_core, write `module = accelerator.prepare_model(module, "
            "evaluation_mode=True)` and `model = ddp_core.DistributedDataParallel(module)`."
        )
    inner: Any = find_ddp("compress", model).module
    if not any(unwrapped(known) is unwrapped(inner) for known in accelerator._models):
        raise AttachError(
            f"compress: this accelerator did not prepare the {described(model)}; pass what accelerator.prepare(model) "
            "returned; or, with ddp_core, wrap what accelerator.prepare_model(module, evaluation_mode=True) returned."
        )
    return unwrapped(inner)


def _optimizers_of(accelerator: Accelerator, inner: Module) -> list[Optimizer]:
    """Return the prepared optimizers that train the module, without Accelerate's wrappers around them."""
    parameters = set(inner.parameters())
    prepared = [getattr(one, "optimizer", one) for one in accelerator._optimizers]
    found = [one for one in prepared if any(p in parameters for group in one.param_groups for p in group["params"])]
    if not found:
        raise AttachError(
            "compress: no prepared optimizer trains this model, and without one nothing would notice if the hook did "
            "not run; prepare it first: `model, optimizer = accelerator.prepare(model, optimizer)`."
        )
    return found
