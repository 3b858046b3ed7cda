"""Private facts of PyTorch's FSDP2: the modules that communicate, their parameters and process groups.

FSDP2 lets others run its collectives (`set_custom_reduce_scatter`, `set_custom_all_gather`, `set_all_reduce_hook`), but
does not describe their content. Its private attributes do: `PRIVATE_NAMES` lists them, this file alone looks them up,
and never asks for a version. If a version of PyTorch lacks one of them, an error names it.

FSDP2 runs a reduce-scatter for each module that has parameters of its own, in every backward pass that synchronises.
If `shard_placement_fn` placed them on several meshes, it runs one for each group of them. The input is a matrix with
one row for each rank: the rank's shard of every parameter in turn, padded with zeros to the same size on every rank.
A shard is a range of the first dimension or, with `Shard(1)`, of the second, which the ranks then divide evenly. An
all-gather's output is the same matrix, of parameters.

The dtype of the reduction is `MixedPrecisionPolicy`'s `reduce_dtype`. If that is None, PyTorch 2.13 and 2.14 reduce in
`param_dtype`. From 2.15 on the parameters' `grad_dtype` decides, which is their own dtype unless it was set: a module
reduces in the dtype that all of them promote to, sends parameters of one `grad_dtype` together, and gives each `.grad`
its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Linear, Module
from torch.utils.hooks import RemovableHandle

from commhooks.errors import AttachError, SettingsError
from commhooks.tensors import local
from commhooks.units import counted
from commhooks.unwrapping import difference_of, is_ddp, plain_name, unwrapped

PRIVATE_NAMES = (
    "torch:Tensor._backward_hooks",
    "torch:Tensor._post_accumulate_grad_hooks",
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp:FSDPModule.set_reduce_scatter_unused_params",
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._fsdp_param_groups",
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._state_ctx",
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPStateContext.post_backward_final_callback_queued",
    "torch.distributed.fsdp._fully_shard._fsdp_common:FSDPMeshInfo.shard_process_group",
    "torch.distributed.fsdp._fully_shard._fsdp_common:DDPMeshInfo.replicate_process_group",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._all_gather_comm",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._all_reduce_hook",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._is_hsdp",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._partial_reduce_output",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._reduce_scatter_comm",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.all_reduce_grads",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.device",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.fsdp_params",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.gradient_divide_factor",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.mesh_info",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_backward",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.reduce_grads",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.reduce_scatter_unused_params",
    # How a gradient's dtype and place in a row are chosen: up to 2.14 by the policy and the parameters' order alone.
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._reduce_scatter_param_indices | "
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._orig_dtype",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.sharded_grad_dtype | "
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._orig_dtype",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._has_sharded_grad_dtype_override | "
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._orig_dtype",
    "torch:Tensor._has_grad_dtype_override | "
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._orig_dtype",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._module_info",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._orig_size",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._unsharded_param",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.fsdp_placement",
    "torch.distributed.device_mesh:DeviceMesh._get_root_mesh",
    "torch.utils:_pytree",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.mp_policy",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.padded_sharded_param_size",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.reduce_dtype",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.sharded_param",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.unsharded_accumulated_grad",
    "torch.distributed.fsdp._fully_shard._fsdp_param:ParamModuleInfo.module",
    "torch.distributed.fsdp._fully_shard._fsdp_param:ParamModuleInfo.param_name",
)
"""The names that FSDP2 does not document and this file needs: "module:attribute.path", alternatives joined by " | "."""

_sending_unused: weakref.WeakKeyDictionary[Any, tuple[int, bool]] = weakref.WeakKeyDictionary()
"""For each parameter group of FSDP2, the number of attachments that need zeros sent, and whether they were sent
before."""


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A parameter that is sharded over the ranks."""

    name: str
    """Its name in the model."""
    shard: torch.nn.Parameter
    """This rank's shard: a DTensor, which the optimizer trains."""
    shape: torch.Size
    """The shape of the whole parameter."""
    device: torch.device
    """The device on which gradients are reduced. The shard's differs if it is offloaded, or has no memory yet
    (meta)."""
    reduced_in: torch.dtype
    """The dtype in which the module's gradients are reduced."""
    grad_dtype: torch.dtype
    """The dtype of the shard's `.grad`."""
    gathered_in: torch.dtype
    """The dtype in which it is gathered."""
    is_packed: bool
    """True if it holds codes of a layer's weights, whatever its dtype says: a Linear's weight in another shape."""
    chunk: int
    """The number of its elements in a row of the reduce-scatter's input, padding included; the same for every rank."""
    dimension: int
    """The dimension along which it is cut."""

    def like(self) -> Tensor:
        """Return a tensor of the whole parameter's shape and dtype, without memory."""
        return without_memory(self.shape, self.shard.dtype, self.device)

    @property
    def own_shape(self) -> torch.Size:
        """The shape of this rank's shard, which may be empty."""
        return local(self.shard).shape


