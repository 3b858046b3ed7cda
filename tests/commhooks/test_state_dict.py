"""state_dict, load_state_dict, pickles, other world sizes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks import CheckpointError, PowerSGDState, batched_powerSGD_hook, make_compressor, powerSGD_hook
from commhooks.saving.saved import SavedChannel
from tests import bounds
from tests.commhooks.mirrored import SHAPES, TINY_BUCKETS, backward, given
from tests.commhooks.models import Given, wrap
from tests.commhooks.resuming import Run, distance, network, roundtrip
from tests.commhooks.test_channels import FailsOnce
from tests.commhooks.workers import largest, normal, zeros
from tests.ddp_core.facts import BOTH_DDPS, Facts
from tests.tiers import in_turn
from tests.world import run_world

facts = Facts(kinds=BOTH_DDPS)


def _trained(kind: str, rank: int, steps: int, **settings: Any) -> tuple[nn.Module, commhooks.Handle[Any]]:
    model = given(kind)
    attachment = commhooks.attach(model, make_compressor("powersgd", rank=2, **settings))
    for step in range(steps):
        backward(model, normal(zeros(*SHAPES), 2, seed=step)[rank])
    return model, attachment


@facts
def a_state_dict_holds_plain_data_and_is_a_copy(rank: int, kind: str, folder: Path) -> None:
    model, attachment = _trained(kind, rank, 3)
    state = attachment.state_dict()
    torch.save(state, folder / f"{rank}.pt")
    backward(model, normal(zeros(*SHAPES), 2, seed=7)[rank])
    read = torch.load(folder / f"{rank}.pt")
    _require_plain(read)
    assert distance(read, state) == 0.0
    assert (read["step"], read["world_size"], read["layout"], list(read["local"])) == (3, 2, 4, [f"rank{rank}"])
    assert read["settings"]["inner.rank"] == "2" and read["settings"]["inner.compressor"] == "PowerSGD"
    assert read["local"][f"rank{rank}"]["weights.0"]["residual"].shape == (30, 50)
    attachment.load_state_dict(read)  # back to the third step: what is done again comes out the same
    again = backward(model, normal(zeros(*SHAPES), 2, seed=8)[rank])
    other = given(kind)
    second = commhooks.attach(other, make_compressor("powersgd", rank=2))
    second.load_state_dict(state)
    if kind == "torch":  # its buckets are cut after its first step
        assert second.steps == 3
    for ours, theirs in zip(again, backward(other, normal(zeros(*SHAPES), 2, seed=8)[rank]), strict=True):
        assert torch.equal(ours, theirs)
    attachment.close()
    second.close()
    assert distance(attachment.state_dict()["replicated"], second.state_dict()["replicated"]) == 0.0


def _require_plain(value: object) -> None:
    assert type(value) in (dict, list, str, int, float, bool, Tensor), type(value)
    for held in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _require_plain(held)


@facts
def what_does_not_fit_is_refused_on_every_rank_and_nothing_is_loaded(rank: int, kind: str) -> None:
    """Load wrong states, the same on both ranks or on one only: both raise, and nothing is loaded."""
    model, attachment = _trained(kind, rank, 3)
    before = attachment.state_dict()
    backward(model, normal(zeros(*SHAPES), 2, seed=4)[rank])
    now = attachment.state_dict()

    def altered(**fields: Any) -> dict[str, Any]:
        return copy.deepcopy(before) | fields

    own = f"rank{rank}"
    shapes = {name: list(shape) for name, shape in before["shapes"].items()}
    other_settings = before["settings"] | {"inner.rank": "4", "inner.seed": "1"}
    reshaped = {"shapes": shapes | {"weights.0": [50, 30]}}
    renamed = {"shapes": {name.replace("weights.0", "w.0"): shape for name, shape in shapes.items()}}
    damaged = copy.deepcopy(before["local"])
    damaged[own]["weights.0"]["residual"] = torch.zeros(3)
    undescribed = copy.deepcopy(before["local"])
    undescribed[own]["weights.0"]["momentum"] = torch.zeros(30, 50)
    other_rank = {f"rank{1 - rank}": before["local"][own]}
    not_saved, not_described = {"weights.0": {"residual": {"kind": "rest"}}}, r"kinds\['weights.0'\]\['residual'\]: exp"
    cases: list[tuple[dict[str, Any], str]] = [
        (altered(settings=other_settings), "setting inner.rank: saved with 4, now 2; setting inner.seed: saved with 1"),
        (altered(**reshaped), r"parameter 'weights.0': saved with shape \(50, 30\), now \(30, 50\)"),
        (
            _without_weights_0(altered(**renamed), own),
            "checkpoint has no parameter 'weights.0'.*checkpoint has parameter 'w.0', which the model does not have",
        ),
        (altered(layout=5), r"saved in layout 5 by commhooks .*; this one \(.*\) reads layout 4"),
        (_of_the_last_commit(before), r"saved in layout 3 by an earlier commhooks; this one \(.*\) reads layout 4"),
        (altered(orders={"weights.0": [1, 0]}), r"its dimensions in the order \[1, 0\] in memory, now \[0, 1\]"),
        (altered(world_size=3), "saved by 3 ranks, loaded by 2; pass world_size='spread'"),
        (altered(kinds=not_saved), not_described),
        (altered(local={own: {}}), r"local\['rank.'\]\['weights.0'\]: 'residual' is missing"),
        (altered(local=undescribed), r"weights.0'\]: the kind of 'momentum' is not given"),
        (altered(local=damaged), r"weights.0'\]: a residual of shape \(3,\)"),
        (altered(inventory=5), "the hook's state is damaged"),
        (altered(bucket_plan={"handed_in": 3}), r"bucket_plan\['handed_in'\]: expected list, got int 3"),
        (altered(bucket_plan={"ddp_core": {"rebuilt": True}}), r"\['limits'\]: expected list, got nothing"),
        (altered(grad_scale=0.0), "grad_scale: expected"),
        (altered(step="three"), "step: expected a whole number of at least 0, got str 'three'"),
        ({"model": 1}, r"expected the state_dict\(\) of a hook's state"),
        (altered(local=other_rank), f"residuals of rank {1 - rank} and this is rank {rank}"),
    ]
    for state, text in cases:
        with pytest.raises(CheckpointError, match=text):
            attachment.load_state_dict(state)
        assert distance(attachment.state_dict(), now) == 0.0
    for state, text in cases:
        if rank == 1:
            with pytest.raises(CheckpointError, match=text):
                attachment.load_state_dict(state)
        else:
            with pytest.raises(CheckpointError, match="nothing was loaded. ranks disagree. rank 1 cannot take part: "):
                attachment.load_state_dict(before)
        assert distance(attachment.state_dict(), now) == 0.0
    with pytest.raises(CheckpointError, match=r"loaded state, step: 3 \(ranks? 0.*\), 4 \(rank 1"):
        attachment.load_state_dict(before if rank == 0 else now)
    assert distance(attachment.state_dict(), now) == 0.0
    with pytest.raises(commhooks.SettingsError, match="missing='keep': missing must be one of refuse, reset"):
        attachment.load_state_dict(before, missing="keep")
    attachment.load_state_dict(before)
    assert attachment.steps == 3
    attachment.load_state_dict(altered(settings=other_settings), settings="change")


def _of_the_last_commit(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict as it was before layouts had this name."""
    older = {name: value for name, value in state.items() if name not in ("layout", "commhooks", "orders")}
    settings = state["settings"] | {"message formats": "{}"}
    return copy.deepcopy({"format_version": 3} | older | {"settings": settings})


