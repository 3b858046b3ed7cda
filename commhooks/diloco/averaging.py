"""Local SGD: a model averager for PyTorch's `PostLocalSGDOptimizer`, whose averages may be compressed.

Source: Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from torch import Tensor
from torch.distributed.algorithms.model_averaging import averagers
from torch.nn import Module
from torch.optim import Optimizer

from commhooks.diloco.counts import DiLoCoStatistics
from commhooks.diloco.diloco import DiLoCo
from commhooks.diloco.inner import OptimizerState
from commhooks.errors import CheckpointError, SettingsError
from commhooks.exchange.options import Options, is_whole
from commhooks.language.compressor import Compressor
from commhooks.saving.rules import LoadOptions, LoadRules
from commhooks.saving.saved import Saved, read
from commhooks.tensors import cloned
from commhooks.unwrapping import bare


class ModelAverager(averagers.ModelAverager):
    """Averages the ranks' models every `every` steps, after `warmup_steps` without averaging.

    `torch.distributed.optim.PostLocalSGDOptimizer(optimizer, averager)` calls it after each step; with a plain
    optimizer, and with a gradient scaler, call `average_parameters` yourself. It averages and compresses each rank's
    progress since the last average: compressing the weights themselves would lose almost all of that. The first
    average, at step `warmup_steps` counted from 0, is an uncompressed one of the models themselves. Buffers are
    averaged too, as in `DiLoCo`, and with optimizer_state="mean" the optimizer's moments. `optimizer` is the local one;
    `DiLoCo` describes the other arguments. On construction all ranks take rank 0's model.

    It is saved like `DiLoCo`, with `save_checkpoint(hooks=averager)`: the optimizer's state_dict holds only the
    averager's step. Raises `SettingsError` on every rank if settings cannot work.
    """

    keeps_own_model = True
    """Each rank has its own model between averages, and its own optimizer state always."""

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        *,
        warmup_steps: int = 0,
        every: int,
        compressor: Compressor | str = "all-reduce",
        optimizer_state: OptimizerState = "local",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(options.get("process_group"))
        if not is_whole(warmup_steps) or warmup_steps < 0:
            raise SettingsError(f"ModelAverager(warmup_steps={warmup_steps!r}): must be an int of at least 0.")
        self.warmup_steps = warmup_steps
        self._diloco = DiLoCo(
            bare(model),  # its DistributedDataParallel may average among all ranks first, and among some of them later
            optimizer,
            every=every,
            compressor=compressor,
            optimizer_state=optimizer_state,
            outer="average",  # from the last average to the next one
            **options,
        )

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        """The rank of this process and the number of ranks that average together."""
        return self._diloco.rank_and_world_size

    def average_parameters(self, params: Iterable[Tensor] | Iterable[Mapping[str, Any]]) -> None:
        """Count a step, and average the model if it is time; every rank must call it equally often.

        `params` are the trained parameters of the model, or an optimizer's groups of them; whether they have a gradient
        does not matter. Raises `CompressorError` on every rank for other parameters or none, and the error of an
        exchange that failed, as every later call does.
        """
        self._diloco.check_step()
        self._check(params)
        if self.step > self.warmup_steps:
            if self._diloco.steps != self.step - self.warmup_steps - 1:
                raise CheckpointError(
                    f"average_parameters: it is at step {self.step}, but its last average is of another run: load its "
                    "own state too, with load_checkpoint(hooks=averager); the optimizer's has its step alone."
                )
            self._diloco.step()
        elif self.step == self.warmup_steps:
            self._diloco.begin_at_mean()
        else:
            self._diloco.pass_over()
        self.step += 1

    def _check(self, params: Iterable[Any]) -> None:
        given = list(params)
        of_groups = [one["params"] if isinstance(one, Mapping) else [one] for one in given]
        trained = {id(parameter) for group in of_groups for parameter in group if parameter.requires_grad}
        expected = set(map(id, self._diloco.trained_parameters))
        if trained != expected:
            self._diloco.fail(
                f"average_parameters was given {len(trained)} parameters, which must be the {len(expected)} of the "
                "model that require a gradient."
            )

    def statistics(self) -> DiLoCoStatistics:
        """Return this rank's counts; steps and rounds are counted from the first average on."""
        return self._diloco.statistics()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data; see `DiLoCo.state_dict`."""
        state: dict[str, Any] = cloned(self.snapshot().as_dict())
        return state

    def snapshot(self) -> Saved:
        """Return the same as `state_dict`, with the tensors themselves instead of copies."""
        own = self._diloco.snapshot()
        return dataclasses.replace(
            own, shared=own.shared | {"warmup_steps": self.warmup_steps, "step_of_averager": self.step}
        )

    def model_state(self) -> dict[str, Any]:
        """Return the model's state_dict with the last average in place of the parameters."""
        return self._diloco.model_state()

    def differences(self, saved: Saved, rules: LoadRules) -> list[str]:
        """List every difference between a saved state and this run that would cause an error on loading."""
        before = saved.shared.get("warmup_steps")
        if saved.shared and before != self.warmup_steps:
            return [f"warmup_steps: saved with {before}, now {self.warmup_steps}"]
        if saved.shared and type(saved.shared.get("step_of_averager")) is not int:
            return ["ModelAverager's state has no step_of_averager"]
        return self._diloco.differences(saved, rules)

    def load_state_dict(self, state: Mapping[str, Any] | CheckpointError, **rules: Unpack[LoadOptions]) -> None:
        """Restore a `state_dict`; see `DiLoCo.load_state_dict`."""
        self.restore(read(state), LoadRules(**rules))

    def restore(self, saved: Saved | CheckpointError, rules: LoadRules) -> None:
        """Restore a state; see `Handle.restore`."""
        self._diloco.restore(saved, rules, self.differences)
        assert isinstance(saved, Saved), "an error was raised"
        self.step: int = saved.shared["step_of_averager"]

    def close(self) -> None:
        """End all exchanges, and the thread that carries them."""
        self._diloco.close()