def without_memory(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of this shape, dtype and device, without memory."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def has_hooks(shard: Tensor) -> bool:
    """Return whether a parameter has hooks that run as soon as its gradient is accumulated."""
    return bool(getattr(shard, "_post_accumulate_grad_hooks", None))


class Unit:
    """Parameters of a module that FSDP2 gathers and reduces together: all, or those on one of several meshes."""

    def __init__(self, caller: str, name: str, module: FSDPModule, names: Mapping[Module, str], number: int) -> None:
        groups = len(_held(module._get_fsdp_state(), "_fsdp_param_groups"))
        self._caller = caller
        self.of_module: str = name or "the model"
        """The module's name in the model."""
        self.name: str = f"{self.of_module} (group {number} of {groups})" if groups > 1 else self.of_module
        """The module's name, with the number of the group of parameters if there are several."""
        self._number, self._is_only = number, groups == 1
        self._module = weakref.ref(module)  # who holds a unit must not keep the model alive
        self._prefixes = {id(one): f"{prefix}." if prefix else "" for one, prefix in names.items()}
        self._frozen: weakref.WeakSet[Any] = weakref.WeakSet()
        """FSDP2's objects of the parameters whose shards were frozen at the last look."""

    @property
    def module(self) -> FSDPModule:
        """The module; raises `AttachError` if it is gone."""
        module = self._module()
        if module is None:
            raise AttachError(f"{self.name}: the model that was attached is gone.")
        return module

    @property
    def is_there(self) -> bool:
        """True while the module exists."""
        return self._module() is not None

    @property
    def _group(self) -> Any:
        return _held(self.module._get_fsdp_state(), "_fsdp_param_groups")[self._number]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group of the ranks that have the shards."""
        group: dist.ProcessGroup = _held(_held(self._group, "mesh_info"), "shard_process_group")
        return group

    @property
    def is_inner(self) -> bool:
        """True if the mesh of the shards is a dimension of a larger one."""
        mesh = _held(_held(self._group, "mesh_info"), "mesh")
        return bool(_held(mesh, "_get_root_mesh")().size() > mesh.size())

    @property
    def shard(self) -> tuple[int, int]:
        """The number of this rank's shards, from 0 on, and the number of ranks that have shards."""
        return self.process_group.rank(), self.process_group.size()

    @property
    def is_replicated(self) -> bool:
        """True if FSDP2 itself averages over replicas: shards (HSDP), or whole gradients (`replicate`)."""
        return bool(_held(self._group, "_is_hsdp")) or hasattr(
            _held(self._group, "mesh_info"), "replicate_process_group"
        )

    @property
    def dimensions(self) -> tuple[str, str]:
        """The names of a mesh's dimensions for replicas and for shards: HSDP's own, or PyTorch's usual ones."""
        mesh = _held(_held(self._group, "mesh_info"), "mesh")
        replicas, shards = mesh.mesh_dim_names if mesh.ndim == 2 and mesh.mesh_dim_names else ("replicate", "shard")
        return replicas, shards

    @property
    def divide_factor(self) -> float | None:
        """The divisor of sums; None: the number of ranks."""
        factor: float | None = _held(self._group, "gradient_divide_factor")
        return factor

    def parameters(self, *, frozen: bool = False) -> list[ShardedParameter]:
        """Return the parameters that are trained, in the order in which they are reduced, or all, in that of a gather.

        Raises:
            SettingsError: Nothing tells the dtype of a parameter's gradient beforehand.

        """
        found, held = [], _held(self._group, "fsdp_params")
        order = range(len(held)) if frozen else self.trained()
        reduced_in = self._reduced_in()
        for one in (held[index] for index in order):
            name, shard = self._name_of(one), _held(one, "sharded_param")
            if shard.requires_grad and reduced_in is None:
                raise SettingsError(
                    f"{self._caller}: {name!r} is reduced with a parameter whose grad_dtype is None, so nothing tells "
                    "the dtype of the reduction before a gradient is there: set "
                    "MixedPrecisionPolicy(reduce_dtype=...), or a grad_dtype."
                )
            reduces = reduced_in or shard.dtype  # the latter only if the parameter is frozen
            shape, chunk = _held(one, "_orig_size"), _held(one, "padded_sharded_param_size").numel()
            where = _held(one, "_module_info")
            owner = _held(where, "module")
            is_packed = isinstance(owner, Linear) and _held(where, "param_name") == "weight"
            # A shard of tensor parallelism has one of the two.
            is_packed = is_packed and shape[0] != owner.out_features and shape[-1] != owner.in_features
            found.append(
                ShardedParameter(
                    name=name,
                    shard=shard,
                    shape=shape,
                    device=_held(self._group, "device"),
                    reduced_in=reduces,
                    grad_dtype=_grad_dtype(one) or reduces,
                    gathered_in=_gathered_in(one),
                    is_packed=is_packed,
                    chunk=chunk,
                    dimension=_held(one, "fsdp_placement").dim,
                )
            )
        return found

    def _name_of(self, parameter: Any) -> str:
        """Return the name in the model of one of FSDP2's parameters; raise `AttachError` if it is not in the model."""
        where = _held(parameter, "_module_info")
        owner = _held(where, "module")
        if id(owner) not in self._prefixes:
            raise AttachError(
                f"{self._caller}: {self.name} is sharded together with a {type(owner).__name__} that is not in the "
                "model given; pass a module that contains both."
            )
        return self._prefixes[id(owner)] + str(_held(where, "param_name"))

    def check_dtypes(self) -> None:
        """Raise `SettingsError` for trained parameters of two dtypes; FSDP2 fails only in the first forward pass."""
        held = _held(self._group, "fsdp_params")
        of_dtype = {_held(held[one], "sharded_param").dtype: self._name_of(held[one]) for one in self.trained()}
        if len(of_dtype) > 1:
            (dtype, name), (other, others) = list(of_dtype.items())[:2]
            raise SettingsError(
                f"{self._caller}: {self.name} trains {name!r} in {dtype} and {others!r} in {other}; FSDP2 reduces only "
                "parameters of one dtype together. Call fully_shard on the module of either first, so that it is "
                "reduced by itself; or keep all in fp32, and compute in bf16 with "
                "MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
            )

    def _reduced_in(self) -> torch.dtype | None:
        """Return the dtype of the reduction, if zeros are sent for unused parameters; None if gradients decide it."""
        held = _held(self._group, "fsdp_params")
        policy = _held(held[0], "mp_policy")
        chosen: torch.dtype | None = policy.reduce_dtype
        if not _follows_grad_dtype(held[0]):
            chosen = chosen or policy.param_dtype
        dtypes = {chosen} if chosen else {_grad_dtype(held[index]) for index in self.trained()}
        known = dtypes - {None}
        return functools.reduce(torch.promote_types, known) if known and known == dtypes else None  # type: ignore[arg-type]

    def shards(self, numbers: Iterable[int] | None = None) -> list[torch.nn.Parameter]:
        """Return this rank's shards of the parameters with these numbers; by default of the trained ones, in order."""
        held = _held(self._group, "fsdp_params")
        return [_held(held[index], "sharded_param") for index in (self.trained() if numbers is None else numbers)]

    def forms(self) -> Iterator[tuple[object, Tensor]]:
        """Yield what takes a parameter's place in the module, its shard or all of it, with FSDP2's object for it."""
        for one in _held(self._group, "fsdp_params"):
            yield one, _held(one, "sharded_param")
            if (whole := getattr(one, "_unsharded_param", None)) is not None:  # made when it is first gathered
                yield one, whole

    def trained(self) -> list[int]:
        """Return the numbers of the trained parameters among all, in the order in which they are reduced."""
        held = _held(self._group, "fsdp_params")
        order = getattr(self._group, "_reduce_scatter_param_indices", None)
        if not order:  # PyTorch 2.15 decides it in the first forward pass; before, all that are trained have one dtype
            of_dtype: dict[torch.dtype | None, list[int]] = {}
            for index, one in enumerate(held):
                of_dtype.setdefault(_grad_dtype(one), []).append(index)
            order = itertools.chain.from_iterable(of_dtype.values())
        return [index for index in order if _held(held[index], "sharded_param").requires_grad]

    def keep_unfrozen(self) -> None:
        """Unfreeze shards whose gathered parameter was unfrozen, which FSDP2 forgets when it reshards.

        A root stays gathered after a pass without gradients. Libraries of adapters freeze parameters before such a pass
        and unfreeze them after it; their shards were frozen at the last call. A shard that was frozen since then was
        frozen by the user, and stays so.
        """
        for one in _held(self._group, "fsdp_params"):
            where, shard = _held(one, "_module_info"), _held(one, "sharded_param")
            whole = getattr(one, "_unsharded_param", None)
            is_gathered = whole is _held(where, "module")._parameters.get(_held(where, "param_name"))
            if whole is not None and is_gathered and whole.requires_grad and one in self._frozen:
                shard.requires_grad_(True)
            (self._frozen.discard if shard.requires_grad else self._frozen.add)(one)

    def names(self) -> set[str]:
        """Return the names of its parameters in the model."""
        return {self._name_of(one) for one in _held(self._group, "fsdp_params")}

    def fingerprint(self, *, frozen: bool = False) -> str:
        """Return the text that must be the same on every rank, about the trained parameters or, with `frozen`, all."""
        found = self.parameters(frozen=frozen)
        cuts = [f", Shard({one.dimension})" * (one.dimension > 0) for one in found]
        return "\n".join(
            f"parameter {p.name}: shape {tuple(p.shape)}, {p.shard.dtype}{cut}"
            for p, cut in zip(found, cuts, strict=True)
        )

    def gradient_bytes(self) -> int:
        """Return the size of the trained parameters' whole gradients, in the dtype of the reduction."""
        held, dtype = _held(self._group, "fsdp_params"), self._reduced_in()
        trained = [held[index] for index in self.trained()]
        return sum(
            _held(one, "_orig_size").numel() * (dtype or _held(one, "sharded_param").dtype).itemsize for one in trained
        )

    def reduce_scatter(self) -> Any:
        """Return the object that runs the reduce-scatter."""
        return _held(self._group, "_reduce_scatter_comm")

    def set_reduce_scatter(self, communication: Any) -> None:
        """Set the object that runs the reduce-scatter; the module's method refuses if it has several groups."""
        if self._is_only:
            self.module.set_custom_reduce_scatter(communication)
        else:
            self._group._reduce_scatter_comm = communication

    def all_gather(self) -> Any:
        """Return the object that runs the all-gather."""
        return _held(self._group, "_all_gather_comm")

    def set_all_gather(self, communication: Any) -> None:
        """Set the object that runs the all-gather, as above."""
        if self._is_only:
            self.module.set_custom_all_gather(communication)
        else:
            self._group._all_gather_comm = communication

    def all_reduce_hook(self) -> Any:
        """Return the hook that runs after the reduce-scatter; None if there is none."""
        return _held(self._group, "_all_reduce_hook")

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None] | None) -> None:
        """Set the hook to run after the reduce-scatter; None removes it."""
        self.module.set_all_reduce_hook(hook)  # type: ignore[arg-type]  # PyTorch's default is None

    @property
    def wants_replicas(self) -> bool:
        """False after `set_requires_all_reduce(False)`: gradients are then not averaged over replicas."""
        return bool(_held(self._group, "all_reduce_grads"))

    def note_kept(self, kept: Tensor | None) -> None:
        """Leave what is kept aside where HSDP keeps its own, which `reset_iter_state` drops; None: nothing is kept."""
        _held(self._group, "_partial_reduce_output")
        self._group._partial_reduce_output = kept

    @property
    def was_reset(self) -> bool:
        """True if what `note_kept` left is no longer there."""
        return _held(self._group, "_partial_reduce_output") is None

    @property
    def is_in_backward_pass(self) -> bool:
        """True while FSDP2 has work left to do at the end of the current backward pass."""
        context = _held(self.module._get_fsdp_state(), "_state_ctx")
        return bool(_held(context, "post_backward_final_callback_queued"))

    def send_unused(self) -> None:
        """Send zeros for parameters without a gradient, until `end_sending_unused` has been called equally often."""
        times, before = _sending_unused.get(self._group, (0, _held(self._group, "reduce_scatter_unused_params")))
        _sending_unused[self._group] = times + 1, before
        self._group.reduce_scatter_unused_params = True  # not for the module's other groups
        if not _follows_grad_dtype(_held(self._group, "fsdp_params")[0]):
            self._group.post_backward = functools.partial(_reduce_in_one_dtype, weakref.ref(self._group))

    def end_sending_unused(self) -> None:
        """Undo one `send_unused`; the last one restores the setting from before the first."""
        times, before = _sending_unused.pop(self._group)
        if times > 1:
            _sending_unused[self._group] = times - 1, before
        else:
            self._group.reduce_scatter_unused_params = before
            vars(self._group).pop("post_backward", None)


