"""What a saved state may hold: entries, settings and memory formats, of workers in one process."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import commhooks
from commhooks.compressors import PowerSGD
from commhooks.lockstep import average_in_lockstep, lockstep_connections
from commhooks.saving.form import faults_of


def alone(compressor: str, **settings: Any) -> commhooks.Exchanger:
    """Return a worker that is alone, and has taken a step."""
    tensors = {"weight": torch.zeros(24, 20), "bias": torch.zeros(20)}
    (connection,) = lockstep_connections(1)
    exchanger = commhooks.Exchanger(tensors, commhooks.make_compressor(compressor, **settings), connection=connection)
    torch.manual_seed(0)
    average_in_lockstep([exchanger], [{name: torch.randn(one.shape) for name, one in tensors.items()}])
    return exchanger


def edited(state: dict[str, Any], entry: str, value: torch.Tensor) -> dict[str, Any]:
    state = copy.deepcopy(state)
    for part in (state["replicated"], state["local"]["rank0"]):
        if entry in part.get("weight", {}):
            part["weight"][entry] = value
    return state


@pytest.mark.parametrize(
    ("compressor", "entry", "value", "text"),
    [
        ("powersgd", "Q", torch.zeros(4, 3), r"'Q': expected shape \(1, 20\), found \(4, 3\); pass settings='change'"),
        ("powersgd", "Q", torch.zeros(1, 20, dtype=torch.int8), "'Q': expected floating-point numbers, found"),
        ("powersgd", "Q", torch.full((1, 20), math.inf), "'Q': expected finite numbers, found inf or NaN in 20 of 20"),
        ("top-k", "residual", torch.zeros(24, 20).to_sparse(), "'residual' of rank 0: expected a dense tensor of real"),
        ("top-k", "residual", torch.zeros(24, 20) * 1j, "'residual' of rank 0: expected a dense tensor of real"),
        ("dgc", "velocity", torch.zeros(481), r"\['weight'\]: a velocity of shape \(481,\), expected \(24, 20\)"),
        ("adaptive-rank", "choice", torch.tensor([1, 2]), r"'choice': expected one whole number .*of shape \(2,\)"),
        ("adaptive-rank", "choice", torch.tensor(-3), r"'choice': expected one whole number of at least 0.*\(-3\)"),
        ("adaptive-rank", "choice", torch.tensor(math.nan), "'choice': expected one whole number of at least 0"),
    ],
)  # fmt: skip
def test_an_entry_that_was_edited_is_refused_by_name(
    compressor: str, entry: str, value: torch.Tensor, text: str
) -> None:
    state, loading = alone(compressor).state_dict(), alone(compressor)
    before = str(loading.state_dict())
    with pytest.raises(commhooks.CheckpointError, match=text):
        loading.load_state_dict(edited(state, entry, value))
    assert str(loading.state_dict()) == before
    loading.load_state_dict(state)


@pytest.mark.parametrize("place", ["more", "handed_in", "ddp_core"])
def test_a_plan_of_buckets_that_is_something_else_is_refused(place: str) -> None:
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]
    plan = {"rebuilt": False, "buckets": [["weight"]], "limits": nested}
    state = alone("top-k").state_dict()
    state["bucket_plan"][place] = plan if place == "ddp_core" else nested
    with pytest.raises(commhooks.CheckpointError, match=r"the hook's state is damaged. bucket_plan\b.*: expected"):
        alone("top-k").load_state_dict(state)


def test_a_state_without_the_compressors_name_is_refused_even_if_settings_may_change() -> None:
    state = alone("top-k").state_dict() | {"inventory": {}}
    del state["settings"]["compressor"]
    with pytest.raises(commhooks.CheckpointError, match="settings: expected the name of a 'compressor', found none"):
        alone("top-k").load_state_dict(state, settings="change")


def test_with_other_settings_a_basis_of_another_size_starts_from_scratch_and_is_named() -> None:
    state, loading = alone("powersgd", rank=2).state_dict(), alone("powersgd", rank=1)
    with pytest.warns(
        UserWarning, match=r"'Q' of 'weight' \(saved with shape \(2, 20\), now \(1, 20\)\) starts from"
    ) as told:
        loading.load_state_dict(state, settings="change")
    assert {one.filename for one in told} == {__file__}, "where load_state_dict was called"
    kept, residual = state["local"]["rank0"]["weight"], loading.state_dict()["local"]["rank0"]["weight"]
    assert torch.equal(kept["residual"], residual["residual"])


def trained(compressor: commhooks.Compressor, gradient: torch.Tensor, state: Any = None) -> commhooks.Exchanger:
    """Return a worker that has taken two steps, or one from a state, in the gradient's memory format."""
    (connection,) = lockstep_connections(1)
    exchanger = commhooks.Exchanger({"weight": torch.empty_like(gradient)}, compressor, connection=connection)
    if state is not None:
        exchanger.load_state_dict(state)
    for _ in range(2 if state is None else 1):
        average_in_lockstep([exchanger], [{"weight": gradient.clone()}])
    return exchanger


