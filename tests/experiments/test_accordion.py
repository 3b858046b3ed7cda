"""The reproduction of Accordion's logs: what its tables and sentences say of given numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.studies.blocks import Table
from experiments.studies.reproduce.accordion import REPRODUCTION, Settings

NOISE = (-0.01, 0.0, 0.01)  # by seed


def networks(accuracy: Mapping[str, float]) -> tuple[list[Sequence[Sequence[str]]], str]:
    default: Settings = REPRODUCTION.sizes["default"]
    settings = Settings(variants=default.variants, against=default.against, seeds=3)
    made = {"loss": 1.0, "diverged": None, "payload_bytes": 500.0}
    runs = [
        made | {"task": task, "variant": label, "seed": seed, "accuracy": accuracy[label] + noise * (label != "rank 4")}
        for task in (*settings.tasks, settings.longer)
        for label in settings.variants
        for seed, noise in enumerate(NOISE)
    ]
    for run in runs:
        run["payload_bytes"] = 1000.0 if run["variant"] == "rank 4" else 500.0
    longer = [run for run in runs if run["task"] == settings.longer and run["variant"] in settings.again().variants]
    blocks = REPRODUCTION.show(settings, {"runs": runs, "longer": longer})
    tables = [block.rows for block in blocks if isinstance(block, Table)]
    return tables, " ".join(block for block in blocks if isinstance(block, str))


def test_ranks_are_compared_with_rank_4_and_the_adaptive_one_with_rank_1_too() -> None:
    tables, text = networks({"all-reduce": 0.95, "rank 1": 0.6, "rank 2": 0.95, "rank 4": 0.95, "adaptive rank": 0.9})
    assert [len(rows) for rows in tables] == [5, 5, 2]
    assert "On the plain network: With rank 1, accuracy is 35.00 points lower than with rank 4" in text
    assert "No difference seen between rank 2 and rank 4" in text
    assert "The adaptive rank ends 30.00 points above rank 1" in text
    assert "It sends 0.50 of the bytes of rank 4 (rank 1: 0.50)" in text


def test_a_run_that_diverged_is_not_compared() -> None:
    default = REPRODUCTION.sizes["default"]
    _, text = networks(dict.fromkeys(default.variants, 0.9) | {"rank 1": float("nan")})
    assert "3 of 3 runs with rank 1 diverged" in text
    assert "points above rank 1" not in text
