"""The private names of PyTorch that this package uses, for whoever tries another version.

Each is "module:attribute.path", with alternatives joined by " | "; the code looks for them in this order.
"""

PRIVATE_NAMES = (
    "torch:_foreach_copy_",
    "torch._C:Future",
    "torch._C:_DisableFuncTorch",
    "torch._C:_current_graph_task_id",
    "torch._C:_distributed_autograd._current_context",
    "torch._C:_distributed_rpc._is_current_rpc_agent_set",
    "torch._C._distributed_c10d:AllgatherOptions",
    "torch._C._distributed_c10d:GradBucket",
    "torch._C._distributed_c10d:PrefixStore",
    "torch._C._distributed_c10d:ProcessGroup._get_backend",
    "torch._C._distributed_c10d:ProcessGroup.get_group_store | torch.distributed.distributed_c10d:_world.pg_map",
    "torch._C._distributed_c10d:ProcessGroupGloo.options | torch._C._distributed_c10d:Backend.options",
    "torch._C._distributed_c10d:ProcessGroupGloo._Options._devices",
    "torch._C._distributed_c10d:ProcessGroupGloo._Options._threads",
    "torch._C._distributed_c10d:ProcessGroupGloo._Options._timeout",
    "torch._C._dynamo.eval_frame:set_code_exec_strategy | torch._compile:_disable_dynamo",
    "torch._C._dynamo.eval_frame:_FrameAction | torch._compile:_disable_dynamo",
    "torch._C._dynamo.eval_frame:_FrameExecStrategy | torch._compile:_disable_dynamo",
    "torch._compile:_disable_dynamo",
    "torch._dynamo.eval_frame:DisableContext._torchdynamo_disable",
    "torch._utils:_flatten_dense_tensors",
    "torch._utils:_unflatten_dense_tensors",
    "torch.autograd:Variable._execution_engine.queue_callback",
    "torch.distributed.algorithms.join:Joinable._join_config",
    "torch.distributed.distributed_c10d:_world.pg_map",
    "torch.distributed.optim.apply_optimizer_in_backward:_apply_optimizer_in_backward._in_backward_optimizers",
    "torch.nn.parallel:DistributedDataParallel._ddp_ignored",
    "torch.nn.parallel:DistributedDataParallel._ddp_params_and_buffers_to_ignore",
    "torch.utils._pytree:tree_flatten",
    "torch.utils._pytree:tree_unflatten",
)
