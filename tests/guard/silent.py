"""Programs whose replicas drift apart without a word where there is no guard."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from tests.guard.situations import (
    MISSED,
    OTHER_ERROR,
    RAISES,
    RIGHT,
    TORCH_ATTACH,
    TORCH_HOOK,
    WARNS,
    Net,
    Run,
    Situations,
    put,
    squares,
)

silent = Situations(RAISES)

# ---------------------------------------------------------------- the module inside the wrapper is called


silent.calls(
    the_inner_module_is_called=lambda run: run.train(run.model.module),
    a_method_of_the_inner_module_is_called=lambda run: run.train(run.model.module.encode),
    the_inner_module_is_called_for_an_optimizer_of_its_head=lambda run: run.train(
        run.model.module, run.optimizer_of(run.model.module.head.parameters())
    ),
)


@silent()
def the_inner_module_of_a_static_graph_is_called(run: Run) -> None:
    run.model = run.wrap(Net(), static_graph=True)
    run.train(run.model.module, steps=1)


@silent()
def the_inner_module_is_called_beside_a_model_of_one_rank(run: Run) -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    alone = TorchDDP(nn.Linear(4, 2), process_group=groups[run.rank])
    optimizer = run.optimizer_of([*run.model.parameters(), *alone.parameters()])
    run.train(lambda x: alone(run.model.module(x)), optimizer)


@silent()
def the_inner_module_is_called_with_its_activations_checkpointed(run: Run) -> None:
    for _ in run.steps():
        run.backward(lambda x: checkpoint(run.model.module, x, use_reentrant=False))


@silent()
def the_inner_module_is_called_and_a_scaler_steps(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        run.optimizer.zero_grad()
        scaler.scale(run.loss(run.model if step == 0 else run.model.module)).backward()
        scaler.step(run.optimizer)
        scaler.update()


@silent(RIGHT)
def a_method_of_the_inner_module_is_called_in_the_same_pass(run: Run) -> None:
    for _ in run.steps():
        (run.loss(run.model) + run.loss(run.model.module.encode)).backward()


@silent()
def a_zero_redundancy_optimizer_steps_after_the_inner_module_was_called(run: Run) -> None:
    optimizer: Any = ZeroRedundancyOptimizer(run.model.parameters(), torch.optim.SGD, lr=0.1)
    run.train(run.model.module, optimizer)


@silent(MISSED)  # a guard ends with its wrapper
def the_inner_module_is_kept_and_the_wrapper_forgotten(run: Run) -> None:
    module = run.wrap(Net()).module
    run.train(module, run.optimizer_of(module.parameters()))


# ---------------------------------------------------------------- another model than the wrapped one


@silent(WARNS)
def one_of_two_models_is_not_wrapped_and_shares_the_optimizer(run: Run) -> None:
    other = nn.Linear(4, 2)
    run.trained.append(other)
    for _ in run.steps(5, run.optimizer_of([*run.model.parameters(), *other.parameters()])):
        run.backward(lambda x: other(run.model(x)))


@silent(WARNS)
def a_copy_of_the_wrapped_module_is_trained(run: Run) -> None:
    trained = copy.deepcopy(run.model.module)
    run.trained.append(trained)
    for _ in run.steps(5, run.optimizer_of(trained.parameters())):
        run.backward(trained)
        dist.barrier()  # as the mean of a loss does that is logged: ranks are compared only if they keep pace


# ---------------------------------------------------------------- optimizers that step in the backward pass


def step_in_hooks(run: Run, module: nn.Module) -> None:
    """Let an optimizer of its own step for each parameter as soon as its gradient has arrived."""
    optimizers = {parameter: run.optimizer_of([parameter]) for parameter in module.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]  # the same parameter, which autograd calls a tensor
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)


@silent()
def optimizers_step_in_hooks_registered_before_wrapping(run: Run) -> None:
    module = Net()
    step_in_hooks(run, module)
    model = run.wrap(module)
    for _ in range(4):
        run.backward(model)


@silent()
def optimizers_step_in_hooks_and_the_inner_module_is_called(run: Run) -> None:
    step_in_hooks(run, run.model.module)
    for _ in range(4):
        run.backward(run.model.module)


@silent(but={TORCH_ATTACH: OTHER_ERROR})  # attach refuses it
def pytorchs_optimizer_in_backward_steps_after_the_inner_module_was_called(run: Run) -> None:
    module = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    model = run.wrap(module)
    for _ in range(4):
        run.backward(model.module)


# ---------------------------------------------------------------- parameters that the reducer does not know


@silent()
def a_layer_is_replaced_after_wrapping_where_unused_parameters_are_searched_for(run: Run) -> None:
    model = run.wrap(Net(), find_unused_parameters=True)
    torch.manual_seed(1)
    model.module.head = nn.Linear(16, 4)
    run.train(model, run.optimizer_of(model.parameters()))


@silent()
def a_layer_is_added_after_wrapping(run: Run) -> None:
    run.train(steps=1)
    torch.manual_seed(1)
    extra = run.model.module.extra = nn.Linear(16, 16)
    run.optimizer.add_param_group({"params": list(extra.parameters())})
    run.train()


@silent()
def a_layer_frozen_when_it_was_wrapped_is_thawed(run: Run) -> None:
    module = Net()
    module.first.requires_grad_(False)
    run.model = run.wrap(module)
    run.train(steps=1)
    module.first.requires_grad_(True)
    run.train()


# ---------------------------------------------------------------- more passes than are averaged


def three_passes(run: Run) -> None:
    for _ in run.steps():
        for loss in [run.loss(run.model) for _ in range(3)]:
            loss.backward()


def two_backward_passes(run: Run) -> None:
    model = run.wrap(Net(), static_graph=True)
    for _ in run.steps(4, run.optimizer_of(model.parameters())):
        outputs = model(run.batch())
        squares(outputs).backward(retain_graph=True)
        outputs.abs().mean().backward()


silent.calls(
    three_forward_passes_are_followed_by_three_backward_passes=three_passes,
    a_forward_pass_of_a_static_graph_is_followed_by_two_backward_passes=two_backward_passes,
)


class Heads(nn.Module):
    """Two outputs, each with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


