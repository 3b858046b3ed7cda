"""state_dict, load_state_dict, pickles, other world sizes. What each rank runs is in state_dict_in_worlds.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import commhooks
from commhooks import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from tests.commhooks import state_dict_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks
from tests.commhooks.resume_in_worlds import distance

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])


@both_ddps
def test_a_state_dict_holds_plain_data_and_is_a_copy(kind: str, tmp_path: Path) -> None:
    run_ranks(on_every_rank.holds_plain_data_and_is_a_copy, 2, kind, str(tmp_path))


@both_ddps
def test_what_does_not_fit_is_refused_on_every_rank_and_nothing_is_loaded(kind: str) -> None:
    run_ranks(on_every_rank.refuses_what_does_not_fit, 2, kind)


@both_ddps
def test_to_read_the_state_changes_nothing_in_the_run(kind: str) -> None:
    run_ranks(on_every_rank.reading_changes_nothing, 2, kind)


@both_ddps
def test_after_a_refused_state_a_compressor_can_be_replaced(kind: str) -> None:
    run_ranks(on_every_rank.replaced_after_a_refusal, 2, kind)


@both_ddps
def test_state_is_not_saved_in_the_middle_of_a_step(kind: str) -> None:
    run_ranks(on_every_rank.not_in_the_middle_of_a_step, 2, kind)


@both_ddps
@pytest.mark.parametrize("batched", [False, True], ids=["matrices", "batched"])
def test_hook_and_state_are_pickled_as_pytorchs_documentation_shows(kind: str, batched: bool, tmp_path: Path) -> None:
    given = (kind, str(tmp_path), batched)
    whole = run_ranks(on_every_rank.as_the_documentation_of_pytorch_shows, 2, *given, "first")
    resumed = run_ranks(on_every_rank.as_the_documentation_of_pytorch_shows, 2, *given, "resumed")
    for ours, theirs in zip(resumed, whole, strict=True):
        assert distance(ours, theirs) == 0.0


@pytest.mark.parametrize("module", ["commhooks.hooks.powersgd", "commhooks.powersgd_hook"])
def test_torch_load_takes_hook_and_state_under_the_names_of_every_version(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hook and state were defined in powersgd_hook.py at first, and a pickle names the module of what it holds."""
    for named in (PowerSGDState, powerSGD_hook, batched_powerSGD_hook):
        monkeypatch.setattr(named, "__module__", module)
    saved = {"settings": {"wire": "torch.float16", "matrix_approximation_rank": 3}, "state": {}}
    monkeypatch.setattr(PowerSGDState, "__getstate__", lambda _: saved)
    torch.save([PowerSGDState(None), powerSGD_hook, batched_powerSGD_hook], tmp_path / "file.pt")
    monkeypatch.undo()
    assert (tmp_path / "file.pt").read_bytes().count(f"{module}\n".encode()) == 3
    state, *hooks = torch.load(tmp_path / "file.pt")
    assert hooks == [powerSGD_hook, batched_powerSGD_hook]
    assert type(state) is PowerSGDState and (state.matrix_approximation_rank, state.wire) == (3, torch.float16)


def test_without_names_saving_and_loading_say_what_to_do() -> None:
    run_ranks(on_every_rank.names_are_needed, 2, check_exit=False)


def test_ranks_that_load_different_states_hear_of_it_at_the_first_bucket() -> None:
    run_ranks(on_every_rank.ranks_that_unpickle_different_states, 2)


@both_ddps
def test_copies_of_a_model_have_nothing_attached(kind: str) -> None:
    run_ranks(on_every_rank.copies_of_a_model_have_nothing_attached, 2, kind)


def test_after_a_step_that_failed_nothing_is_saved() -> None:
    run_ranks(on_every_rank.a_failed_step_cannot_be_saved, 2)


def test_the_states_of_all_ranks_can_be_put_together() -> None:
    run_ranks(on_every_rank.merged, 2)


def test_other_numbers_of_ranks_take_over_the_sum_of_the_residuals(tmp_path: Path) -> None:
    for world_size, first, last, how in ((3, 0, 4, "refuse"), (2, 4, 8, "spread"), (1, 8, 9, "reset")):
        run_ranks(on_every_rank.resized, world_size, world_size, str(tmp_path), first, last, how)


@pytest.mark.soak
def test_four_ranks_become_two_and_four_again_without_a_jump_of_the_loss(tmp_path: Path) -> None:
    """The loss after a change of the world size is above the steady run's by no more than seeds differ."""
    losses: dict[str, list[list[float]]] = {"steady": [[], [], []], "changed": [[], [], []]}
    for first, last, fewer in ((0, 24, 4), (24, 36, 2), (36, 48, 4)):
        for name, world_size, how in (("steady", 4, "refuse"), ("changed", fewer, "spread")):
            given = (world_size, str(tmp_path / name), first, last, how)
            found = run_ranks(on_every_rank.resized, world_size, *given)[0]
            for seed in range(3):
                losses[name][seed] += found[seed]
    steady, changed = losses["steady"], losses["changed"]
    for first in (24, 36):
        level = [sum(losses[first : first + 10]) / 10 for losses in steady]
        noise = max(level) - min(level)
        for kept, resized in zip(steady, changed, strict=True):
            jump = sum(resized[first : first + 10]) / 10 - sum(kept[first : first + 10]) / 10
            print(f"from step {first}: jump {jump:+.4f}, seeds differ by {noise:.4f}")
            assert jump <= noise, (first, jump, noise)


def test_a_setting_that_a_file_does_not_know_had_its_default_when_that_was_saved() -> None:
    """So a release that gives a compressor one setting more reads the files of the one before."""
    tensors = {"weight": torch.zeros(12, 10)}
    (line,) = commhooks.lockstep_lines(1)
    state = commhooks.Exchanger(tensors, commhooks.make_compressor("top-k"), line=line).state_dict()
    del state["settings"]["reset_every"], state["settings"]["inner.indices"]
    commhooks.Exchanger(
        tensors, commhooks.make_compressor("top-k"), line=commhooks.lockstep_lines(1)[0]
    ).load_state_dict(state)
    changed = commhooks.make_compressor("top-k", indices="int32")
    other = commhooks.Exchanger(tensors, changed, line=commhooks.lockstep_lines(1)[0])
    with pytest.raises(commhooks.CheckpointError, match="setting inner.indices: saved with 'auto', now 'int32'"):
        other.load_state_dict(state)
