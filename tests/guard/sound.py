"""Sound programs, however odd: the guard must say nothing of them, as of those of `tests/parity`.

What ends with different ranks on purpose is registered with `LOCAL`, what says so itself with `WARNS`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import commhooks
import ddp_core
import ddp_core.guard.proof
from tests.guard.situations import (
    LOCAL,
    OTHER_ERROR,
    RIGHT,
    TORCH_ATTACH,
    TORCH_HOOK,
    WARNS,
    Net,
    Run,
    Situations,
    average,
    perceptron,
    put,
    squares,
)

sound = Situations(RIGHT)


def gradients_of(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


# ---------------------------------------------------------------- the usual


sound.calls(
    a_model_trains=lambda run: run.train(steps=8),
    a_static_graph_trains=lambda run: run.train_module(Net(), static_graph=True),
    the_wrapper_is_compiled=lambda run: run.train(torch.compile(run.model, backend="aot_eager")),
    an_optimizer_steps_for_each=lambda run: run.train(optimizer=torch.optim.Adam(run.model.parameters(), foreach=True)),
    one_optimizer_has_the_head_and_the_rest_is_never_zeroed=lambda run: run.train(
        optimizer=run.optimizer_of(run.model.module.head.parameters()), steps=5
    ),
)


@sound()
def a_forward_pass_of_a_static_graph_has_no_backward_pass(run: Run) -> None:
    run.model = run.wrap(Net(), static_graph=True)
    for step in run.steps():
        if step == 1:
            run.model(run.batch())
        run.backward(run.model)


@sound()
def ranks_use_different_branches(run: Run) -> None:
    run.model = run.wrap(Net(), find_unused_parameters=True)
    for step in run.steps(5):
        run.backward(run.model, without_head=(step + run.rank) % 2 == 1)


@sound()
def adapters_of_a_frozen_model_train(run: Run) -> None:
    module = Net()
    module.requires_grad_(False)
    module.extra = nn.Sequential(nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False))
    model = run.wrap(module)
    run.train(model, run.optimizer_of(module.extra.parameters()))


# ---------------------------------------------------------------- gradients are changed before the step


@sound()
def a_scaler_accumulates_unscales_and_skips_a_step(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        run.optimizer.zero_grad()
        factor = float("inf") if step == 2 else 1.0  # on all ranks: this step is skipped
        with run.model.no_sync():
            scaler.scale(run.loss(run.model)).backward()
        scaler.scale(run.loss(run.model) * factor).backward()
        scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        scaler.step(run.optimizer)
        scaler.update()


@sound()
def sharpness_aware_steps_look_uphill_on_each_rank(run: Run) -> None:
    """Sharpness-aware minimization: step with the gradients at a point uphill, for which nothing is averaged."""
    parameters = list(run.model.parameters())
    for _ in run.steps():
        run.backward_in_no_sync()
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.data.add_(0.01 * parameter.grad)
        run.optimizer.zero_grad()
        run.backward(run.model)
        for parameter, value in zip(parameters, before, strict=True):
            parameter.data.copy_(value)


@sound(but={TORCH_ATTACH: OTHER_ERROR, TORCH_HOOK: OTHER_ERROR})  # nor does it work there without a guard
def gradients_keep_their_own_graph(run: Run) -> None:
    for _ in run.steps(3):
        run.loss(run.model).backward(create_graph=True)


# ---------------------------------------------------------------- passes whose gradients no step uses


@sound()
def evaluation_comes_in_between(run: Run) -> None:
    for _ in run.steps():
        with torch.no_grad():
            run.model.module(run.batch())
            run.model(run.batch())
        run.backward(run.model)
        run.model.eval()
        with torch.inference_mode():
            run.model.module(run.batch())
        run.model.train()


@sound()
def gradients_past_the_wrapper_are_zeroed(run: Run) -> None:
    for _ in run.steps():
        run.backward(run.model.module)
        run.optimizer.zero_grad(set_to_none=False)
        run.backward(run.model)


@sound()
def rank_0_alone_probes_the_inner_module(run: Run) -> None:
    for _ in run.steps():
        if run.rank == 0:
            run.backward(run.model.module)
        run.optimizer.zero_grad()
        run.backward(run.model)


@sound()
def lbfgs_calls_the_wrapper_in_its_closure(run: Run) -> None:
    optimizer, batch = torch.optim.LBFGS(run.model.parameters(), max_iter=3), run.batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = squares(run.model(batch))
        loss.backward()
        mean = loss.detach().clone()
        average([mean])
        return mean

    for _ in range(3):
        optimizer.step(closure)


# ---------------------------------------------------------------- averaged by the program itself


@sound()
def gradients_are_averaged_by_hand_after_no_sync(run: Run) -> None:
    for _ in run.steps(8):
        run.backward_in_no_sync()
        average(gradients_of(run.model))


@sound()
def all_ranks_have_the_same_data_past_the_wrapper(run: Run) -> None:
    for step in run.steps(8):
        torch.manual_seed(step)
        squares(run.model.module(torch.randn(4, 8))).backward()


# ---------------------------------------------------------------- several models, several optimizers


@sound(LOCAL)  # the optimizer's moments, on purpose; the step at 0 changes no parameter
def the_learning_rate_begins_at_zero(run: Run) -> None:
    """Fill the optimizer's state with a step at 0, as before a checkpoint is loaded, on this rank's own gradients."""
    optimizer = torch.optim.Adam(run.model.parameters(), lr=0.0)
    put(run.model.parameters(), [torch.full_like(p, run.rank) for p in run.model.parameters()])
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.01
    run.train(optimizer=optimizer)


@sound()
def a_generator_and_its_critic_train(run: Run) -> None:
    generator, critic = run.wrap(perceptron(8)), run.wrap(perceptron(1))
    of_generator, of_critic = (run.optimizer_of(one.parameters()) for one in (generator, critic))
    for _ in range(4):
        for _ in run.steps(1, of_critic):
            squares(critic(run.batch()) - 1).backward()
            squares(critic(generator(run.batch()).detach())).backward()
        for _ in run.steps(1, of_generator):
            squares(critic(generator(run.batch())) - 1).backward()


@sound(LOCAL)
def groups_of_one_rank_train_alone(run: Run) -> None:
    groups: list[Any] = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = run.wrap(Net(), process_group=groups[run.rank])
    optimizer = run.optimizer_of(model.parameters())
    run.train(model, optimizer)
    run.train(model.module, optimizer)


@sound()
def a_sharded_model_trains_beside_the_guarded_one(run: Run) -> None:
    sharded: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for _ in run.steps(5, run.optimizer, run.optimizer_of(sharded.parameters())):
        run.backward(lambda x: sharded(run.model(x)))


# ---------------------------------------------------------------- parameters that are no business of the wrapper's


@sound(LOCAL)
def ignored_parameters_stay_local(run: Run) -> None:
    module = Net()
    TorchDDP._set_params_and_buffers_to_ignore_for_model(module, ["second.weight", "second.bias"])
    run.train_module(module)


@sound(LOCAL)
def nothing_is_averaged_by_a_noop_hook(run: Run) -> None:
    module = Net()
    model: Any = (ddp_core.DistributedDataParallel if "ddp_core" in run.wrapper else TorchDDP)(module)
    model.register_comm_hook(None, commhooks.noop_hook)
    run.trained.append(module)
    run.train(model, run.optimizer_of(module.parameters()))


@sound(LOCAL)
def diloco_trains_beside_the_guarded_model(run: Run) -> None:
    module = Net()
    optimizer = run.optimizer_of(module.parameters())
    rounds: Any = commhooks.DiLoCo(module, optimizer, every=3)
    run.trained.append(module)
    for _ in range(4):
        run.train(steps=1)
        run.train(module, optimizer, steps=1)
        rounds.step()


# ---------------------------------------------------------------- local steps on purpose


@sound(WARNS)  # once: it can say that it means it
def local_steps_are_taken_inside_no_sync_and_parameters_averaged(run: Run) -> None:
    for _ in range(2):
        with run.model.no_sync():
            run.train(steps=2)
        average(parameter.data for parameter in run.model.parameters())


# ---------------------------------------------------------------- compiled, checkpointed, saved, wrapped again


@sound()
def the_whole_step_is_compiled(run: Run) -> None:
    model, optimizer = run.model, run.optimizer

    def whole(batch: Tensor) -> None:
        optimizer.zero_grad()
        squares(model(batch)).backward()
        optimizer.step()

    compiled = torch.compile(whole, backend="eager")
    for _ in range(4):
        compiled(run.batch())


class Checkpointed(Net):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor, *, without_head: bool = False) -> Tensor:
        output: Tensor = self.head(checkpoint(self.encode, x.requires_grad_(), use_reentrant=self.reentrant))
        return output


sound.calls(
    activations_are_checkpointed=lambda run: run.train_module(Checkpointed(reentrant=False)),
    activations_are_checkpointed_in_nested_backward_passes=lambda run: run.train_module(Checkpointed(reentrant=True)),
)


@sound()
def a_model_is_wrapped_again_while_its_old_wrapper_lives(run: Run) -> None:
    run.train(steps=2)
    again = run.wrap(run.model.module)
    run.train(again, steps=3)
    run.train(steps=2)


# ---------------------------------------------------------------- other optimizers, joined ranks


@sound()
def a_zero_redundancy_optimizer_steps(run: Run) -> None:
    optimizer: Any = ZeroRedundancyOptimizer(run.model.parameters(), torch.optim.AdamW, lr=0.01)
    run.train(optimizer=optimizer)


@sound(but={TORCH_ATTACH: OTHER_ERROR, TORCH_HOOK: OTHER_ERROR})  # nor does it work there without a guard
def pytorchs_optimizer_steps_in_the_backward_pass(run: Run) -> None:
    module = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    model = run.wrap(module)
    for _ in range(4):
        run.backward(model)


@sound()
def ranks_have_uneven_inputs_and_join(run: Run) -> None:
    with Join([run.model]):
        run.train(steps=3 + 2 * run.rank)
