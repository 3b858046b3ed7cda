"""What a saved state may hold: entries, settings and memory formats, of workers in one process."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import commhooks
from commhooks.state.settings import settings_of, settings_that_differ


def alone(compressor: str, **settings: Any) -> commhooks.Exchanger:
    """Return a worker that is alone, and has taken a step."""
    tensors = {"weight": torch.zeros(24, 20), "bias": torch.zeros(20)}
    (line,) = commhooks.lockstep_lines(1)
    exchanger = commhooks.Exchanger(tensors, commhooks.make_compressor(compressor, **settings), line=line)
    torch.manual_seed(0)
    commhooks.average_in_lockstep([exchanger], [{name: torch.randn(one.shape) for name, one in tensors.items()}])
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
    with pytest.raises(commhooks.CheckpointError, match=rf"nothing was loaded. parameter 'weight', entry {text}"):
        loading.load_state_dict(edited(state, entry, value))
    assert str(loading.state_dict()) == before
    loading.load_state_dict(state)


def test_an_entry_with_one_element_more_is_refused_by_name_with_what_is_expected() -> None:
    state, loading = alone("dgc").state_dict(), alone("dgc")
    before = str(loading.state_dict())
    expected = r"local\['rank0'\]\['weight'\]: a velocity of shape \(481,\), expected \(24, 20\)"
    with pytest.raises(commhooks.CheckpointError, match=expected):
        loading.load_state_dict(edited(state, "velocity", torch.zeros(481)))
    older = dict(state, format_version=2, kinds=state["kinds"]["weight"])  # which did not check it
    with pytest.raises(commhooks.CheckpointError, match=r"a velocity of shape \(481,\), expected \(24, 20\)"):
        loading.load_state_dict(edited(older, "velocity", torch.zeros(481)))
    assert str(loading.state_dict()) == before


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
    with pytest.warns(UserWarning, match=r"'Q' of 'weight' \(saved with shape \(2, 20\), now \(1, 20\)\) starts from"):
        loading.load_state_dict(state, settings="change")
    kept, residual = state["local"]["rank0"]["weight"], loading.state_dict()["local"]["rank0"]["weight"]
    assert torch.equal(kept["residual"], residual["residual"])


def trained(compressor: commhooks.Compressor, gradient: torch.Tensor, state: Any = None) -> commhooks.Exchanger:
    """Return a worker that has taken two steps, or one from a state, in the gradient's memory format."""
    (line,) = commhooks.lockstep_lines(1)
    exchanger = commhooks.Exchanger({"weight": torch.empty_like(gradient)}, compressor, line=line)
    if state is not None:
        exchanger.load_state_dict(state)
    for _ in range(2 if state is None else 1):
        commhooks.average_in_lockstep([exchanger], [{"weight": gradient.clone()}])
    return exchanger


