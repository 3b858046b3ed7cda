"""A checkpoint that is damaged, forged or of another run raises a clear error on every rank, and changes nothing."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commhooks import CheckpointError, PowerSGDState, load_checkpoint, make_compressor, save_checkpoint
from tests.commhooks.checkpointed import Network, Renamed, Told, begin
from tests.ddp_core.facts import Facts
from tests.world import on_ranks

facts = Facts()
Forgery = Callable[[Path, dict[str, Path]], Any]

MISFITS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "names": ({"module": Renamed()}, ("has no 'head.weight'", "has 'last.weight', which the model does not have")),
    "shapes": ({"module": Network(width=10)}, ("'first.weight' was saved with shape (8, 6), now (10, 6)",)),
    "settings": (
        {"compressor": make_compressor("powersgd", rank=2, iterations=2)},
        ("setting inner.rank: saved with 1, now 2", "setting inner.iterations: saved with 1, now 2"),
    ),
    "optimizer": ({"optimizer": torch.optim.Adagrad}, ("optimizer: saved from SGD, now Adagrad",)),
}
"""A run with these settings cannot load another's checkpoint, and says why."""
FILES = ["manifest.json", "shared.pt", "rank0.pt", "rank1.pt"]
CUTS, FLIPS = 5, 15  # which bits does not matter: the whole file has one checksum


def check_refused(told: Told, *words: str) -> None:
    assert told.text, f"{told.damage}: was not refused"
    assert not told.changed, told
    for word in words:
        assert word in told.text, told


# --- damaged files ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_cut_or_flipped_file_is_refused_by_name_on_every_rank_or_its_content_is_whole(
    rank: int, tmp_path: Path
) -> list[bool]:
    """Cut every file at many lengths, then flip bytes in it; return which of these were refused."""
    run = begin(rank, tmp_path)
    path, saved = run.save(), run.digest()
    run.train(2)
    run.directory = tmp_path / "later"
    later = run.save()
    run.directory, now, every_one = path, run.digest(), list[Told]()
    contents = {name: (path / name).read_bytes() for name in FILES}
    dist.barrier()
    for name, whole in contents.items():
        for damage, content in _damages(name, whole):
            if rank == 0:  # the others read when rank 0 has found the checkpoint
                _replace(path / name, content)
            every_one.append(run.told(damage, saved, now))
            if not every_one[-1].text:
                run.load(directory=later)
        if rank == 0:
            (path / name).write_bytes(whole)
    every_one.append(run.told("none", saved))
    assert len(every_one) == len(FILES) * (1 + CUTS + FLIPS) + 1
    for told in every_one:
        if told.damage.startswith(("cut", "missing")):
            check_refused(told, told.damage.split()[1])
        elif told.damage.startswith("flip") and told.text:
            check_refused(told, "checkpoint-00001-step-3")
        else:
            assert told.restored, told
    refused = Counter(told.damage.split()[1] for told in every_one if told.damage.startswith("flip") and told.text)
    assert all(refused[name] == FLIPS for name in FILES if name != "manifest.json"), refused
    return [bool(told.text) for told in every_one]


def _damages(name: str, whole: bytes) -> Iterator[tuple[str, bytes | None]]:
    chance = random.Random(name)
    yield f"missing {name}", None
    for cut in range(CUTS):
        yield f"cut {name} at {cut}/{CUTS}", whole[: len(whole) * cut // CUTS]
    for _ in range(FLIPS):
        place, bits = chance.randrange(len(whole)), chance.randrange(1, 256)
        yield f"flip {name} at {place}", whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :]


