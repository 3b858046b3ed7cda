"""Clusters of network namespaces: what they refuse, and two hosts at work; tests/soak/test_cluster.py has the rest."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from commhooks.experiments.cluster import Cluster, ClusterError, clusters, iproute, preflight, records, why_not
from commhooks.experiments.commands import cluster as commands
from commhooks.experiments.commands.terminal import errors_in_words
from commhooks.experiments.launch import run_world
from tests.experiments.rank_functions import MEGABYTE, say_where_it_is, sum_a_megabyte

NOT_MADE = Cluster("not-made", 2)
needs_namespaces = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


@pytest.mark.parametrize(
    ("root", "missing", "words"), [(False, "", "needs root: run"), (True, "tc", "command tc: install")]
)
def test_what_a_machine_lacks_is_said_with_what_works_without_it(
    root: bool, missing: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(shutil, "which", lambda command: None if command == missing else f"/sbin/{command}")
    with pytest.raises(ClusterError, match=words) as caught:
        Cluster.create(2)
    assert why_not() == str(caught.value) and str(caught.value).endswith(preflight.INSTEAD)


def test_what_goes_wrong_with_a_cluster_ends_a_command_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(iproute, "NAMESPACES", tmp_path)
    with pytest.raises(typer.Exit) as ended, errors_in_words():
        NOT_MADE.inside(0, print)
    assert ended.value.exit_code == 1
    assert "namespace commhooks-not-made-0 cannot be entered" in capsys.readouterr().err
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    monkeypatch.setattr(preflight, "require", lambda: None)
    records.Record("half", 2, owner=None).write()
    listed = CliRunner().invoke(commands.app, ["list"])
    assert listed.exit_code == 0 and "commhooks cluster remove half" in listed.output
    (tmp_path / "demo.json").write_text('{"name": "de')
    with pytest.raises(ClusterError, match=r"demo.json is not the record of a cluster .*: delete it"):
        records.records()


@needs_namespaces
def test_ranks_on_two_hosts_share_a_link_of_the_stated_rate_and_its_counters_are_right() -> None:
    results: list[tuple[float, int, str, str]] = []
    with Cluster.create(2, up=100e6, down=100e6) as cluster:
        assert cluster in clusters()
        # Both functions are typed for any message; this rank function sends such tuples.
        run_world(sum_a_megabyte, 2, None, results.append, timeout=120, cluster=cluster)  # type: ignore[arg-type]
        places: list[tuple[int, str, str, int]] = []
        shared: dict[str, Any] = {"timeout": 120, "cluster": cluster, "ranks_per_host": 2}
        run_world(say_where_it_is, 3, None, places.append, **shared)  # type: ignore[arg-type]
        (*first, one), (*second, same), (*third, other) = sorted(places)
        assert [first, second, third] == [[0, "0", "2"], [1, "1", "2"], [2, "0", "1"]] and one == same != other
        with pytest.raises(ValueError, match=r"5 ranks need 3 hosts with 2 on each, but cluster .* has 2"):
            run_world(say_where_it_is, 5, None, places.append, **shared)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"there is a cluster '{cluster.name}' already"):
            Cluster.create(2, name=cluster.name)
        cluster.set_rate(1e6, direction="down", host=1)
        cluster.unplug(0)
        states = [(one.up, one.down, one.plugged_in) for one in cluster.state()]
        assert states == [(100e6, 100e6, False), (100e6, 1e6, True)]
    assert cluster not in clusters()
    assert not list(Path("/run/netns").glob(f"commhooks-{cluster.name}-*"))
    for seconds, sent, address, interface in results:
        # Two ranks exchange halves twice: each sends as many bytes as the message has. The last packet of 16 kB arrives
        # when its transmission begins; a busy machine may be late, though not as late as if bytes were bits.
        assert 0.95 < seconds / (8 * MEGABYTE * 1514 / 1448 / 100e6) < 8, seconds
        assert 1.0 < sent / MEGABYTE < 1.05, sent
        assert (address, interface) == ("10.77.0.1", "eth0")
    assert len(results) == 2