def _without_weights_0(state: dict[str, Any], own: str) -> dict[str, Any]:
    for part in (state["local"][own], state["replicated"], state["kinds"]):
        del part["weights.0"]
    state["inventory"][own] = [part for part in state["inventory"][own] if "weights.0" not in part]
    return state


@facts
def to_read_the_state_changes_nothing_in_the_run(rank: int, kind: str) -> None:
    """Read the state of one of two like runs, before and after another compressor's turn: they continue identically."""
    turns = commhooks.StartAfter(
        inner=make_compressor("powersgd", rank=2), before=make_compressor("powersgd", rank=1), steps=3
    )
    models = [given(kind), given(kind)]
    hooks = [commhooks.attach(model, turns) for model in models]
    for step in range(6):
        gradients = normal(zeros(*SHAPES), 2, seed=step)[rank]
        ours, theirs = (backward(model, gradients) for model in models)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), step
        hooks[0].state_dict()


@facts
def after_a_refused_state_a_compressor_can_be_replaced(rank: int, kind: str) -> None:
    """Load a mismatched state on one rank, then replace the compressor: nothing is left of the rejected state."""
    model, attachment = _trained(kind, rank, 2)
    saved = attachment.state_dict()
    with pytest.raises(CheckpointError, match="nothing was loaded|damaged"):
        attachment.load_state_dict(saved | {"step": "two"} if rank else saved)
    attachment.replace(make_compressor("powersgd", rank=1))
    backward(model, normal(zeros(*SHAPES), 2, seed=2)[rank])
    assert attachment.steps == 3