def _replace(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


# --- forged files -----------------------------------------------------------------------------------------------------


class Payload:
    """Leave a file behind where a pickle of it is executed."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.mark}'",)


def _other_version(path: Path, runs: dict[str, Path]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layout": 2}))


def _rewrite_hooks(path: Path, **changes: Any) -> None:
    content = torch.load(path)
    torch.save(content | {"hooks": content["hooks"] | changes}, path)


def _rewritten(**changes: Any) -> Forgery:
    return lambda path, runs: torch.save(torch.load(path) | changes, path)


def _with_hooks(**changes: Any) -> Forgery:
    return lambda path, runs: _rewrite_hooks(path, **changes)


def _written(content: bytes) -> Forgery:
    return lambda path, runs: path.write_bytes(content)


def _of(other: str) -> Forgery:
    return lambda path, runs: shutil.copy(runs[other] / path.name, path)


def _saved(zipped: bool) -> Forgery:
    return lambda path, runs: torch.save(Payload(runs["mark"]), path, _use_new_zipfile_serialization=zipped)


OTHER_SAVE = "belongs to another save than"
FORGED: dict[str, tuple[str, Forgery, tuple[str, ...]]] = {
    "no JSON": ("manifest.json", _written(b"step: 3"), ("manifest.json", "cannot be read")),
    "no text": ("manifest.json", _written(b"\xff\xfe\x00"), ("manifest.json", "cannot be read")),
    "version of the manifest": ("manifest.json", _other_version, ("was saved in layout 2", "reads layout 4")),
    "version of a file": ("rank1.pt", _rewritten(layout=2), ("rank1.pt", "layout 4")),
    "version of the hook": ("shared.pt", _with_hooks(layout=5), ("the hook's state was saved in layout 5",)),
    "kind of entries": ("shared.pt", _with_hooks(replicated=[1]), ("replicated: expected dict, got list",)),
    "hooks": ("shared.pt", _rewritten(hooks=[1]), ("hooks",)),
    "model": ("shared.pt", _rewritten(model=1), ("shared.pt", "model: expected dict, got ")),
    "generator": ("rank1.pt", _rewritten(generators={"cpu": torch.zeros(3)}), ("rank 1", "RNG state")),
    "no generators": ("rank0.pt", _rewritten(generators=None), ("rank0.pt", "generators: expected dict, got nothing")),
    "buffer": (
        "rank1.pt",
        _rewritten(buffers={"norm.running_mean": torch.ones(1)}),
        ("'norm.running_mean' was saved with shape (1,), now (8,)",),
    ),
    "another step": ("rank1.pt", _of("step 17"), (f"rank1.pt {OTHER_SAVE}", "step 17")),
    "another save": ("rank1.pt", _of("twin"), (f"rank1.pt {OTHER_SAVE}", "manifest.json")),
    "another shared.pt": ("shared.pt", _of("twin"), (f"shared.pt {OTHER_SAVE}", "manifest.json")),
    "another manifest": ("manifest.json", _of("twin"), (f"shared.pt {OTHER_SAVE} manifest.json (step 3;",)),
    "payload alone": ("rank0.pt", _saved(True), ("rank0.pt", "torch.load rejects it")),
    "payload in the old format": ("shared.pt", _saved(False), ("shared.pt", "cannot be read")),
}
"""By name: the file, how it is forged, and what is said of it."""


@facts
def a_forged_file_is_refused_and_nothing_in_it_is_executed(rank: int, folder: Path) -> None:
    """Rewrite a file so that sizes and checksums are right."""
    run = begin(rank, folder)
    path = run.save()
    runs = {"mark": folder / "executed", "step 17": run.save(step=17)}
    run.train(1)
    runs["twin"] = run.save(step=3, keep=None)
    run.train(1)
    for damage, (name, forge, words) in FORGED.items():
        run.directory = folder / damage
        if rank == 0:
            shutil.copytree(path, run.directory)
            forge(run.directory / name, runs)
            if name != "manifest.json":
                _write_true_sums(run.directory)
        check_refused(run.told(damage), *words)
    assert not runs["mark"].exists()


def _write_true_sums(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    contents = {name: (path / name).read_bytes() for name in manifest["files"]}
    manifest["files"] = {name: len(content) for name, content in contents.items()}
    manifest["crc32"] = {name: f"{zlib.crc32(content):08x}" for name, content in contents.items()}
    (path / "manifest.json").write_text(json.dumps(manifest))


@facts
def a_checkpoint_of_another_run_is_refused_and_says_what_differs(rank: int, folder: Path) -> None:
    """Load a good checkpoint that does not fit, and one that lacks something that the run wants."""
    saved = begin(rank, folder)
    path = saved.save()
    for name, (settings, words) in MISFITS.items():
        check_refused(begin(rank, folder, **settings).told(name, directory=path), *words)
    without = begin(rank, folder, "without", optimizer=torch.optim.Adam, scales=False)
    without.save(hooks=None)
    check_refused(without.told("hooks", directory=without.directory), "it was saved without hooks=")
    scaled = begin(rank, folder, optimizer=torch.optim.Adam).told("scaler", directory=without.directory, hooks=None)
    check_refused(scaled, "scaler: checkpoint has no 'scale'")


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


def test_a_file_that_was_edited_and_written_again_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, step=3, model=torch.nn.Linear(2, 2))
    content = torch.load(path / "rank0.pt")
    content["generators"]["cpu"] = torch.get_rng_state()
    with (path / "rank0.pt").open("wb") as file:  # opened here: torch writes a path's own name into the file
        torch.save(content, file)
    with pytest.raises(CheckpointError, match=r"rank0.pt was changed after it was saved: its CRC-32 is"):
        load_checkpoint(path, model=torch.nn.Linear(2, 2))


@pytest.mark.parametrize("where", ["alone", "state_dict", "settings", "state"])
def test_torch_load_executes_nothing_at_its_defaults(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = Payload(tmp_path / "executed")
    content: dict[str, Any] = {"alone": payload, "state_dict": {"layout": 4, "local": {"rank0": payload}}}
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


test = facts.tests()