def units_of(caller: str, model: Module) -> list[Unit]:
    """Return the FSDP modules of a model, by groups of parameters, in the order of `model.named_modules()`.

    Modules sharded together, with `fully_shard([one, other])`, count as one, under the first one's name. Names leave
    out `torch.compile` and activation checkpointing, so that a checkpoint loads with and without them.

    Raises:
        AttachError: There are none, all parameters are frozen, `model` is no module, or a backward pass is under way.

    """
    _held(FSDPModule, "set_reduce_scatter_unused_params")  # the newest of its methods that is called here
    if torch._C._current_graph_task_id() != -1:
        raise AttachError(f"{caller}: a backward pass is under way; call it between two passes.")
    if not isinstance(model, Module):
        raise AttachError(f"{caller}: model must be a torch.nn.Module (got {type(model).__name__}).")
    named = [(plain_name(name), module) for name, module in unwrapped(model).named_modules()]
    names = {module: name for name, module in named}
    by_state: dict[Any, tuple[str, FSDPModule]] = {}
    for name, module in named:
        if isinstance(module, FSDPModule):
            by_state.setdefault(module._get_fsdp_state(), (name, module))
    sharded = [one for state, one in by_state.items() if _held(state, "_fsdp_param_groups")]
    if not sharded:
        first = "call torch.distributed.fsdp.fully_shard on it and its layers first"
        advice = "every rank has all of them, so use commhooks.attach" if is_ddp(unwrapped(model)) else first
        raise AttachError(f"{caller}: {type(model).__name__} has no parameters that FSDP2 shards; {advice}.")
    found = [
        Unit(caller, name, module, names, number)
        for name, module in sharded
        for number in range(len(_held(module._get_fsdp_state(), "_fsdp_param_groups")))
    ]
    if not any(unit.trained() for unit in found):
        raise AttachError(f"{caller}: all parameters are frozen.")
    for unit in found:
        unit.check_dtypes()
    return found