@pytest.mark.parametrize("settings", [{}, {"alternating": True}, {"matrices": "most-square"}], ids=str)
@pytest.mark.parametrize("shape", [(16, 8, 3, 3), (4, 32, 3, 2), (6, 5, 4, 3, 2)], ids=str)
def test_a_run_is_resumed_in_its_own_memory_format_and_in_no_other(
    shape: tuple[int, ...], settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    gradient = torch.randn(shape)
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    formats = [gradient, gradient.to(memory_format=last)]
    compressor = commhooks.ErrorFeedback(inner=PowerSGD(**settings))
    for one, other in (formats, formats[::-1]):
        ran = trained(compressor, one)
        state = ran.state_dict()
        average_in_lockstep([ran], [{"weight": one.clone()}])
        assert str(trained(compressor, one, state).state_dict()) == str(ran.state_dict())
        with pytest.raises(commhooks.CheckpointError, match=r"'weight': saved with its dimensions in the order \[0, "):
            trained(compressor, other, state)


def test_the_check_of_form_names_every_place_that_differs() -> None:
    form = {"name": str, "sizes": [int], "more?": {"is": bool}, "by name": {str: float}}
    right: dict[str, Any] = {"name": "a", "sizes": [1, 2], "by name": {"b": 0.5}}
    assert list(faults_of(right, form)) == list(faults_of(right | {"more": {"is": True}}, form)) == []
    wrong = {"name": 1, "sizes": [1, True], "by name": {"b": 1}, "more": {"is": 0}}
    assert list(faults_of(wrong, form, "file")) == [
        "file['name']: expected str, got int 1",
        "file['sizes'][1]: expected int, got bool True",
        "file['more']['is']: expected bool, got int 0",
        "file['by name']['b']: expected float, got int 1",
    ]
    assert list(faults_of(right | {"other": 1}, form, "file")) == [
        "file: expected name, sizes, more, by name alone, got 'other'"
    ]


def test_what_is_reset_may_be_anything() -> None:
    state = edited(alone("dgc").state_dict(), "velocity", torch.full((24, 20), math.nan))
    state["local"]["rank0"]["weight"]["residual"] = torch.full((24, 20), math.nan)
    alone("dgc").load_state_dict(state | {"world_size": 2}, world_size="reset")
    state = edited(alone("dgc").state_dict(), "velocity", torch.full((24, 20), math.nan))
    alone("top-k").load_state_dict(state, settings="change", missing="reset")


def test_a_basis_that_a_replacement_will_start_from_scratch_is_saved_with_its_new_size() -> None:
    exchanger = alone("powersgd", rank=2)
    exchanger.engine.compressor = commhooks.make_compressor("powersgd", rank=1)  # as `Handle.replace` does
    saved = exchanger["gradients"].snapshot()
    assert saved.replicated["weight"]["Q"].shape == (1, 20)
    alone("powersgd", rank=1).load_state_dict(saved.as_dict())
