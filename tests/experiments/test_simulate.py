"""Simulations: from made-up measurements, from sizes, and from one small real measurement."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments import predicting
from experiments.commands.cli import app
from experiments.commands.simulate import numbers_in
from experiments.machine import versions
from experiments.predicting import Profile
from experiments.predicting.candidates import ALL_REDUCE, DENSE, NOOP
from experiments.predicting.costs import BACKENDS, Costs, HookCosts
from experiments.predicting.errors import ProfileError
from experiments.predicting.estimates import MATRIX
from experiments.predicting.link import Link
from experiments.predicting.predicting import predict
from experiments.predicting.profiles import (
    BucketProfile,
    GradientProfile,
    HookProfile,
    RoundProfile,
    Seconds,
    Sends,
    StepParts,
)
from experiments.predicting.series import Counted, Series
from experiments.predicting.sizes import square_matrices
from experiments.predicting.tables import Stated
from experiments.simulate.measuring import Asked, measure, read_series, write_series
from experiments.simulate.request import DATA, PICTURE, TABLE
from experiments.simulate.request import Request as SimulationRequest
from experiments.simulate.simulating import Simulation, simulate_measured, simulate_sizes
from experiments.specs import Spec

GATHER = (("all-gather", 1000),)
STEP = StepParts(Seconds(0.1, 0.1, 0.1), 0.0, 0.09, 0.0, 0.01, steps=9)


def hook(before: Sequence[float], sends: Sequence[Sends], after: float, unknown: float = 0.0) -> HookProfile:
    """Return a hook of one bucket, which is ready when all is computed, and whose step takes what it is made of."""
    bucket = BucketProfile(("weight",), 4000, 0.09, tuple(map(RoundProfile, before, sends)), after)
    step = STEP.lasting(0.1 + sum(before) + after + unknown)
    return HookProfile("noop" if not sends else "made up", "fifo", step, (bucket,))


def series(hooks: Mapping[str, Mapping[int, HookProfile]], *counted: Counted) -> Series:
    """Return profiles of hooks as one of each number of ranks with which they were timed."""
    numbers = next(iter(hooks.values())).keys()
    profiles = (
        Profile(
            model="made-up",
            fingerprint="",
            ranks=ranks,
            ranks_per_host=1,
            ddp="core",
            cores=1,
            plain=STEP,
            noop=STEP,
            gradients=(GradientProfile("weight", (1000,), 4000, 0.09),),
            hooks={NOOP: hook((), (), 0.0)} | {label: timed[ranks] for label, timed in hooks.items()},
            own_share=0.0,
            versions=versions(),
            machine="2 cores, a processor",
            load=0.5,
        )
        for ranks in numbers
    )
    return Series(tuple(profiles), counted)


def gathering(by_ranks: Mapping[int, float], unknown: float = 0.0) -> Mapping[int, HookProfile]:
    """Return a hook of one gather, whose answers take as many seconds to add up as given for each number of ranks."""
    return {ranks: hook((0.01,), (GATHER,), after, ranks * unknown) for ranks, after in by_ranks.items()}


def exchanging() -> Mapping[int, HookProfile]:
    """Return a hook whose gather shrinks with the ranks, as that of two hops does."""
    return {
        ranks: hook((0.01, 0.02), ((("all-to-all", 1024),), (("all-gather", 1024 // ranks),)), 0.03) for ranks in (2, 4)
    }


OF_EIGHT = Counted("int8", 8, (((("all-to-all", 1024),), (("all-gather", 128),)),))
UNLIMITED = Link(rate=math.inf)
MADE_UP = series({"top-k": gathering({2: 0.002, 4: 0.004}), "int8": exchanging()}, OF_EIGHT)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "measured.json"
    write_series(MADE_UP, path)
    return path


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *words], env={"COLUMNS": "200"})
    return result.exit_code, " ".join(result.output.split())


def simulated(found: Series = MADE_UP, link: Link = UNLIMITED, **asked: Any) -> Simulation:
    """Simulate top-k with 2 ranks, or what is asked."""
    return simulate_measured(
        SimulationRequest(**{"hooks": (Spec("top-k"),), "ranks": (2,), "links": (link,), **asked}), found
    )


def test_measurements_survive_a_file(saved: Path) -> None:
    assert read_series(saved) == MADE_UP


def test_what_is_added_up_after_a_gather_grows_with_the_ranks_and_the_rest_stays() -> None:
    (within,), (beyond,) = (MADE_UP.at(ranks).hooks["top-k"].buckets for ranks in (3, 1024))
    assert within.after == pytest.approx(0.003)
    assert beyond.after == pytest.approx(1.024)
    assert beyond.rounds == (RoundProfile(pytest.approx(0.01), GATHER),)  # type: ignore[arg-type]  # it compares like a float
    (constant,) = series({"top-k": gathering({2: 0.004, 4: 0.002})}).at(1024).hooks["top-k"].buckets
    assert constant.after == pytest.approx(0.002)  # it did not grow, and it will not shrink


def test_answers_of_the_same_size_take_the_same_time_with_any_number_of_ranks() -> None:
    (bucket,) = MADE_UP.at(1024).hooks["int8"].buckets
    assert [one.seconds for one in bucket.rounds] == pytest.approx([0.01, 0.02])
    assert bucket.after == pytest.approx(0.03)


def test_what_a_step_takes_beyond_the_model_is_kept_for_every_number_of_ranks() -> None:
    found = series({"top-k": gathering({2: 0.002, 4: 0.004}, unknown=0.001)})  # 2 and 4 ms more: 3 in the median
    seconds = {ranks: found.at(ranks).hooks["top-k"].step.seconds.median for ranks in (2, 3, 1024)}
    assert seconds == pytest.approx({2: 0.1 + 0.012 + 0.003, 3: 0.1 + 0.013 + 0.003, 1024: 0.1 + 0.01 + 1.024 + 0.003})


def test_other_load_makes_no_step_shorter_than_its_compute_and_is_named() -> None:
    found = series({"top-k": gathering({2: 0.002, 4: 0.004}, unknown=-0.02)})
    assert found.at(2).hooks["top-k"].step.seconds.median == pytest.approx(0.1 + 0.012)
    disturbed, calm = simulated(found), simulated()
    said = [" ".join(one.assumptions) for one in (disturbed, calm)]
    assert ["Other load disturbed the steps" in one for one in said] == [True, False]
    assert disturbed.points[0].time.utilisation <= 1.0


def test_a_bucket_that_starts_other_collectives_with_more_ranks_counts_as_with_the_most() -> None:
    """64 ranks would send more codes than elements: the bucket is averaged uncompressed."""
    dense = (((("all-reduce", 512),),),)
    found = series({"int8": exchanging()}, OF_EIGHT, Counted("int8", 64, dense))
    assert found.sends("int8", 32) == found.sends("int8", 64) == found.sends("int8", 100) == dense
    assert found.sends("int8", 5) == MADE_UP.sends("int8", 5)
    assert len(found.at(64).hooks["int8"].buckets[0].rounds) == 1


def test_payloads_that_were_not_counted_follow_those_that_were() -> None:
    assert MADE_UP.sends("int8", 8) == (((("all-to-all", 1024),), (("all-gather", 128),)),)
    assert MADE_UP.sends("int8", 64) == (((("all-to-all", 1024),), (("all-gather", 16),)),)
    assert [MADE_UP.is_counted("int8", ranks) for ranks in (2, 3, 8, 64)] == [True, False, True, False]
    assert MADE_UP.is_counted("top-k", 1000)
    rows = {ranks: hook((0.01,), ((("all-to-all", 1024),),), 0.03) for ranks in (2, 4)}
    assert not series({"rows": rows}).is_counted("rows", 1000)  # 1,024 bytes do not divide into rows for so many
    alone = series({"top-k": gathering({2: 0.002})})
    assert not alone.is_counted("top-k", 1000)  # nobody knows whether it is the same for others
    assert alone.sends("top-k", 1000) == ((GATHER,),)


def test_profiles_that_are_no_series_are_refused() -> None:
    other = {2: hook((0.01,), (GATHER,), 0.0), 4: hook((0.01, 0.01), (GATHER, GATHER), 0.0)}
    with pytest.raises(ProfileError, match="hook 'top-k' takes other rounds with more ranks"):
        series({"top-k": other})
    with pytest.raises(ProfileError, match=r"ascending \(got \[4, 2\]\)"):
        Series(MADE_UP.profiles[::-1])


def test_what_lies_between_the_workers_that_were_timed_is_said_to_be_interpolated() -> None:
    within, timed = simulated(ranks=(2, 3)), simulated(ranks=(2, 4))
    said = "Interpolated: the compression of top-k with 3 ranks, from that of the nearest of 2 and 4 ranks."
    assert said in within.assumptions
    assert not any("polated" in text for text in (*timed.assumptions, timed.caption))


def test_cores_that_were_not_measured_are_modelled_and_named() -> None:
    one, two = simulated(cores=1), simulated(cores=2)
    said = "It was measured with 1 core; what another number changes is modelled."
    assert said in two.assumptions and said not in one.assumptions
    assert two.points[0].time.seconds == pytest.approx(one.points[0].time.seconds)  # its bucket comes at the end


def test_compute_that_is_stated_scales_compression_too() -> None:
    plain, scaled = simulated(), simulated(compute="300ms")
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
    assert "Extrapolated: the compression of top-k and int8 beyond the 4 ranks" in text
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
    sizes = Stated(shapes=square_matrices(1e9, MATRIX), compute=0.1, are_alike=True)
    hook = sizes.profile({DENSE: HookCosts.free(DENSE)}, 2, 0.0).hooks[ALL_REDUCE]
    payload = sum(size for bucket in hook.buckets for one in bucket.rounds for _, size in one.sends)
    assert payload == pytest.approx(4e9, rel=1e-6)
    assert hook.buckets[-1].ready == pytest.approx(0.1)


def test_a_round_of_seldom_communication_is_divided_among_its_steps() -> None:
    every_step, seldom = Spec("int8"), Spec.parse("diloco:every=10,compressor=int8")
    link = Link(rate=8e5, latency=0.0, algorithm="ring")
    found = simulated(link=link, hooks=(every_step, seldom))
    often, rarely = (point.time for point in found.points)
    assert rarely.bytes_sent == pytest.approx(often.bytes_sent / 10, abs=1)
    assert rarely.communication == pytest.approx(often.communication / 10)
    assert rarely.compute == pytest.approx(often.compute)
    assert rarely.seconds == pytest.approx(often.compute + (often.communication + often.compression) / 10, rel=0.01)
    said = found.assumptions
    assert any(one.startswith("With seldom communication, a step's time is a part of that of a round") for one in said)


def test_seldom_communication_is_simulated_from_sizes_and_measurements_of_its_compressor(saved: Path) -> None:
    sizes = ("--parameters", "25M", "--compute", "200ms", "--ranks", "4")
    code, text = run(*sizes, "--hook", "diloco:every=30,fragments=3,delay=5,compressor=bf16", "--rate", "100Mbit/s")
    assert code == 0 and "63.7 %" in text
    code, text = run(*sizes, "--hook", "diloco:every=30,compressor=int4")
    assert code == 2 and "needs the shapes of the parameters and its compression measured" in text
    code, text = run(*sizes, "--hook", "diloco:every=3,delay=3")
    assert code == 2 and "delay from 0 to 2, below every" in text
    code, text = run("--measured", str(saved), "--hook", "diloco:every=3,compressor=int4")
    assert code == 2 and "hook 'int4' was not measured" in text


def test_measurements_of_another_version_are_used_with_a_note_and_other_formats_rejected(saved: Path) -> None:
    raw = json.loads(saved.read_text())
    older = [one | {"versions": versions() | {"torch": "1.0"}} for one in raw["profiles"]]
    saved.write_text(json.dumps(raw | {"profiles": older}))
    words = ["--measured", str(saved), "--hook", "top-k", "--ranks", "2"]
    code, text = run(*words)
    assert code == 0 and "measured with other versions: torch 1.0" in text
    wrong: list[dict[str, object]] = [
        {"format": 99},
        {"profiles": []},
        {"profiles": [raw["profiles"][0] | {"versions": None}]},
        {"profiles": [raw["profiles"][0] | {"ranks": "many"}]},
        {"profiles": [raw["profiles"][0] | {"hooks": {"top-k": {}}}]},
        {"profiles": [raw["profiles"][0] | {"noop": raw["profiles"][0]["noop"] | {"backward": math.nan}}]},
        {"counted": [{"hook": "int8", "ranks": 8, "payloads": []}]},
    ]
    for broken in (*(json.dumps(raw | change) for change in wrong), "[]", "{", json.dumps({"format": 1})):
        saved.write_text(broken)
        code, text = run(*words)
        assert code == 2 and "measure again with --task and --save" in text


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hook", ["all-reduce", "fp16"])
def test_estimate_and_simulate_agree_about_a_cluster_with_the_same_backend(backend: str, hook: str) -> None:
    """Four ranks, 100 Gbit/s; the estimate without compression, which sizes do not tell."""
    real = Costs.read()
    nothing = {name: HookCosts.free(name, own.copies_per_byte) for name, own in real.hooks.items()}
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
    estimated = predicting.estimate(
        parameters,
        compute=0.1,
        ranks=4,
        rate=link.rate,
        latency=link.latency,
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
    assert code == 2 and "'fp16' was not measured; there are noop, top-k and int8" in text


def test_dots_stand_for_doubling() -> None:
    assert numbers_in("2,4,...,1024") == (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    assert numbers_in("3,...,10,20") == (3, 6, 10, 20)


def test_a_real_measurement_has_every_bucket_round_and_payload() -> None:
    asked = Asked(
        task=Spec.parse("gpt:size=tiny", "task"),
        hooks=tuple(map(Spec.parse, ("all-reduce", "int8", "powersgd:rank=2"))),
        ranks=(2, 64),
        as_ranks=(2, 3),
        steps=3,
        bucket_cap_mb=0.1,
    )
    found = measure(asked, lambda text: None)
    first = found.profiles[0]
    assert [(profile.ranks, profile.cores) for profile in found.profiles] == [(2, 1), (3, 1)]
    buckets = first.hooks[ALL_REDUCE].buckets
    assert len(buckets) > 1
    names = [name for bucket in buckets for name in bucket.parameters]
    assert sorted(names) == sorted(gradient.name for gradient in first.gradients)
    assert set(first.hooks) == {NOOP, ALL_REDUCE, "int8", "powersgd:rank=2"}
    payload = sum(size for rounds in found.sends(ALL_REDUCE, 1000) for ((_, size),) in rounds)
    assert payload == 4 * sum(math.prod(gradient.shape) for gradient in first.gradients)
    assert [len(rounds) for rounds in found.sends("powersgd:rank=2", 2)] == [2] * len(buckets)
    # Two hops: a rank serves 1/W of the blocks, so what each gathers shrinks with the ranks.
    assert found.is_counted("int8", 64) and not found.is_counted("int8", 100)
    gathered = {ranks: _gathered(found, ranks) for ranks in (2, 64)}
    assert gathered[64] < gathered[2] / 8
    profile = found.at(64)
    for label in (ALL_REDUCE, "int8", "powersgd:rank=2"):
        own = profile.hooks[label]
        assert all(one.seconds > 0 for bucket in own.buckets for one in bucket.rounds)
        assert predict(profile, own, Link(rate=1e6)).seconds > own.step.seconds.median


def _gathered(found: Series, ranks: int) -> int:
    sends = [send for rounds in found.sends("int8", ranks) for sends in rounds for send in sends]
    return sum(size for kind, size in sends if kind == "all-gather")


def test_fsdp2_is_simulated_plain_and_with_compressors_that_return_shards(saved: Path) -> None:
    named = {ranks: dataclasses.replace(one, hook="int8") for ranks, one in exchanging().items()}
    write_series(series({"int8": named}, OF_EIGHT), saved)
    code, text = run("--measured", str(saved), "--ranks", "2,4", "--rate", "10Mbit/s", "--hook", "int8", "--sharded")
    assert code == 0 and "torch.none" in text and "FSDP2 shards the model" in text, text
    found = simulated(
        read_series(saved), Link(rate=1e6), hooks=(Spec("int8"),), ranks=(2, 4), measured=saved, sharded=True
    )
    sent = {(one.hook, one.ranks): one.time.bytes_sent for one in found.points}
    assert sent["torch.none", 2] == 2 * 2000 and sent["torch.none", 4] == 2 * 3000, "a gather and a reduction of 4 kB"
    assert sent["int8", 4] < sent["torch.none", 4]
    for words, why in (
        (("--measured", str(saved), "--hook", "powersgd"), "cannot average shards of gradients"),
        (("--parameters", "1M", "--compute", "1ms"), "--sharded needs a task's modules"),
    ):
        code, text = run(*words, "--sharded")
        assert code == 2 and why in text, text