def check_nothing_is_left(caller: str, model: Module, units: Sequence[Unit], group: dist.ProcessGroup) -> None:
    """Raise `AttachError` if a trained parameter is in no module that `fully_shard` was called with; warn on rank 0.

    It warns of those that something else may average: `fully_shard` was told to ignore them (`ignored_params`), or they
    have a hook of their own or a mesh of their own (DTensor). A DistributedDataParallel within the model averages its
    parameters. Nothing is checked in a group of one rank.
    """
    if group.size() == 1:
        return
    inner = unwrapped(model)
    given = {id(form) for unit in units for _, form in unit.forms()}
    given |= {id(one) for module in inner.modules() if is_ddp(module) for one in module.parameters()}
    left = [(plain_name(name), one) for name, one in inner.named_parameters() if one.requires_grad]
    left = [(name, one) for name, one in left if id(one) not in given]
    ignored = {id(one) for module in inner.modules() if isinstance(module, FSDPModule) for one in module.parameters()}
    for name, one in left:
        if id(one) not in ignored and not isinstance(one, DTensor) and not has_hooks(one) and not one._backward_hooks:
            raise AttachError(
                f"{caller}: {name!r} requires a gradient, but is in no module that fully_shard was called with, so "
                "each rank would train it alone. Call fully_shard on the model too, after its layers; or freeze it; "
                "or, if something else averages its gradient, pass it to fully_shard(model, ignored_params={...})."
            )
    if left and group.rank() == 0:
        more = f" and {counted(len(left) - 1, 'other parameter')}" if len(left) > 1 else ""
        warnings.warn(
            f"commhooks, {caller}: FSDP2 does not average the gradient of {left[0][0]!r}{more}: each rank trains "
            f"{'them' if more else 'it'} alone, unless something else averages {'their gradients' if more else 'it'}.",
            stacklevel=3,
        )


