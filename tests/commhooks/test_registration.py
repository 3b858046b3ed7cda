"""Hooks registered by name, late, and around third-party hooks. What each rank runs is in registration_in_worlds.py."""

from __future__ import annotations

import gc
import inspect
import math
from typing import Any

import pytest
import torch
from torch.distributed.algorithms import ddp_comm_hooks as pytorchs

import commhooks
from commhooks.hooks import default as default_hooks
from commhooks.hooks.by_name import DDPCommHookType, register_ddp_comm_hook
from tests.commhooks import registration_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])
WRAPPERS = [commhooks.fp16_compress_wrapper, commhooks.bf16_compress_wrapper]


# --- by name ----------------------------------------------------------------------------------------------------------


class Recorder(torch.nn.Module):
    """Take a hook as a DistributedDataParallel does, and keep it."""

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.state, self.hook = state, hook


SETTINGS_THAT_COUNT = [
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
]


def test_the_types_are_pytorchs() -> None:
    assert set(DDPCommHookType.__members__) == set(pytorchs.DDPCommHookType.__members__)


@pytest.mark.parametrize("name", DDPCommHookType.__members__)
def test_a_type_registers_our_hook_of_the_name_that_pytorchs_type_registers(name: str) -> None:
    ours, theirs = Recorder(), Recorder()
    register_ddp_comm_hook(DDPCommHookType[name], ours)
    pytorchs.register_ddp_comm_hook(pytorchs.DDPCommHookType[name], theirs)
    homes: Any = [default_hooks, inspect.getmodule(commhooks.powerSGD_hook)]
    assert ours.hook is next(getattr(m, theirs.hook.__name__) for m in homes if hasattr(m, theirs.hook.__name__))
    if "POWER_SGD" in name:
        for setting in SETTINGS_THAT_COUNT:
            assert getattr(ours.state, setting) == getattr(theirs.state, setting), setting
        assert ours.state.process_group is None
    else:
        assert ours.state is theirs.state is None


def test_a_type_can_be_called_as_pytorchs_can() -> None:
    model = Recorder()
    DDPCommHookType.ALLREDUCE.value(model=model, state=None)
    assert model.hook is commhooks.allreduce_hook


@pytest.mark.parametrize(
    ("kind_of_hook", "model", "state", "text"),
    [
        (
            "fp16",
            Recorder(),
            None,
            r"must be a member .*got 'fp16' of type builtins\.str.*ALLREDUCE, FP",
        ),
        (pytorchs.DDPCommHookType.NOOP, Recorder(), None, r"of type torch\.distributed\.algorithms\.ddp_comm_hooks\."),
        (DDPCommHookType.NOOP, torch.nn.Linear(1, 1), None, "model must be a Dist.* PyTorch's .got Linear.; wrap the"),
        (DDPCommHookType.POWER_SGD, Recorder(), "gloo", "state must be a process group, or None .* .got 'gloo'."),
    ],
    ids=["type", "PyTorch's type", "model", "state"],
)
def test_what_is_of_a_wrong_type_is_refused_in_words(kind_of_hook: Any, model: Any, state: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text) as refusal:
        register_ddp_comm_hook(kind_of_hook, model, state)
    assert isinstance(refusal.value, commhooks.CommHooksError)
    assert not hasattr(model, "hook")


@both_ddps
def test_every_type_averages_over_its_process_group(kind: str) -> None:
    for errors in run_ranks(on_every_rank.every_type, 2, kind):
        assert set(errors) == set(DDPCommHookType.__members__)
        for name in ("ALLREDUCE", "POWER_SGD", "POWER_SGD_RANK2", "BATCHED_POWER_SGD", "BATCHED_POWER_SGD_RANK2"):
            assert errors[name] == (0.0, 0.0)  # PowerSGD's first 1,000 steps are an all-reduce
        assert errors["NOOP"][0] > 10 and errors["NOOP"][1] == 0.0
        for place in (0, 1):  # elements below 64: halves of them are a cast away by 2**-7 (fp16) or 2**-4 (bf16)
            fp16, bf16 = errors["FP16_COMPRESS"][place], errors["BF16_COMPRESS"][place]
            assert 0 < fp16 <= 2**-5 < bf16 <= 2**-2


@both_ddps
def test_attaching_between_steps_or_after_the_forward_pass_gives_right_means_at_once(kind: str) -> None:
    assert run_ranks(on_every_rank.late, 2, kind, "all-reduce") == [[], []]


