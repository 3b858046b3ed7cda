"""The command `commhooks check`: what it takes, what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from commhooks.experiments.commands.cli import app
from tests.commhooks.test_own_compressors import EXAMPLES

OWN = """
import dataclasses
from commhooks.compressors import RandomK
from commhooks.codecs import Int8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lossy(RandomK):
    def loss(self, name, parameter):
        return None

    def places(self, name, gradient, step):
        return super().places(str(gradient.storage_offset()), gradient, step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crashing(RandomK):
    def compress(self, bucket, context):
        raise ArithmeticError("of the author")
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fine(Int8):
    block: int = 32
"""


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["check", *words], env={"COLUMNS": "300"})


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_codes.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


def test_laws_that_are_kept_end_with_0_a_line_each() -> None:
    ended = run("own_codes.py:Fine", "--law", "replicas", "--law", "unbiased")
    assert ended.exit_code == 0, ended.output
    lines = ended.output.splitlines()
    assert lines[0].startswith("ErrorFeedback(inner=TwoHop(codec=Fine(block=32")
    assert [line.split()[:2] for line in lines[2:4]] == [["kept", "replicas"], ["kept", "unbiased"]]
    assert lines[-1].startswith("2 kept; ")


def test_a_broken_law_ends_with_1_and_says_the_usual_causes() -> None:
    ended = run("own_codes.py:Lossy:ratio=0.5", "--law", "buckets", "--law", "conservation", "--json", "found.json")
    assert ended.exit_code == 1
    assert "broken         buckets" in ended.output and "usual causes: seeding by `bucket.index`" in ended.output
    found = json.loads(Path("found.json").read_text())
    assert [law["verdict"] for law in found["laws"]] == ["broken", "does not apply"]
    assert found["compressor"].endswith(":Lossy:ratio=0.5")


def test_an_error_in_the_authors_code_names_its_line() -> None:
    for words, code, said in (
        ("own_codes.py:Crashing", 1, ("crashed        steps", ": raise ArithmeticError")),
        (f"{EXAMPLES}/own_compressor.py:RandomRows:every=0", 2, ("ZeroDivisionError", "own_compressor.py, line")),
        ("own_codes.py:Missing", 2, ("has no 'Missing'",)),
    ):
        ended = run(words)
        assert ended.exit_code == code and all(one in " ".join(ended.output.split("\n")) for one in said), ended.output