class TrainedParameters:
    """The parameters that were trained on attaching, besides which a forward pass must find no others.

    `fail` is called, and must raise, if it does: nobody would average their gradients as the attachment promises.
    """

    def __init__(
        self,
        caller: str,
        model: Module,
        units: Sequence[Unit],
        fail: Callable[[str], Any],
        left: Sequence[Unit] = (),
    ) -> None:
        """Follow all units of a model; those that were left to FSDP2 may be frozen and unfrozen."""
        self._caller, self._units, self._fail = caller, units, fail
        self._left = {name for unit in left for name in unit.names()}
        self._before = self._holders(model)
        self._trained = self._holders(model, trained=True).keys()

    def follow(self, model: Module) -> RemovableHandle:
        """Check before each forward pass, and before FSDP2's own hooks, which overwrite what replaced a shard."""
        return model.register_forward_pre_hook(self._check, prepend=True)

    @_disable_dynamo  # a compiled training step would trace the engine
    def _check(self, model: Module, _inputs: object) -> None:
        for unit in self._units:
            unit.keep_unfrozen()
        now = self._holders(model, trained=True)
        before = {name: self._before[name] for name in now if name in self._before}
        if unfrozen := sorted(before.keys() - self._trained - self._left):
            self._fail(f"{unfrozen[0]!r} now requires a gradient: {changed_since(self._caller)}")
        if change := difference_of(before, now):
            self._fail(
                f"{change}, which FSDP2 does not shard, so that each rank would train it alone: call fully_shard and "
                f"{self._caller} after adding or replacing parameters"
            )

    def _holders(self, model: Module, *, trained: bool = False) -> dict[str, object]:
        """Return, by name, weak references to what keeps each parameter: FSDP2, for shards, or the module itself."""
        kept = {id(form): holder for unit in self._units for holder, form in unit.forms()}
        return {
            plain_name(name): weakref.ref(kept.get(id(parameter), parameter))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad or not trained
        }