@facts
def state_is_not_saved_in_the_middle_of_a_step(rank: int, kind: str) -> None:
    model, attachment = _trained(kind, rank, 2)
    told: list[str] = []

    def save(_: Tensor) -> None:
        try:
            attachment.state_dict()
        except commhooks.AttachError as error:
            told.append(str(error))

    handle = next(model.parameters()).register_hook(save)
    backward(model, normal(zeros(*SHAPES), 2, seed=2)[rank])
    handle.remove()
    assert told == ["state_dict: step 2 is under way; call it between two steps."], told


def as_the_documentation_of_pytorch_shows(rank: int, kind: str, folder: str, batched: bool, part: str) -> Any:
    """Save hook and state together by torch.save, in one process, and go on in another."""
    path = Path(folder) / f"{rank}.pt"
    ddp: Any = wrap(kind, network(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    if part == "resumed":
        checkpoint = torch.load(path)
        ddp.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        hook, state = checkpoint["comm_hook"], checkpoint["comm_hook_state"]
    else:
        hook = batched_powerSGD_hook if batched else powerSGD_hook
        state = PowerSGDState(None, 2, start_powerSGD_iter=2, wire=torch.float16)
    if kind == "torch":
        state.bind(ddp)
    ddp.register_comm_hook(state, hook)
    run = Run(ddp, optimizer, state)
    torch.manual_seed(0)  # dropout
    run.train(rank, 6 if part == "resumed" else 0, 6)
    if part == "first":
        torch.save(
            {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "comm_hook": hook,
             "comm_hook_state": state}, path,
        )  # fmt: skip
    torch.manual_seed(1)
    run.train(rank, 6, 12)
    result = run.result()
    state_dict = result["hooks"]
    assert state_dict["step"] == 12 and len(state_dict["replicated"]) > 0
    return result


@facts.once
def without_names_saving_and_loading_say_what_to_do(rank: int) -> None:
    """PyTorch's DDP does not pass names to a hook: training works, saving and loading say what to do."""
    model = given("torch")
    state = PowerSGDState(None, 2, start_powerSGD_iter=0)
    model.register_comm_hook(state, powerSGD_hook)  # type: ignore[operator]
    gradients = normal(zeros(*SHAPES), 2, seed=0)[rank]
    backward(model, gradients)
    for save in (state.state_dict, lambda: pickle.dumps(state)):
        with pytest.raises(CheckpointError, match=r"its name is not known; call bind\(model\)"):
            save()
    state.bind(model)
    saved = state.state_dict()
    other = given("torch")
    loaded = PowerSGDState(None, 2, start_powerSGD_iter=0)
    loaded.load_state_dict(saved)
    other.register_comm_hook(loaded, powerSGD_hook)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"the name of a parameter of shape .* is not known; call bind\(model\)"):
        backward(other, gradients)


@facts.once
def ranks_that_load_different_states_hear_of_it_at_the_first_bucket(rank: int) -> None:
    """Raise at the first bucket, if nothing was exchanged before."""
    _, attachment = _trained("core", rank, 2)
    saved = attachment.state_dict()
    state = PowerSGDState(None, 2, start_powerSGD_iter=0)
    model = given("core")
    state.bind(model)
    settings = state.state_dict()["settings"]
    state.load_state_dict(saved | {"settings": settings, "inventory": {}, "step": 2 + rank})
    model.register_comm_hook(state, powerSGD_hook)  # type: ignore[operator]
    with pytest.raises(commhooks.AttachError, match=r"ranks disagree. loaded state, step: 2 \(rank 0\), 3 \(rank 1\)"):
        backward(model, normal(zeros(*SHAPES), 2, seed=0)[rank])


@facts
def copies_of_a_model_have_nothing_attached(rank: int, kind: str) -> None:
    model, attachment = _trained(kind, rank, 2)
    copied = copy.deepcopy(model)
    unpickled = pickle.loads(pickle.dumps(model))
    gradients = normal(zeros(*SHAPES), 2, seed=5)
    mean = [(a + b) / 2 for a, b in zip(*gradients, strict=True)]
    for one in (copied, unpickled):
        assert all(
            torch.equal(ours, theirs)  # halves lose no bit, at any time
            for ours, theirs in zip(backward(one, gradients[rank]), mean, strict=True)
        )
        again = commhooks.attach(one, "powersgd")
        backward(one, gradients[rank])
        assert again.statistics().steps == 1
        again.close()
    assert attachment.steps == 2


@facts.once
def after_a_step_that_failed_nothing_is_saved(rank: int) -> None:
    model = wrap("core", Given((30, 50), (40, 30)), **TINY_BUCKETS)
    attachment = commhooks.attach(model, FailsOnce(step=1))
    gradients = normal(zeros((30, 50), (40, 30)), 2, seed=0)[rank]
    model(*gradients).backward()
    with pytest.raises(commhooks.CommHooksError):
        model(*gradients).backward()
    with pytest.raises(CheckpointError, match="a step failed.*resume from the last checkpoint.*on purpose"):
        attachment.state_dict()


def resized(rank: int, world_size: int, folder: str, first: int, last: int, how: str) -> None:
    """Train on from whatever is in the folder, and save."""
    torch.manual_seed(0)
    ddp: Any = wrap(
        "core", nn.Sequential(nn.Linear(36, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    attachment = commhooks.attach(ddp, make_compressor("powersgd", rank=1))
    loaded = commhooks.load_checkpoint(folder, model=ddp, optimizer=optimizer, hooks=attachment, world_size=how)
    assert (loaded is None) == (first == 0) and (loaded is None or loaded.step == first)
    if loaded is not None:
        total, shares = _total_residual(attachment), _total_residual(attachment, of_magnitudes=True)
        for name, kept in loaded.extra["total"].items():
            expected = torch.zeros_like(kept) if how == "reset" else kept
            # Shares are computed in float64, and each is rounded once, to the residual's dtype.
            assert largest(total[name] - expected) <= bounds.unit_roundoff(torch.float32) * largest(shares[name]), name
    for step in range(first, last):
        optimizer.zero_grad()
        ddp(normal(zeros((16, 36)), world_size, seed=step)[rank][0]).square().mean().backward()
        optimizer.step()
    total = _total_residual(attachment)
    assert any(kept.any() for kept in total.values())
    commhooks.save_checkpoint(
        folder, step=last, model=ddp, optimizer=optimizer, hooks=attachment, extra={"total": total}
    )
    attachment.close()


def _total_residual(attachment: commhooks.Handle[Any], *, of_magnitudes: bool = False) -> dict[str, Tensor]:
    state = attachment.state_dict()
    (own,) = state["local"].values()
    total = {name: kept["residual"].double() for name, kept in sorted(own.items()) if "residual" in kept}
    for summed in total.values():
        if of_magnitudes:
            summed.abs_()
        dist.all_reduce(summed)
    return total


@facts.once
def the_states_of_all_ranks_can_be_put_together(rank: int) -> None:
    model, attachment = _trained("core", rank, 3)
    states: list[Any] = [None, None]
    dist.all_gather_object(states, attachment.state_dict())
    whole = roundtrip(commhooks.merge_state_dicts(states))
    assert sorted(whole["local"]) == ["rank0", "rank1"]
    attachment.load_state_dict(whole)
    assert distance(attachment.state_dict()["local"], states[rank]["local"]) == 0.0
    with pytest.raises(CheckpointError, match="rank 0 occurs twice"):
        commhooks.merge_state_dicts([states[0], states[0]])
    backward(model, normal(zeros(*SHAPES), 2, seed=3)[rank])
    with pytest.raises(CheckpointError, match="not from the same step of one run"):
        commhooks.merge_state_dicts([states[1 - rank], attachment.state_dict()])


def test_states_of_other_numbers_are_not_put_together() -> None:
    one, other = (_of_rank(rank, torch.full((2,), float(rank))) for rank in range(2))
    assert commhooks.merge_state_dicts([one, _of_rank(1, torch.zeros(2))])["local"].keys() == {"rank0", "rank1"}
    with pytest.raises(CheckpointError, match="or settings or replicated state differ"):
        commhooks.merge_state_dicts([one, other])


def _of_rank(rank: int, basis: Tensor) -> dict[str, Any]:
    own: dict[str, Any] = {"policy": "fifo", "grad_scale": 1.0, "settings": {}, "bucket_plan": {}, "kinds": {}}
    own |= {"shapes": {"w": [2]}, "replicated": {"w": {"Q": basis}}, "local": {rank: {}}}
    return SavedChannel(step=1, world_size=2, **own).as_dict()


@pytest.mark.parametrize(("kind", "batched"), in_turn(BOTH_DDPS, (False, True)))
def test_hook_and_state_are_pickled_as_pytorchs_documentation_shows(kind: str, batched: bool, tmp_path: Path) -> None:
    given = (kind, str(tmp_path), batched)
    whole = run_world(as_the_documentation_of_pytorch_shows, 2, *given, "first")
    resumed = run_world(as_the_documentation_of_pytorch_shows, 2, *given, "resumed")
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


def test_other_numbers_of_ranks_take_over_the_sum_of_the_residuals(tmp_path: Path) -> None:
    for world_size, first, last, how in ((3, 0, 4, "refuse"), (2, 4, 8, "spread"), (1, 8, 9, "reset")):
        run_world(resized, world_size, world_size, str(tmp_path), first, last, how)


test = facts.tests()