@both_ddps
def test_attaching_over_another_hook_or_inside_a_backward_pass_is_refused(kind: str) -> None:
    run_ranks(on_every_rank.refused, 2, kind)


@both_ddps
def test_complex_partly_ignored_and_static_models_of_two_dtypes_get_right_means(kind: str) -> None:
    for right in run_ranks(on_every_rank.unusual_models, 2, kind):
        assert len(right) == 5 and all(right.values()), right


@both_ddps
def test_detaching_after_an_error_ends_the_thread_and_leaves_the_users_error_alone(kind: str) -> None:
    broken, waiting = run_ranks(on_every_rank.a_detach_after_an_error, 2, kind, check_exit=False)
    assert "the user's own" in broken
    assert "Error" in waiting and waiting != "nothing"


def test_attaching_alone_names_the_rank_that_does_not_come() -> None:
    outside, absent = run_ranks(on_every_rank.attach_alone, 2, check_exit=False)[0]
    assert "expected a process group that this rank belongs to" in outside
    assert absent.startswith("CollectiveError: rank 0: ") and "Missing: rank 1." in absent


@both_ddps
@pytest.mark.parametrize("how", ["in turns", "at once"])
def test_one_state_for_two_models_is_refused(kind: str, how: str) -> None:
    for told in run_ranks(on_every_rank.one_state_for_two_models, 2, kind, how, check_exit=False):
        assert "make one state for each model" in told


@both_ddps
def test_hooks_without_a_state_tell_what_they_sent(kind: str) -> None:
    elements = sum(math.prod(shape) for shape in on_every_rank.SHAPES)
    for counted in run_ranks(on_every_rank.what_stateless_hooks_count, 2, kind):
        assert counted == {
            "AllReduceMean()": (4, 4 * 4 * elements),
            "Cast(dtype=torch.float16)": (2, 2 * 2 * elements),
        }


# --- wrappers around third-party hooks ------------------------------------------------------------------------------


@both_ddps
def test_a_wrapper_takes_every_kind_of_hook_and_result(kind: str) -> None:
    assert run_ranks(on_every_rank.foreign_hooks, 2, kind) == [[], []]


@both_ddps
def test_pytorchs_noop_in_a_wrapper_gives_the_gradient_back(kind: str) -> None:
    assert run_ranks(on_every_rank.noop_of_pytorchs, 2, kind) == [True, True]


@both_ddps
def test_pytorchs_powersgd_in_our_wrapper_is_bit_for_bit_what_it_is_in_theirs(kind: str) -> None:
    # PyTorch's hook leaves callbacks that hold the process group; where a Gloo thread lets go of it last, that thread
    # waits for itself, and the process aborts ("Resource deadlock avoided"), so how it ends does not count.
    assert run_ranks(on_every_rank.powersgd_of_pytorchs, 2, kind, check_exit=False) == [True, True]


@both_ddps
def test_the_wire_has_the_outer_wrappers_dtype_and_a_sum_beyond_it_does_no_harm(kind: str) -> None:
    for survived in run_ranks(on_every_rank.what_survives_the_wire, 2, kind):
        for whose in ("ours", "theirs"):
            for wrapper in ("fp16", "fp16 of bf16"):
                assert survived[f"{wrapper} of {whose}"] == [1 + 2**-10, 2048.0, 49152.0, math.inf]
            for wrapper in ("bf16", "bf16 of fp16"):
                assert survived[f"{wrapper} of {whose}"] == [1.0, 2048.0, 49152.0, 2.0**17]


@both_ddps
def test_wide_narrow_complex_and_sparse_gradients_keep_their_dtype_and_their_mean(kind: str) -> None:
    for exact in run_ranks(on_every_rank.odd_dtypes, 2, kind):
        assert len(exact) == 30
        assert [name for name, right in exact.items() if not right] == []


FAILURES = {
    "None": "expected a torch.futures.Future, a Tensor or a torch.distributed.Work to be returned (got NoneType)",
    "number": "(got int)",
    "buckets": "(got list)",
    "raises": "OSError: no such luck",
    "exception set": "OSError: no such luck",
    "callback raises": "ZeroDivisionError: division by zero",
    "None held": "shape (6358,), torch.float32, torch.strided on cpu (got NoneType)",
    "one element": "(got shape (1,), torch.float32",
    "two tensors": "(got list)",
    "complex": "(got shape (6358,), torch.complex64",
    "sparse": "torch.sparse_coo on cpu)",
}


