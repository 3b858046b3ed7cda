"""Defaults that a process may set concern the user's own tensors: what travels, and what is kept, has the same bits."""

from __future__ import annotations

import ast
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks.communicators.parent_group import group_or_default
from commhooks.exchange import ProcessGroupConnection
from tests.cases import BY_NAME, FORMS
from tests.commhooks.models import Given, gradients_of, wrap
from tests.golden import digest_of, tensors_in
from tests.structure import sources_of
from tests.tiers import THOROUGH
from tests.world import run_world

SHAPES = [(40, 33), (33,), (24, 4, 3, 3), (), (7,)]
NAMES = [f"layer{number}" for number in range(len(SHAPES))]
STEPS = 3
Around = Callable[[], AbstractContextManager[Any]]


@contextlib.contextmanager
def _set(change: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


@contextlib.contextmanager
def _warnings_raise() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


DEFAULTS: dict[str, Around] = {
    "none": nullcontext,
    "float64": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": lambda: _set(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "float16": lambda: _set(torch.set_default_dtype, torch.float16, torch.float32),
    "meta": lambda: _set(torch.set_default_device, "meta", None),
    "inference": torch.inference_mode,
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "warnings": _warnings_raise,
}
"""Under "deterministic", what has no deterministic form raises, and `torch.empty` returns NaN."""
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(100 * rank + step)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in SHAPES]
    return [one.to(dtype) for one in drawn]


def attached(rank: int, name: str, around: Around) -> list[Tensor]:
    """Attach to a model, step, save, load and step again."""
    module = Given(*SHAPES)
    model = wrap("core", module, bucket_cap_mb=0.004)
    given = [gradients(rank, step) for step in range(STEPS)]
    found: list[Tensor] = []
    with around():
        handle = commhooks.attach(model, BY_NAME[name].make())
        for step in range(STEPS):
            model.zero_grad()
            model(*given[step]).backward()
            found += gradients_of(module)
            state = handle.state_dict()
            handle.load_state_dict(state)
        found += tensors_in(state)
        sent = handle.statistics()
        found.append(torch.tensor([sent.collectives, sent.payload_bytes, sent.moved_bytes], device="cpu"))
        handle.memory()
        handle.close()
    return found


def exchanged(
    rank: int, name: str, dtype: torch.dtype, connection: ProcessGroupConnection, around: Around
) -> list[Tensor]:
    """Average, save and load under the default, and average again without it."""
    rounds = [dict(zip(NAMES, gradients(rank, step, dtype), strict=True)) for step in range(STEPS)]
    with around():
        exchanger = commhooks.Exchanger(rounds[0], BY_NAME[name].make(), connection=connection)
        for one in rounds[:-1]:
            exchanger.average(one)
        exchanger.load_state_dict(exchanger.state_dict())
        exchanger.replace(BY_NAME[name].make())
    exchanger.average(rounds[-1])
    found = [*(value for one in rounds for value in one.values()), *tensors_in(exchanger.state_dict())]
    exchanger.close()
    return found


def diloco(rank: int, compressor: str, around: Around) -> list[Tensor]:
    """Average a model by DiLoCo, and by ModelAverager."""
    found: list[Tensor] = []
    for make in (commhooks.DiLoCo, functools.partial(commhooks.ModelAverager, warmup_steps=1)):
        model = Given(*SHAPES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with nullcontext() if around is torch.inference_mode else around():
            training: Any = make(model, optimizer, every=2, compressor=compressor)
        for step in range(2 * STEPS):
            optimizer.zero_grad()
            model(*gradients(rank, step)).backward()
            optimizer.step()
            with around() if step < STEPS + 1 else nullcontext():
                if isinstance(training, commhooks.DiLoCo):
                    training.step()
                else:
                    training.average_parameters(model.parameters())
                training.load_state_dict(training.state_dict())
        found += [*(parameter.detach() for parameter in model.parameters()), *tensors_in(training.state_dict())]
        training.close()
    return found


def digests(rank: int, default: str, names: Sequence[str]) -> dict[str, str]:
    """Return the digest of what is tried under a default, by name, or the error that it raised.

    Without a default, that is everything that is tried under any.
    """
    dtypes = [torch.float32, *(dtype for of, dtype in DTYPES.items() if default in (of, "none"))]
    connection = ProcessGroupConnection(group_or_default(None), policy="fused")
    connection.join()  # of nobody: it is open until the process ends
    around, found = DEFAULTS[default], dict[str, str]()

    def enter(name: str, run: Callable[..., list[Tensor]], *arguments: Any) -> None:
        try:
            found[name] = digest_of(run(rank, *arguments, around))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    for name in names:
        if default != "inference":  # in which there is no backward pass
            enter(f"{name}, attach", attached, name)
        for dtype in dtypes:
            enter(f"{name}, Exchanger, {dtype}", exchanged, name, dtype, connection)
    for compressor in ("powersgd", "int8"):
        enter(f"DiLoCo and ModelAverager, {compressor}", diloco, compressor)
    return found


def digests_of_ranks(default: str, names: Sequence[str]) -> list[dict[str, str]]:
    """Return the digests of two new processes, in which nothing was computed before without the default."""
    found: list[dict[str, str]] = run_world(digests, 2, default, names, check_exit=False)
    return found


ROOT = Path(__file__).resolve().parents[2]
MAKERS = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
"""The functions of torch that follow the process's default dtype or device."""


@functools.cache
def without(names: Sequence[str]) -> list[dict[str, str]]:
    found = digests_of_ranks("none", names)
    assert not [what for of_rank in found for what in of_rank.values() if " " in what]  # errors
    return found


@pytest.mark.parametrize(
    ("default", "names"),
    [
        pytest.param(default, names, id=f"{default}-{what}", marks=marks)
        for number, default in enumerate(list(DEFAULTS)[1:])
        for what, names, marks in (
            ("some forms", FORMS[number % 3 :: 3], ()),
            ("every form", FORMS, THOROUGH),
            ("every row", list(BY_NAME), pytest.mark.soak),
        )
    ],
)
def test_a_default_of_the_process_changes_no_bit(default: str, names: list[str]) -> None:
    expected = without(tuple(FORMS if len(names) < len(FORMS) else names))
    for found, plain in zip(digests_of_ranks(default, names), expected, strict=True):
        assert found == {way: plain[way] for way in found}


@pytest.mark.parametrize("package", ["commhooks", "ddp_core"])
def test_every_tensor_is_made_with_a_dtype_and_a_device(package: str) -> None:
    found = []
    for source in sources_of(package):
        for node in ast.walk(source.tree):
            match node:
                case ast.Call(ast.Attribute(ast.Name("torch"), maker), _, keywords) if maker in MAKERS:
                    missing = {"dtype", "device"} - {keyword.arg for keyword in keywords}
                    found += [f"{source.path}:{node.lineno}: no {what}" for what in sorted(missing)]
    assert not found