def changed_since(caller: str) -> str:
    """Return why an attachment ends if other parameters are trained than on attaching, and what to do."""
    return (
        f"parameters were frozen or unfrozen since {caller}, or grad_dtype was set; close, and attach again (adapters "
        "that are trained in turn must all stay unfrozen)"
    )


def group_of(model: object) -> dist.ProcessGroup | None:
    """Return the largest group of ranks over which FSDP modules are sharded, of equals the first; None without one.

    Modules over whose replicas FSDP2 averages count only if there are no others.
    """
    modules = model.modules() if isinstance(model, Module) else ()
    sharded = (module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule))
    held = [_held(group, "mesh_info") for state in sharded for group in _held(state, "_fsdp_param_groups")]
    of_replicas = [hasattr(mesh, "replicate_process_group") for mesh in held]
    groups = [
        getattr(mesh, "shard_process_group", None)
        for mesh, has_replicas in zip(held, of_replicas, strict=True)
        if all(of_replicas) or not has_replicas
    ]
    return max((group for group in groups if group is not None), key=lambda group: group.size(), default=None)


def is_default(communication: object) -> bool:
    """Return whether the object that runs a collective is PyTorch's own."""
    return type(communication).__module__.startswith("torch.")


def _reduce_in_one_dtype(of_group: weakref.ref[Any], *unused: Any) -> None:
    """Run a parameter group's `post_backward`; if gradients have accumulated, let every other start from zeros.

    Up to PyTorch 2.14 a gradient that accumulates without being reduced is kept in `reduce_dtype`, while zeros for a
    parameter without one, and the gradient of one that only the last pass uses, have the dtype of the computation.
    FSDP2 then fails: "expects uniform gradient dtype".
    """
    group = of_group()
    trained = [one for one in _held(group, "fsdp_params") if _held(one, "sharded_param").requires_grad]
    kept = [one for one in trained if _held(one, "unsharded_accumulated_grad") is not None]
    if kept and _held(group, "reduce_grads"):
        for one in trained:
            if one.unsharded_accumulated_grad is None:
                whole, dtype = _held(one, "_unsharded_param"), _held(one, "reduce_dtype")
                one.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=dtype)
    _held(type(group), "post_backward")(group, *unused)