@both_ddps
def test_a_hook_that_goes_wrong_in_a_wrapper_is_named_and_the_bucket_gets_its_buffer_back(kind: str) -> None:
    for rank, told in enumerate(run_ranks(on_every_rank.failing_hooks, 2, kind, list(FAILURES))):
        assert list(told) == list(FAILURES)
        for how, cause in FAILURES.items():
            error, text, restored = told[how]
            parameters = "weights.0, weights.1" if kind == "core" else "one of shape (30, 50), one of shape (50,)"
            assert f"rank {rank}, bucket 0 (parameters {parameters}, " in text, how
            assert "hook Failing.hook failed: " in text and cause in text, how
            assert restored, how
            at_once = how in ("None", "number", "buckets", "raises")
            assert error == ("CompressorError" if at_once else "RuntimeError"), how


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", [None, "allreduce_hook", torch.float16], ids=repr)
def test_a_wrapper_round_what_is_not_callable_is_refused_at_once(wrapper: Any, hook: Any) -> None:
    with pytest.raises(TypeError, match="6_compress_wrapper: expected a hook, a callable that takes") as refusal:
        wrapper(hook)
    assert isinstance(refusal.value, commhooks.CommHooksError)


@pytest.mark.parametrize("hook", [commhooks.PowerSGD, commhooks.PowerSGD(rank=4)], ids=["class", "compressor"])
def test_a_wrapper_round_a_compressor_says_what_to_write(hook: Any) -> None:
    with pytest.raises(commhooks.HookTypeError, match=r"a compressor\); write commhooks.attach\(model, .*PowerSGD\("):
        commhooks.fp16_compress_wrapper(hook)


def test_a_class_of_compressors_has_the_signature_of_its_settings() -> None:
    """Compressors themselves have none, so that a DDP to which one is registered meets an error that helps."""
    assert "matrices" in inspect.signature(commhooks.PowerSGD).parameters
    with pytest.raises(commhooks.HookTypeError, match="expected a hook"):
        commhooks.PowerSGD()(None, None)


@both_ddps
def test_a_state_or_a_compressor_in_the_wrong_place_is_told_what_to_write(kind: str) -> None:
    (told,) = run_ranks(on_every_rank.misused, 1, kind)
    attach = "write commhooks.attach(model, PowerSGD(rank=4)) in place of"
    state = "write model.register_comm_hook(commhooks.PowerSGDState(process_group=None, matrix_approximation_rank=4), "
    expected = {
        "compressor": ("register", attach),
        # All that PyTorch says of a class: it has no argument of this name.
        "class": ("register", "attach a compressor with commhooks.attach" if kind == "core" else "'bucket'"),
        "no state": ("backward", f"{state}powerSGD_hook)"),
        "compressor as state": ("backward", f"(got PowerSGD(rank=4)); {state}batched_powerSGD_hook)"),
        "no state in a wrapper": ("backward", f"(got None); {state}powerSGD_hook)"),
    }
    assert told.keys() == expected.keys()
    for what, (when, words) in expected.items():
        assert told[what][0] == when, what
        assert words in told[what][1], what


class IntegerBucket:
    """Be a bucket that neither DDP makes."""

    def index(self) -> int:
        return 3

    def buffer(self) -> torch.Tensor:
        return torch.arange(4)

    def parameters(self) -> list[torch.Tensor]:
        return [torch.arange(4)] * 10


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_refuses_integer_gradients(wrapper: Any) -> None:
    bucket: Any = IntegerBucket()
    with pytest.raises(commhooks.GradientError, match=r"bucket 3 .* and 2 more\): hook plain: .* torch\.int64; a"):
        wrapper(on_every_rank.plain)(None, bucket)


def test_a_wrapped_hook_is_forgotten_with_its_last_reference() -> None:
    before = len(default_hooks.on_wire)
    wrapped = commhooks.fp16_compress_wrapper(commhooks.allreduce_hook)
    assert len(default_hooks.on_wire) == before + 1
    assert wrapped.__qualname__ == "fp16_compress_wrapper(allreduce_hook)"
    del wrapped
    gc.collect()
    assert len(default_hooks.on_wire) == before


def test_a_run_that_would_wait_for_a_steps_last_bucket_for_ever_is_refused() -> None:
    for errors in run_ranks(on_every_rank.no_end_of_a_step, 2, check_exit=False):
        assert len(errors) == 9
        for error in errors:
            assert "policy must be 'fifo' and atomic False for PyTorch's" in error, errors
