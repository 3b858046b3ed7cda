"""A checkpoint that is damaged, forged or of another run raises a clear error on every rank, and changes nothing.

What each rank runs is in checkpoint_files_in_worlds.py.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from commhooks import CheckpointError, PowerSGDState, load_checkpoint, save_checkpoint
from tests.commhooks import checkpoint_files_in_worlds as on_every_rank
from tests.commhooks.checkpoint_files_in_worlds import CUTS, FILES, FLIPS, REFUSED, Network, Payload, Told
from tests.commhooks.ranks import run_ranks

FORGED = {
    "no JSON": ("manifest.json", "cannot be read"),
    "no object": ("manifest.json", "cannot be read"),
    "no text": ("manifest.json", "cannot be read"),
    "version of the manifest": ("was saved in format 2", "reads format 1"),
    "version of a file": ("rank1.pt", "format 1"),
    "version of the hook": ("version of the hook", "the hook's state was saved in format 4", "reads formats 2 and 3"),
    "kind of the hook's entries": ("replicated: expected dict, got list",),
    "hooks no dictionary": ("hooks no dictionary",),
    "model no dictionary": ("shared.pt", "missing or of the wrong type: model"),
    "generator no state": ("rank 1", "RNG state"),
    "no generators": ("rank0.pt", "missing or of the wrong type: generators"),
    "buffer of another shape": ("'norm.running_mean' was saved with shape (1,), now (8,)",),
    "of another checkpoint": ("rank1.pt belongs to another save than", "step 17"),
    "of another save of the same step": ("rank1.pt belongs to another save than", "manifest.json"),
    "shared.pt of another save of the same step": ("shared.pt belongs to another save than", "manifest.json"),
    "payload in shared.pt": ("shared.pt", "torch.load rejects it"),
    "payload in rank1.pt": ("rank1.pt", "torch.load rejects it"),
    "payload alone": ("rank0.pt", "torch.load rejects it"),
    "payload in the old format": ("shared.pt", "cannot be read"),
}
MISFITS = {
    "names": ("checkpoint has no 'head.weight'", "checkpoint has 'last.weight', which the model does not have"),
    "shapes": ("'first.weight' was saved with shape (8, 6), now (10, 6)",),
    "settings": ("setting inner.rank: saved with 1, now 2", "setting inner.iterations: saved with 1, now 2"),
    "compressor": ("setting compressor: saved with ErrorFeedback, now AllReduceMean",),
    "optimizer": ("optimizer: saved from SGD, now Adagrad",),
    "hooks": ("it was saved without hooks=",),
    "similar optimizer": ("optimizer: saved from Adam, now Adamax",),
    "scaler": ("scaler: checkpoint has no 'scale'",),
}


def check_refused(told: Told, *words: str) -> None:
    assert told.text, f"{told.damage}: was not refused"
    assert not told.changed, told
    for word in words:
        assert word in told.text, told


@pytest.mark.timeout(150)
def test_a_cut_or_flipped_file_is_refused_by_name_on_every_rank_or_its_content_is_whole(tmp_path: Path) -> None:
    ranks = run_ranks(on_every_rank.cut_and_flipped, 2, str(tmp_path), timeout=140)
    for told in ranks[0] + ranks[1]:
        if told.damage.startswith(("cut", "missing")):
            check_refused(told, told.damage.split()[1])
        elif told.damage.startswith("flip") and told.text:
            check_refused(told, "checkpoint-00001-step-3")
        else:
            assert told.restored, told
    assert [bool(told.text) for told in ranks[0]] == [bool(told.text) for told in ranks[1]]
    assert len(ranks[0]) == len(FILES) * (1 + CUTS + FLIPS) + 1
    refused = Counter(told.damage.split()[1] for told in ranks[0] if told.damage.startswith("flip") and told.text)
    print(f"of {FLIPS} flips in each file, so many were refused: {dict(refused)}")
    assert all(refused[name] == FLIPS for name in FILES if name != "manifest.json"), refused


def test_a_forged_file_is_refused_and_nothing_in_it_is_executed(tmp_path: Path) -> None:
    for told in run_ranks(on_every_rank.forged, 2, str(tmp_path)):
        assert [one.damage for one in told] == list(FORGED)
        for one in told:
            check_refused(one, *FORGED[one.damage])
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_of_another_run_is_refused_and_says_what_differs(tmp_path: Path) -> None:
    for told in run_ranks(on_every_rank.misfits, 2, str(tmp_path)):
        *refused, world_size = told
        assert [one.damage for one in refused] == list(MISFITS)
        for one in refused:
            check_refused(one, *MISFITS[one.damage])
        assert world_size.restored  # the manifest's is for its readers; what counts is under a checksum


def test_when_one_rank_cannot_write_every_rank_raises_and_older_checkpoints_stay(tmp_path: Path) -> None:
    old, new = "checkpoint-00001-step-3", "checkpoint-00002-step-9"
    causes = {
        "disk full on rank 1": "could not write the checkpoint. rank 1: OSError: [Errno 28] No space left on device (",
        "a folder in the way on rank 1": "could not write the checkpoint. rank 1: ",
        "disk full at the manifest": "could not put the checkpoint in place. rank 0: OSError: [Errno 28] No space left",
        "under a file": "could not prepare the checkpoint. rank 0: ",
        "steps that differ": "ranks disagree about the step: by rank 5, 6.",
    }
    for told in run_ranks(on_every_rank.cannot_write, 2, str(tmp_path)):
        *failed, loading, saving = told
        assert [name for name, _, _ in failed] == list(causes)
        for name, text, listing in failed:
            assert causes[name] in text and listing == [old], (name, text, listing)
            if name.startswith("disk full"):
                assert f"bytes free): '{tmp_path}/run/.writing-{new.replace('9', '4')}/" in text
        assert loading == ("loading", "", ["restored"])
        assert saving == ("saving", "", [old, new])


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for found in run_ranks(on_every_rank.kept, 2, str(tmp_path)):
        every = [f"checkpoint-0000{number}-step-{10 * (number - 1)}" for number in (1, 2, 3, 4)]
        assert found == {"1": every[3:], "2": every[2:], "None": every}


def test_extras_that_could_not_be_loaded_are_refused_when_saving(tmp_path: Path) -> None:
    for texts, listing, came_back in run_ranks(on_every_rank.extras, 2, str(tmp_path)):
        assert texts.keys() == REFUSED.keys()
        for name, text in texts.items():
            assert f"['extra']['{name}']" in text and "must be plain data" in text, (name, text)
        assert listing == []
        assert came_back


def test_where_no_whole_checkpoint_is_nothing_is_loaded(tmp_path: Path) -> None:
    for *loaded, text in run_ranks(on_every_rank.leftovers, 2, str(tmp_path)):
        assert loaded == [None, None, None, True]
        assert "ranks see different checkpoints under" in text and "nothing was loaded" in text


def test_a_checkpoint_that_is_named_and_not_there_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="manifest.json cannot be read"):
        load_checkpoint(tmp_path / "checkpoint-00007-step-30", model=model)
    renamed = save_checkpoint(tmp_path, step=1, model=model).rename(tmp_path / "best")
    loaded = load_checkpoint(renamed, model=model)
    assert loaded is not None and loaded.step == 1
    (renamed / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="manifest.json cannot be read"):
        load_checkpoint(renamed, model=model)


def two_saves(folder: Path, *, with_names: bool = True) -> tuple[Path, Path]:
    """Save two runs at the same step; without names, as earlier versions did."""
    saves = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        saves.append(save_checkpoint(folder / str(seed), step=3 + seed * (not with_names), model=torch.nn.Linear(2, 2)))
    for path in [] if with_names else saves:
        for name in ("shared.pt", "rank0.pt"):
            content = torch.load(path / name)
            del content["save"]
            torch.save(content, path / name)
        manifest = json.loads((path / "manifest.json").read_text())
        sizes = {name: (path / name).stat().st_size for name in manifest["files"]}
        older = {key: held for key, held in manifest.items() if key not in ("save", "crc32")}
        (path / "manifest.json").write_text(json.dumps(older | {"files": sizes}))
    return saves[0], saves[1]


@pytest.mark.parametrize("name", ["rank0.pt", "shared.pt", "manifest.json"])
def test_a_file_of_another_save_of_the_same_step_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path, other = two_saves(tmp_path)
    (path / name).write_bytes((other / name).read_bytes())
    named = "shared.pt" if name == "manifest.json" else name
    with pytest.raises(CheckpointError, match=rf"{named} belongs to another save than manifest.json \(step 3; save "):
        load_checkpoint(path, model=torch.nn.Linear(2, 2))


def test_a_file_that_was_edited_and_written_again_is_refused(tmp_path: Path) -> None:
    path, _ = two_saves(tmp_path)
    content = torch.load(path / "rank0.pt")
    content["generators"]["cpu"] = torch.get_rng_state()
    with (path / "rank0.pt").open("wb") as file:  # opened here: torch writes a path's own name into the file
        torch.save(content, file)
    with pytest.raises(CheckpointError, match=r"rank0.pt was changed after it was saved: its CRC-32 is"):
        load_checkpoint(path, model=torch.nn.Linear(2, 2))


def test_a_checkpoint_of_an_earlier_version_loads_and_its_steps_are_still_compared(tmp_path: Path) -> None:
    path, other = two_saves(tmp_path, with_names=False)
    loaded = load_checkpoint(path, model=torch.nn.Linear(2, 2))
    assert loaded is not None and loaded.step == 3
    (path / "rank0.pt").write_bytes((other / "rank0.pt").read_bytes())
    with pytest.raises(CheckpointError, match=r"rank0.pt is of step 4, shared.pt of step 3"):
        load_checkpoint(path, model=torch.nn.Linear(2, 2))


def test_buffers_that_are_no_state_may_have_any_shape(tmp_path: Path) -> None:
    saved, loading = Network(), Network()
    saved.cache, saved.norm.running_mean = torch.ones(3), torch.ones(8)
    save_checkpoint(tmp_path, step=1, model=saved)
    load_checkpoint(tmp_path, model=loading)
    buffers = dict(loading.named_buffers())
    assert torch.equal(buffers["cache"], torch.zeros(8))
    assert torch.equal(buffers["norm.running_mean"], torch.ones(8))


@pytest.mark.parametrize("kind", ["core", "torch"])
def test_a_powersgd_state_is_saved_and_loaded_as_an_attachment_is(kind: str, tmp_path: Path) -> None:
    for same, text in run_ranks(on_every_rank.of_a_powersgd_state, 2, kind, str(tmp_path)):
        assert same, text
        assert "setting inner.inner.rank: saved with 1, now 2" in text


@pytest.mark.parametrize("step", [-1, 2.0, True, "3", None])
def test_a_step_that_is_no_number_of_steps_is_refused(step: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step must be an int of at least 0"):
        save_checkpoint(tmp_path, step=step, model=torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"keep must be at least 1"):
        save_checkpoint(tmp_path, step=1, model=torch.nn.Linear(2, 2), keep=0)


@pytest.mark.parametrize("where", ["alone", "state_dict", "settings", "state"])
def test_torch_load_executes_nothing_at_its_defaults(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = Payload(tmp_path / "executed")
    content: dict[str, Any] = {"alone": payload, "state_dict": {"format_version": 1, "local": {"rank0": payload}}}
    pickled = {"settings": {"wire": "", "random_seed": payload}, "state": {}}
    if where == "state":
        pickled = {"settings": {"wire": ""}, "state": {"local": payload}}
    monkeypatch.setattr(PowerSGDState, "__getstate__", lambda _: pickled)
    torch.save(content.get(where, PowerSGDState(None)), tmp_path / "file.pt")
    with pytest.raises(pickle.UnpicklingError, match=f"unsupported GLOBAL {os.name}.system"):
        torch.load(tmp_path / "file.pt")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"settings": {"wire": "", "process_group": "evil", "run": "evil"}, "state": {}}, "process_group, run are not"),
        ({"settings": {"wire": "torch.int8"}, "state": {}}, "wire must be one of"),
        ({"settings": [1], "state": {}}, "no settings"),
        ({"settings": {"wire": ""}}, "no state"),
    ],
)
def test_a_pickled_powersgd_state_with_other_content_is_refused(
    saved: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PowerSGDState, "__getstate__", lambda _: saved)
    file = io.BytesIO()
    torch.save(PowerSGDState(None), file)
    file.seek(0)
    with pytest.raises(CheckpointError, match=words):
        torch.load(file)
