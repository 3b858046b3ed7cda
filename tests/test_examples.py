"""The scripts in docs/examples do what the pages that show them say."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.tiers import THOROUGH
from tests.world import run_world
from tests.world.agent import agents_store, environment_of

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"


def run_script(rank: int, path: str, arguments: tuple[str, ...], wanted: str) -> Any:
    """Run the script as torchrun would, and return one of its module-level names."""
    os.environ["RANK"] = str(rank)
    sys.argv = [path, *arguments]
    value = runpy.run_path(path, run_name="__main__").get(wanted)
    return value.detach() if isinstance(value, torch.Tensor) else value


def run_example(name: str, *arguments: str, wanted: str = "") -> list[Any]:
    """Run the example on two ranks."""
    return on_two_ranks(run_script, name, arguments, wanted)


def on_two_ranks(function: Callable[..., Any], name: str, *arguments: Any) -> list[Any]:
    """Call a function of a script on two ranks, which meet in a store of this process, as in an agent's of torchrun."""
    store, path = agents_store(), str(EXAMPLES / name)
    environment = environment_of(store, 2)
    # PyTorch's DistributedDataParallel aborts in some exits.
    return run_world(function, 2, path, *arguments, backend=None, environment=environment, check_exit=False)


def run_house(rank: int, path: str, parent: str, steps: str) -> None:
    run_script(rank, path, (f"{parent}/{rank}", steps), "")


def tensors_in(content: Any, at: str = "") -> dict[str, torch.Tensor]:
    """Return all tensors in a nest of dictionaries and lists, by where they are."""
    if isinstance(content, torch.Tensor):
        return {at: content}
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return {key: found for name, value in items for key, found in tensors_in(value, f"{at}/{name}").items()}


def test_plain_ddp_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_example("plain_ddp.py", str(whole))
    halfway, end = sorted(path.name for path in whole.iterdir())
    shutil.copytree(whole / halfway, resumed / halfway)
    run_example("plain_ddp.py", str(resumed))
    kept, copied = (folder / halfway / "shared.pt" for folder in (whole, resumed))
    assert copied.stat().st_mtime_ns == kept.stat().st_mtime_ns  # it went on from there: nothing was saved again

    for file in ("shared.pt", "rank0.pt", "rank1.pt"):
        expected, found = (tensors_in(torch.load(folder / end / file)) for folder in (whole, resumed))
        assert expected.keys() == found.keys()
        assert expected
        assert all(torch.equal(tensor, found[where]) for where, tensor in expected.items())


@pytest.mark.parametrize(("name", "steps"), [("sharded_blocks.py", "2"), ("two_houses.py", "3")])
def test_what_resumes_after_many_steps_takes_a_few(name: str, steps: str, tmp_path: Path) -> None:
    run_example(name, str(tmp_path), steps)


@THOROUGH
@pytest.mark.parametrize("name", ["sharded_blocks.py", "hsdp.py"])
def test_a_sharded_model_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_example(name, str(whole), "40")
    shutil.copytree(whole / "step-20", resumed / "step-20")
    run_example(name, str(resumed), "40")
    ends = []
    for folder in (whole, resumed):
        dcp_to_torch_save(folder / "step-40", tmp_path / f"{folder.name}.pt")
        ends.append(tensors_in(torch.load(tmp_path / f"{folder.name}.pt")))
    assert ends[0].keys() == ends[1].keys()
    assert {at.split("/")[1] for at in ends[0]} == {"model", "optimizer", "hooks"}
    assert all(torch.equal(tensor, ends[1][where]) for where, tensor in ends[0].items())


@THOROUGH
def test_two_houses_resume_from_the_newest_checkpoint_that_both_have(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder in (whole, resumed):
        folder.mkdir()
    on_two_ranks(run_house, "two_houses.py", str(whole), "120")
    for house in "01":
        assert {path.name for path in (whole / house).iterdir()} == {"60.pt", "120.pt"}
        (resumed / house).mkdir()
        shutil.copy(whole / house / "60.pt", resumed / house)
    (resumed / "1" / "120.pt").write_bytes(b"of a run in which house 0 came no further than 60")
    on_two_ranks(run_house, "two_houses.py", str(resumed), "120")
    for house in "01":
        expected, found = (tensors_in(torch.load(folder / house / "120.pt")) for folder in (whole, resumed))
        assert expected.keys() == found.keys() and expected
        assert all(torch.equal(tensor, found[where]) for where, tensor in expected.items())


def test_a_compressor_of_your_own_trains_on_pytorchs_ddp() -> None:
    losses = run_example("own_compressor.py", wanted="loss")
    assert max(losses) < 1e-3


def test_each_way_to_train_an_adapter_sends_what_the_page_says() -> None:
    page = (EXAMPLES.parent / "guide" / "adapters.md").read_text(encoding="utf-8")
    (sent, other) = run_example("adapters.py", "1", "1", wanted="sent")
    assert sent == other and len(sent) == 9
    for way, number in sent.items():
        assert not number or f"| {way} | {number:,.0f} |" in page, (way, number)  # a round of DiLoCo takes more steps


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_a_page_shows_the_example(path: Path) -> None:
    line = f'--8<-- "docs/examples/{path.name}"'  # ruff formats it to pieces in a fence that begins with ```py
    pages = (page.read_text(encoding="utf-8") for page in EXAMPLES.parent.rglob("*.md"))
    assert any(line in map(str.strip, page.splitlines()) for page in pages)
