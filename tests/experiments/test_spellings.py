"""One spelling of a hook means the same wherever it is written: crossed with the places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import commhooks
from commhooks.exchange.checks import read_text
from commhooks.exchange.options import Options
from commhooks.experiments.checking import compressor_named
from commhooks.experiments.hooks import make_hook, policy_of
from commhooks.experiments.planning.candidates import candidate_of
from commhooks.experiments.specs import Spec
from commhooks.experiments.sweeps.plan import plan
from commhooks.experiments.sweeps.yaml_file import read_sweep
from commhooks.experiments.training.diloco import settings_of
from commhooks.language.compressor import Compressor
from commhooks.making import read_hook
from commhooks.wrappers import ErrorFeedback
from commhooks.wrappers.error_feedback import with_feedback

OWN = """
import dataclasses
from commhooks.codecs import Int8
from commhooks.compressors import TopK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(TopK):
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bytes(Int8):
    pass
"""
TEXTS = (
    "int8",
    "powersgd:rank=2,policy=fused",
    "PowerSGD(rank=2, policy='fused')",
    "own.py:Mine:ratio=0.1",
    "folder/own.py:Mine:ratio=0.1,policy=fused",
    "own.py:Bytes:block=64,stochastic=False",
    "own.py:Bytes:block=64,error_feedback=false,start_after=2",
)
Place = Callable[[str], tuple[Compressor, str]]


def compared(text: str) -> tuple[Compressor, str]:
    (run,) = plan(["digits:size=tiny"], [text], links=["10Mbit/s"])
    assert Spec.parse(run.hook.label) == run.hook, "the label, which load_table shows, is the same hook"
    return with_feedback(make_hook(run.hook)), policy_of(run.hook)


def swept(text: str) -> tuple[Compressor, str]:
    Path("sweep.yaml").write_text(f'task: digits:size=tiny\nhook: "{text}"\n')
    (run,) = read_sweep(Path("sweep.yaml")).runs
    return with_feedback(make_hook(run.hook)), policy_of(run.hook)


def attached(text: str) -> tuple[Compressor, str]:
    made, options = read_text("attach", text, Options())
    return with_feedback(made), options.get("policy", "fifo")


def planned(text: str) -> tuple[Compressor, str]:
    found = candidate_of(text)
    return found.compressor, found.policy


def checked(text: str) -> tuple[Compressor, str]:
    return compressor_named(text), read_hook(text).policy or "fifo"  # laws know no policy


PLACES: tuple[Place, ...] = (compared, swept, planned, checked)


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    for folder in (tmp_path, tmp_path / "folder"):
        (folder / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_means_the_same_compressor_and_policy_in_every_place(text: str) -> None:
    expected = attached(text)
    assert expected[1] == ("fused" if "fused" in text else "fifo")
    for place in PLACES:
        # Only `check` feeds back what an own class loses, as its author would have to.
        found = place(text)
        if place is checked and "Mine" in text:
            assert isinstance(found[0], ErrorFeedback)
            found = found[0].inner, found[1]
        assert found == expected, place.__name__


def test_diloco_is_read_where_models_are_trained_and_refused_in_one_sentence_where_gradients_are_averaged() -> None:
    text = "diloco:every=30,compressor=(own.py:Bytes:block=64)"
    (run,) = plan(["digits:size=tiny"], [text], links=["10Mbit/s"], steps=30)
    inside = settings_of(run.hook)["compressor"]
    assert inside == read_hook("own.py:Bytes:block=64").compressor
    for place in (attached, planned, checked):
        with pytest.raises(ValueError, match="DiLoCo averages models, not gradients, so it is no compressor"):
            place(text)


def test_what_only_attaching_knows_is_refused_elsewhere_and_twice() -> None:
    refused: list[tuple[Callable[..., object], str, str]] = [
        (lambda text: read_text("attach", text, Options(policy="fifo")), "int8:policy=fused", "policy is given twice"),
        (attached, "int8:gather=int8", "gather is the form of a sharded model's parameters"),
        (commhooks.make_compressor, "int8:policy=fused", "policy is no setting of a compressor, but of attaching one"),
        *((place, "int8:policy=sometimes", "policy must be one of fifo, fused") for place in (attached, *PLACES)),
    ]
    for call, text, words in refused:
        with pytest.raises(ValueError, match=words):
            call(text)