@pytest.mark.parametrize("settings", [{}, {"alternating": True}, {"rank": 2}], ids=str)
@pytest.mark.parametrize("shape", [(16, 8, 3, 3), (16, 8, 1, 3), (6, 5, 4, 3, 2)], ids=str)
def test_a_basis_fits_a_run_with_another_memory_format(shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    gradient = torch.randn(shape, dtype=torch.float64)
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    formats = [gradient, gradient.to(memory_format=last)]
    compressor = commhooks.ErrorFeedback(inner=commhooks.PowerSGD(**settings))
    for one, other in (formats, formats[::-1]):
        state = trained(compressor, one).state_dict()
        same, elsewhere = (trained(compressor, again, state).state_dict() for again in (one, other))
        pairs = [(same["local"]["rank0"]["weight"]["residual"], elsewhere["local"]["rank0"]["weight"]["residual"])]
        pairs += [(kept, elsewhere["replicated"]["weight"][e]) for e, kept in same["replicated"]["weight"].items()]
        for ours, theirs in pairs:  # sums of at most 720 terms in float64, with products conditioned below 1e4
            assert (ours - theirs).norm() <= 720 * 1e4 * torch.finfo(torch.float64).eps * ours.norm()
        loaded = commhooks.Exchanger(
            {"weight": torch.empty_like(other)}, compressor, line=commhooks.lockstep_lines(1)[0]
        )
        loaded.load_state_dict(state)
        assert str(loaded.state_dict()["replicated"]) == str(state["replicated"])


def test_a_basis_that_waits_for_its_compressor_fits_another_memory_format_too() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(16, 8, 3, 3, dtype=torch.float64)
    powersgd = commhooks.ErrorFeedback(inner=commhooks.PowerSGD())
    told = []
    for formats in (torch.contiguous_format, torch.channels_last):
        exchanger = trained(powersgd, gradient)
        for compressor in (commhooks.make_compressor("top-k"), powersgd):
            exchanger.engine.compressor = compressor  # as `Handle.replace` does
            exchanger = trained(compressor, gradient.to(memory_format=formats), exchanger.state_dict())
        told.append(exchanger.state_dict()["replicated"]["weight"]["Q"])
    assert (told[0] - told[1]).norm() <= 288 * 1e4 * torch.finfo(torch.float64).eps * told[0].norm()


def test_a_basis_of_an_earlier_version_is_taken_as_it_lies_in_memory() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(16, 8, 3, 3).to(memory_format=torch.channels_last)
    compressor = commhooks.ErrorFeedback(inner=commhooks.PowerSGD())
    state = trained(compressor, gradient).state_dict()
    older = copy.deepcopy(state)
    basis = state["replicated"]["weight"]["Q"]
    assert basis.shape == (1, 8, 3, 3)
    older["replicated"]["weight"]["Q"] = basis.permute(0, 2, 3, 1).reshape(1, 72)
    one, other = (trained(compressor, gradient, saved).state_dict() for saved in (state, older))
    assert str(one) == str(other)


def test_a_basis_that_does_not_fit_another_memory_format_starts_from_scratch_and_is_named() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(4, 32, 3, 2)
    compressor = commhooks.ErrorFeedback(inner=commhooks.PowerSGD(matrices="most-square"))
    for one, other in ((torch.contiguous_format, torch.channels_last), (torch.channels_last, torch.contiguous_format)):
        state = trained(compressor, gradient.to(memory_format=one)).state_dict()
        with pytest.warns(
            UserWarning, match=r"memory format, 'Q' of 'weight' \(saved with shape .*starts from scratch"
        ) as told:
            trained(compressor, gradient.to(memory_format=other), state)
        assert {one.filename for one in told} == {__file__}, "where load_state_dict was called"


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


def test_a_setting_that_a_file_does_not_know_had_its_default_when_that_was_saved() -> None:
    """So a release that gives a compressor one setting more reads the files of the one before."""
    tensors = {"weight": torch.zeros(12, 10)}
    (line,) = commhooks.lockstep_lines(1)
    state = commhooks.Exchanger(tensors, commhooks.make_compressor("top-k"), line=line).state_dict()
    without = copy.deepcopy(state)
    del without["settings"]["inner.ratio"]
    with pytest.raises(commhooks.CheckpointError, match=r"read without settings.inner.ratio, which it held when it"):
        commhooks.Exchanger(
            tensors, commhooks.make_compressor("top-k"), line=commhooks.lockstep_lines(1)[0]
        ).load_state_dict(without)
    del state["settings"]["inner.indices"]
    state["inventory"] = {}  # a file that does not know a setting does not list it
    commhooks.Exchanger(
        tensors, commhooks.make_compressor("top-k"), line=commhooks.lockstep_lines(1)[0]
    ).load_state_dict(state)
    changed = commhooks.make_compressor("top-k", indices="int32")
    other = commhooks.Exchanger(tensors, changed, line=commhooks.lockstep_lines(1)[0])
    with pytest.raises(commhooks.CheckpointError, match="setting inner.indices: saved with 'auto', now 'int32'"):
        other.load_state_dict(state)


DEMO = "ErrorFeedback(inner=DeMo(k=32, chunk=64, one_bit=False, sign=False), decay=0.999)"

"""As it was written before DeMo had the setting `mean_over`."""


@pytest.mark.parametrize(
    ("compressor", "setting", "text"),
    [
        ("demo", "rules", f"(('layer0', {DEMO}),)"),
        ("demo", "rules", f"(('layer0', {DEMO}), (Match(name='head.*'), {DEMO}))"),
        ("demo", "before.rules", f"(('layer0', {DEMO}),)"),
        ("distro", "rules", f"(('layer0', {DEMO.replace('32', '4').replace('False', 'True')}),)"),
    ],
)
def test_a_setting_inside_a_rule_that_a_file_does_not_know_had_its_default(
    compressor: str, setting: str, text: str
) -> None:
    def made(**settings: Any) -> commhooks.Compressor:
        one = commhooks.make_compressor(compressor, **settings)
        head = ((commhooks.Match(name="head.*"), one),) if "head" in text else ()
        mixed = commhooks.PerParameter(rules=(("layer0", one), *head))
        top_k = commhooks.make_compressor("top-k")
        return commhooks.schedule((0, mixed), (9, top_k)) if setting.startswith("before") else mixed

    saved = settings_of(made())
    assert saved[setting] != text
    older = saved | {setting: text}
    assert settings_that_differ(older, made()) == settings_that_differ(saved, made()) == []
    for other in (made(mean_over="senders"), made(k=3)):
        (found,) = settings_that_differ(older, other)
        assert found.startswith(f"setting {setting}: saved with (('layer0', ")
    for wrong in (text.replace("64", "32"), "no expression (", ""):
        assert len(settings_that_differ(saved | {setting: wrong}, made())) == 1
