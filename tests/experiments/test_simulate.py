"""Simulations: from made-up measurements, from sizes, and from one small real measurement."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

import commhooks
from commhooks.communicators.links import Link
from commhooks.planning.costs import BACKENDS, Costs, Sample
from commhooks.planning.sizes import step_of_size
from commhooks.planning.step_time import Stage
from experiments.commands.cli import app
from experiments.commands.simulate import numbers_in
from experiments.machine import machine, versions
from experiments.simulate.measured import BucketTimes, ComputeTimes, HookTimes, Measured
from experiments.simulate.measuring import Asked, measure
from experiments.simulate.request import DATA, PICTURE, TABLE
from experiments.simulate.request import Request as SimulationRequest
from experiments.simulate.simulating import simulate_measured, simulate_sizes
from experiments.specs import Spec

GATHER = (("all-gather", 1000),)


def gathering(by_workers: dict[int, float]) -> HookTimes:
    """Return a hook of one gather, whose answers take as many seconds to add up as given for each number of workers."""
    times = {workers: (BucketTimes((0.01,), (GATHER,), after),) for workers, after in by_workers.items()}
    return HookTimes("fifo", times, {})


def exchanging() -> HookTimes:
    """Return a hook whose gather shrinks with the ranks, as that of two hops does."""
    times = {
        workers: (BucketTimes((0.01, 0.02), ((("all-to-all", 1024),), (("all-gather", 1024 // workers),)), 0.03),)
        for workers in (2, 4)
    }
    return HookTimes("fifo", times, {8: (((("all-to-all", 1024),), (("all-gather", 128),)),)})


MADE_UP = Measured(
    task="made-up",
    parameters=1000,
    compute=ComputeTimes(0.09, 0.01, (0.09,), (("weight",),)),
    hooks={"top-k": gathering({2: 0.002, 4: 0.004}), "int8": exchanging()},
    versions=versions(),
    machine=machine(),
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "measured.json"
    MADE_UP.write(path)
    return path


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *words], env={"COLUMNS": "200"})
    return result.exit_code, " ".join(result.output.split())


def test_measurements_survive_a_file(saved: Path) -> None:
    assert Measured.read(saved) == MADE_UP


def test_what_is_added_up_after_a_gather_grows_with_the_ranks_and_the_rest_stays() -> None:
    hook = MADE_UP.hooks["top-k"]
    (within,), (beyond,) = hook.buckets([0.09], 3), hook.buckets([0.09], 1024)
    assert within.after == pytest.approx(0.003)
    assert beyond.after == pytest.approx(1.024)
    assert beyond.stages == (Stage(pytest.approx(0.01), GATHER),)  # type: ignore[arg-type]  # it compares like a float
    constant = gathering({2: 0.004, 4: 0.002}).buckets([0.09], 1024)
    assert constant[0].after == pytest.approx(0.002)  # it did not grow, and it will not shrink


def test_answers_of_the_same_size_take_the_same_time_with_any_number_of_ranks() -> None:
    (bucket,) = MADE_UP.hooks["int8"].buckets([0.09], 1024)
    assert [stage.seconds for stage in bucket.stages] == pytest.approx([0.01, 0.02])
    assert bucket.after == pytest.approx(0.03)


def test_a_bucket_that_starts_other_collectives_with_more_ranks_counts_as_with_the_most() -> None:
    """64 ranks would send more codes than elements: the bucket is averaged uncompressed."""
    counted = dict(exchanging().counted) | {64: (((("all-reduce", 512),),),)}
    hook = HookTimes("fifo", exchanging().by_workers, counted)
    assert hook.sends(32) == hook.sends(64) == hook.sends(100) == (((("all-reduce", 512),),),)
    assert hook.sends(5) == exchanging().sends(5)
    assert len(hook.buckets([0.09], 64)[0].stages) == 1


def test_payloads_that_were_not_counted_follow_those_that_were() -> None:
    hook = MADE_UP.hooks["int8"]
    assert hook.sends(8) == (((("all-to-all", 1024),), (("all-gather", 128),)),)
    assert hook.sends(64) == (((("all-to-all", 1024),), (("all-gather", 16),)),)
    assert [hook.is_counted(ranks) for ranks in (2, 3, 8, 64)] == [True, False, True, False]
    assert MADE_UP.hooks["top-k"].is_counted(1000)
    rows = {workers: (BucketTimes((0.01,), ((("all-to-all", 1024),),), 0.03),) for workers in (2, 4)}
    assert not HookTimes("fifo", rows, {}).is_counted(1000)  # 1,024 bytes do not divide into rows for so many
    assert not gathering({2: 0.002}).is_counted(1000)  # nobody knows whether it is the same for others


def test_what_lies_between_the_workers_that_were_timed_is_said_to_be_interpolated() -> None:
    link, hooks = Link(rate=math.inf), (Spec("top-k"),)
    within, timed = (
        simulate_measured(SimulationRequest(hooks=hooks, ranks=ranks, links=(link,)), MADE_UP)
        for ranks in ((2, 3), (2, 4))
    )
    said = "Interpolated: the compression of top-k with 3 ranks, from that of the nearest of 2 and 4 workers."
    assert said in within.assumptions
    assert not any("polated" in text for text in (*timed.assumptions, timed.caption))


def test_compute_that_is_stated_scales_compression_too() -> None:
    link = Link(rate=math.inf)
    plain, scaled = (
        simulate_measured(
            SimulationRequest(hooks=(Spec("top-k"),), ranks=(2,), links=(link,), compute=compute), MADE_UP
        )
        for compute in (None, "300ms")
    )
    assert scaled.points[0].time.seconds == pytest.approx(3 * plain.points[0].time.seconds)
    assert any("by 3" in said and "300 ms" in said for said in scaled.assumptions)


def test_the_command_says_what_was_extrapolated_and_writes_a_table_a_picture_and_data(
    saved: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["--measured", str(saved), "--hook", "top-k", "--hook", "int8", "--ranks", "2,4,...,64", "--out", str(out)]
    code, text = run(*words, "--ranks-per-host", "8", "--inner-rate", "1Tbit/s", "--rate", "1Gbit/s")
    assert code == 0, text
    assert "Extrapolated: the payloads of int8 for 16, 32 and 64 ranks" in text
    assert "Extrapolated: the compression of top-k and int8 beyond the 4 workers" in text
    assert "1 Gbit/s, 8 ranks per host, 1 Tbit/s inside" in text
    assert "what they do only later, as after start_after" in text
    assert {path.name for path in out.iterdir()} == {TABLE, PICTURE, DATA}
    rows = list(csv.DictReader((out / TABLE).open(encoding="utf-8")))
    assert len(rows) == 2 * 2 * 6
    for row in rows:
        share = float(row["compute"]) / float(row["seconds"])
        assert float(row["utilisation"]) == pytest.approx(share, rel=2e-5)  # numbers have six digits
    assert json.loads((out / DATA).read_text())["assumptions"]
    assert (out / PICTURE).read_bytes().startswith(b"\x89PNG")
    code, text = run(*words)
    assert code == 2 and "replace it with --overwrite" in text


def test_sizes_alone_give_the_time_of_dense_gradients(tmp_path: Path) -> None:
    code, text = run("--parameters", "1B", "--compute", "0.1s", "--rate", "100Gbit/s", "--ranks", "2,8")
    assert code == 0 and "the time of compression is not counted" in text
    step = step_of_size(1e9, 4, 0.1)
    payload = sum(size for bucket in step.buckets for stage in bucket.stages for _, size in stage.collectives)
    assert payload == pytest.approx(4e9, rel=1e-6)
    assert step.buckets[-1].ready == pytest.approx(0.1)


def test_measurements_of_another_version_are_used_with_a_note_and_other_formats_rejected(saved: Path) -> None:
    raw = json.loads(saved.read_text())
    saved.write_text(json.dumps(raw | {"versions": versions() | {"torch": "1.0"}}))
    words = ["--measured", str(saved), "--hook", "top-k", "--ranks", "2"]
    code, text = run(*words)
    assert code == 0 and "measured with other versions: torch 1.0" in text
    wrong: list[dict[str, object]] = [
        {"format": 99},
        {"machine": {}},
        {"versions": None},
        {"parameters": "many"},
        {"hooks": {"top-k": {}}},
        {"compute": raw["compute"] | {"seconds": math.nan}},
        {"compute": raw["compute"] | {"ready": []}},
    ]
    for broken in (*(json.dumps(raw | change) for change in wrong), "[]", "{", json.dumps({"format": 1})):
        saved.write_text(broken)
        code, text = run(*words)
        assert code == 2 and "measure again with --task and --save" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "2,..."], "the last number must follow the dots"),
        (["--ranks", "4,2"], "expected ascending numbers"),
        (["--ranks", "two"], "expected ascending numbers"),
        (["--ranks-per-host", "8", "--ranks", "12"], "12 ranks do not fill hosts of 8"),
        (["--inner-rate", "1Tbit/s"], "with --ranks-per-host"),
        (["--rate", "fast"], "does not parse"),
        (["--algorithm", "tree"], "must be one of gloo, ring"),
        (["--parameters", "many", "--compute", "1s"], "such as '124M' or '1B'"),
        (["--parameters", "1B"], "--parameters needs the seconds"),
        (["--parameters", "1B", "--compute", "0.5x"], "--parameters needs the seconds"),
        (["--parameters", "1B", "--compute", "1s", "--task", "gpt"], "give one of --task"),
        (["--parameters", "1B", "--compute", "1s", "--hook", "powersgd"], "needs the shapes of the parameters"),
        (["--parameters", "1B", "--compute", "1s", "--save", "x.json"], "nothing is measured"),
        (["--measured", "missing.json"], "expected a file of format 1"),
        (["--task", "gtp"], "did you mean 'gpt'"),
        (["--hook", "powersdg"], "powersdg"),
        (["--latency", "1ms", "--latency", "2ms"], "takes one value"),
        (["--rate", "1Gbit/s", "--rate", "1000Mbit/s"], "1 Gbit/s is given twice"),
        (["--hook", "fp16", "--hook", "fp16"], "fp16 is given twice"),
        (["--hook", "torch.powersgd"], "is PyTorch's own, whose rounds"),
        (["--cores", "0"], "cores must be at least 1"),
        (["--backend", "mpi"], "backend 'mpi' is not known: expected one of gloo, none"),
        (["--copy-rate", "14GB/s"], "which --backend none does not count"),
        (["--compute", "fast"], "compute 'fast' does not parse"),
        (["--bucket-cap-mb", "nan"], "bucket_cap_mb must be above zero"),
        (["--parameters", "1B", "--compute", "1s", "--bucket-cap-mb", "1"], "--bucket-cap-mb is for measuring"),
        (["--measured", "missing.json", "--save", "x.json"], "--save is for measuring"),
    ],
)
def test_a_request_that_cannot_work_is_rejected_in_words(words: list[str], said: str) -> None:
    code, text = run(*words)
    assert code == 2 and said in text


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hook", ["all-reduce", "fp16"])
def test_estimate_and_simulate_agree_about_a_cluster_with_the_same_backend(backend: str, hook: str) -> None:
    """Four buckets of 25 MiB, four ranks, 100 Gbit/s; the estimate without compression, which sizes do not tell."""
    real = Costs.read()
    nothing = {
        name: dataclasses.replace(
            own, bucket_seconds=0.0, matrices=tuple(map(free, own.matrices)), vector=free(own.vector)
        )
        for name, own in real.hooks.items()
    }
    parameters = 4 * 25 * 2**18
    link = Link(rate=100e9, latency=50e-6)
    found = simulate_sizes(
        SimulationRequest(
            hooks=(Spec(hook),),
            ranks=(4,),
            links=(link,),
            parameters=parameters,
            compute="100ms",
            backend=backend,
            copy_rate=None if backend == "none" else 14e9,
        )
    )
    estimated = commhooks.estimate(
        parameters,
        compute=0.1,
        ranks=4,
        rate=link.rate,
        latency=link.latency,
        bucket_cap_mb=25,
        matrix=25 * 2**18,
        hooks=[hook],
        copy_rate=14e9,
        backend=backend,
        costs=dataclasses.replace(real, hooks=nothing),
    )
    ours, theirs = found.points[0].time, estimated.of(hook).time
    assert ours.seconds == pytest.approx(theirs.seconds)
    assert ours.bytes_sent == theirs.bytes_sent
    processor = ours.bytes_sent * real.hooks[hook].copies_per_byte / 14e9 if backend == "gloo" else 0.0
    assert ours.seconds == pytest.approx(0.1 + processor, abs=5e-3)  # and the last bucket's bytes, on the link
    assert any(said.startswith(f"Backend: {backend}.") for said in found.assumptions)


def free(sample: Sample) -> Sample:
    return dataclasses.replace(sample, rounds=(0.0,) * len(sample.rounds))


def test_files_that_cannot_be_written_are_an_error_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.simulate.simulating.measure", lambda asked, tell: pytest.fail("measured"))
    taken = tmp_path / "notes.txt"
    taken.write_text("mine")
    for words, said in (
        (["--out", str(taken)], "cannot be written"),
        (["--save", str(taken / "measured.json")], "cannot be written"),
        (["--save", str(tmp_path), "--overwrite"], "cannot be written"),
        (["--save", str(taken)], "notes.txt exists already; replace it with --overwrite"),
    ):
        code, text = run(*words)
        assert code == 2 and said in text, text
    assert taken.read_text() == "mine" and list(tmp_path.iterdir()) == [taken]


def test_no_step_is_measured_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, text = run("--task", "gpt:size=tiny")
    assert code == 2 and "without torchrun" in text


def test_a_hook_that_was_not_measured_is_rejected_with_those_that_were(saved: Path) -> None:
    code, text = run("--measured", str(saved), "--hook", "fp16")
    assert code == 2 and "'fp16' was not measured; there are top-k and int8" in text


def test_dots_stand_for_doubling() -> None:
    assert numbers_in("2,4,...,1024") == (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    assert numbers_in("3,...,10,20") == (3, 6, 10, 20)


@pytest.mark.timeout(120)  # it starts a process, which takes long on a busy machine
def test_a_real_measurement_has_every_bucket_round_and_payload() -> None:
    asked = Asked(
        task=Spec.parse("gpt:size=tiny", "task"),
        hooks=tuple(map(Spec.parse, ("all-reduce", "int8", "powersgd:rank=2"))),
        ranks=(2, 64),
        workers=(2, 3),
        steps=2,
        rounds=1,
        bucket_cap_mb=0.1,
    )
    found = measure(asked, lambda text: None)
    assert len(found.compute.buckets) > 1
    assert sum(map(len, found.compute.buckets)) == len({name for names in found.compute.buckets for name in names})
    assert list(found.compute.ready) == sorted(found.compute.ready)
    dense, exchanged, factors = found.hooks.values()
    payload = sum(size for rounds in dense.sends(1000) for ((_, size),) in rounds)
    assert payload == 4 * found.parameters
    assert [len(rounds) for rounds in factors.sends(2)] == [2] * len(found.compute.buckets)
    # Two hops: a rank serves 1/W of the blocks, so what each gathers shrinks with the ranks.
    assert exchanged.is_counted(64) and not exchanged.is_counted(100)
    gathered = {ranks: _gathered(exchanged, ranks) for ranks in (2, 64)}
    assert gathered[64] < gathered[2] / 8
    for hook in found.hooks:
        step = found.step(hook, 64)
        assert all(stage.seconds > 0 for bucket in step.buckets for stage in bucket.stages)


def _gathered(hook: HookTimes, ranks: int) -> int:
    sends = [send for rounds in hook.sends(ranks) for sends in rounds for send in sends]
    return sum(size for kind, size in sends if kind == "all-gather")