@silent(RIGHT, but={TORCH_ATTACH: OTHER_ERROR, TORCH_HOOK: OTHER_ERROR})
def an_output_of_a_static_graph_is_never_used(run: Run) -> None:
    model = run.wrap(Heads(), static_graph=True)
    for _ in run.steps(4, run.optimizer_of(model.parameters())):
        run.backward(lambda x: model(x)[0])


# ---------------------------------------------------------------- no_sync


@silent()
def all_passes_are_in_no_sync(run: Run) -> None:
    for _ in run.steps():
        run.backward_in_no_sync()


@silent()
def the_last_micro_batch_is_in_no_sync(run: Run) -> None:
    for _ in run.steps():
        run.backward(run.model)
        run.backward_in_no_sync()


@silent(WARNS)
def steps_are_taken_inside_no_sync(run: Run) -> None:
    with run.model.no_sync():
        run.train()


# ---------------------------------------------------------------- gradients that come another way


@silent(OTHER_ERROR)  # the reducer's own, which names the missing parameters
def a_reduction_does_not_finish(run: Run) -> None:
    model = run.wrap(Net(), bucket_cap_mb=1e-5)
    run.train(functools.partial(model, without_head=True), run.optimizer_of(model.parameters()))


@silent()
def gradients_come_from_autograd_grad(run: Run) -> None:
    parameters = list(run.model.parameters())
    for _ in run.steps():
        put(parameters, torch.autograd.grad(run.loss(run.model), parameters))


@silent(MISSED)
def updates_are_made_without_an_optimizer(run: Run) -> None:
    for _ in range(4):
        run.backward(run.model.module)
        for parameter in run.model.parameters():
            parameter.data.sub_(0.1 * parameter.grad)
        run.model.zero_grad()


@silent(MISSED)  # a reduction has ended since the last step, and the guard does not follow what p.grad is set to
def gradients_come_from_autograd_grad_after_a_pass_that_was_averaged(run: Run) -> None:
    parameters = list(run.model.parameters())
    for _ in run.steps():
        run.backward(run.model)
        put(parameters, torch.autograd.grad(run.loss(run.model.module), parameters))


@silent(MISSED)  # the gradients were averaged, and the guard does not follow what becomes of the mean
def noise_of_each_ranks_own_is_added_to_the_mean(run: Run) -> None:
    for _ in run.steps():
        run.backward(run.model)
        for parameter in run.model.parameters():
            parameter.grad.add_(0.01 * run.rank)