def _gathered_in(parameter: Any) -> torch.dtype:
    """Return the dtype in which one of FSDP2's parameters is gathered; a policy is for floating-point ones."""
    own: torch.dtype = _held(parameter, "sharded_param").dtype
    return (_held(parameter, "mp_policy").param_dtype or own) if own.is_floating_point else own


def _follows_grad_dtype(parameter: Any) -> bool:
    """Return whether gradients are reduced and kept in their parameters' `grad_dtype`, as from PyTorch 2.15 on."""
    return hasattr(parameter, "sharded_grad_dtype")


def _grad_dtype(parameter: Any) -> torch.dtype | None:
    """Return the dtype of the gradient of one of FSDP2's parameters; None: whichever it was reduced in."""
    shard = _held(parameter, "sharded_param")
    dtype: torch.dtype | None = shard.dtype
    if _follows_grad_dtype(parameter) and _held(shard, "_has_grad_dtype_override"):
        dtype = shard.grad_dtype  # FSDP2 notices it in the first forward pass
    elif _follows_grad_dtype(parameter) and _held(parameter, "_has_sharded_grad_dtype_override"):
        dtype = _held(parameter, "sharded_grad_dtype")
    return dtype


def _held(owner: Any, name: str) -> Any:
    """Return an attribute of FSDP2; raise `AttachError` if this version of PyTorch does not have it."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise AttachError(
            f"commhooks: FSDP2 with others' collectives needs PyTorch 2.13 or newer, and was tried up to 2.15; this is "
            f"{torch.__version__}, whose {getattr(owner, '__name__', type(owner).__name__)} has no {name!r}."
        ) from None
