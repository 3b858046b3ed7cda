"""What a person gets to see: tables, pictures, page."""

from __future__ import annotations

import dataclasses
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from commhooks.units import bytes_in_words
from experiments.links.link import LinkSettings
from experiments.report import bars
from experiments.report.across import series_of
from experiments.report.layers import layer_grid, layers_of
from experiments.report.page import ABOVE_ONE, page, period_in_words
from experiments.report.plots import LIGHT, looks
from experiments.report.rows import cost_grid, time_grid
from experiments.report.table import print_tables
from experiments.report.words import (
    interval_of_seconds,
    link_in_words,
    listed,
    percent,
    seconds_in_words,
    shortened,
    signed,
    times,
)
from experiments.report.writing import write
from experiments.results.intervals import Interval
from experiments.results.outcomes import settings_of
from experiments.runs import RunResult, RunSettings
from experiments.specs import Spec
from tests.experiments.synthetic import diverged, result, results, stepwise

pytestmark = pytest.mark.a_row  # a page with all its pictures takes seconds

ROOT = Path(__file__).parents[2]
SEEDS = (0, 1, 2)
FAILED = RunSettings(task=Spec("gpt"), hook=Spec("torch.powersgd"), steps=40)
HOOK_OF_A_PERSON = "top-k:ratio=0.01,note=<b>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report of two links, three seeds, a hook that diverges, one without a seed, and runs that failed."""
    out = tmp_path_factory.mktemp("report")
    found = results(tasks=("gpt",), seeds=SEEDS, links=("100Mbit/s", "1Gbit/s"))
    found += [diverged(result(HOOK_OF_A_PERSON, ratio=50, seed=seed)) for seed in (0, 1)]
    failures = {
        dataclasses.replace(FAILED, seed=seed): "Traceback\n  File\nRuntimeError: <gloo> closed" for seed in SEEDS
    }
    write(
        found,
        out / "new",
        baseline=None,
        target_loss=None,
        command="commhooks compare <x>",
        notes=["4 ranks share 2 cores"],
        failures=failures,
    )
    return out / "new"


class Links(HTMLParser):
    """Collects what a page would fetch, and its text in order."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in {"src", "href", "srcset"}]

    def handle_data(self, data: str) -> None:
        self.words += f" {data.strip()}"


@pytest.fixture
def shown(folder: Path) -> Links:
    found = Links()
    found.feed((folder / "report.html").read_text())
    return found


def test_the_page_needs_nothing_but_itself(folder: Path, shown: Links) -> None:
    assert len(shown.fetched) == 2 * 6 + 1  # pictures of each setting, and one across them
    assert all(link.startswith("data:image/png;base64,") for link in shown.fetched)
    assert not re.search(r"url\(|@import|<script", (folder / "report.html").read_text())


def test_warnings_come_first_then_failures_then_findings(shown: Links) -> None:
    words = shown.words
    first_to_last = ("4 ranks share 2 cores", "RuntimeError: <gloo> closed", "times as fast", "Across settings")
    places = [words.index(text) for text in first_to_last]
    assert places == sorted(places)
    assert "torch.powersgd · 2 ranks · unlimited · seeds 0, 1 and 2: " in words
    assert words.count("RuntimeError") == 1  # the same error of all seeds is one line


def test_the_page_defines_its_terms_and_says_how_to_get_it_again(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    for words in (
        "powersgd:rank=4",
        "100 Mbit/s",
        "compute + compression + waiting = the step",
        "Student&#39;s t",
        "2 of 2 diverged",
        "2 of 3 seeds",
        "not settled",
        "A difference of losses matters above 0.026",
        "commhooks compare &lt;x&gt;",
        "note=&#39;&lt;b&gt;&#39;",
    ):
        assert words in text


def top_of(runs: list[RunResult]) -> str:
    """Return the words of a page without pictures, up to its first table."""
    text = page(
        settings_of(runs),
        [[]],
        [],
        target_rule="",
        command="commhooks compare --x y",
        written=datetime(2027, 1, 16, 9, 5, tzinfo=UTC),
        notes=[],
        failures={},
    )
    found = Links()
    found.feed(text)
    words = " ".join(found.words.split())
    return words[: words.index("After the same time")]


def test_the_top_says_when_with_what_and_how_it_was_made_and_where_it_is_explained() -> None:
    made = {"commit": "0123456789ab", "versions": {"commhooks": "9.8.7"}}
    runs = [dataclasses.replace(one, **made) for one in results(tasks=("gpt",))]  # type: ignore[arg-type]  # "object"
    said = top_of(runs)
    for words in (
        "A communication hook is the function",
        "measured 2027-01-15, 08:00 UTC written 2027-01-16, 09:05 UTC",
        "code commhooks 9.8.7, commit 0123456789ab command commhooks compare --x y",
        "docs/guide/comparison.md",
    ):
        assert words in said
    assert "different commits" not in said
    installed = dataclasses.replace(runs[0], commit=None)
    mixed = top_of([installed, *runs[1:]])
    assert "code commhooks 9.8.7; commhooks 9.8.7, commit 0123456789ab" in mixed and "different commits" in mixed
    assert (ROOT / "docs" / "guide" / "comparison.md").read_text().startswith("# Reading a comparison")


def test_a_period_names_the_second_day_only_if_there_is_one() -> None:
    noon = 1_800_014_400.0  # Unix time
    said = [period_in_words(noon, noon + seconds) for seconds in (0, 3600, 86_400)]
    assert said == [
        "2027-01-15, 12:00 UTC", "2027-01-15, 12:00 to 13:00 UTC", "2027-01-15, 12:00 to 2027-01-16, 12:00 UTC",
    ]  # fmt: skip


def test_wherever_errors_are_shown_the_page_says_what_one_above_1_means(shown: Links) -> None:
    assert shown.words.count(ABOVE_ONE) == 2 * (1 + 1 + 1) + 1  # of each setting three, and the terms


def test_curves_over_time_come_first_then_over_steps(folder: Path) -> None:
    text, kinds = (folder / "report.html").read_text(), ("against time", "against steps", "against bytes")
    places = [text.index(f'alt="100-Mbit-s: loss {kind}') for kind in kinds]
    assert places == sorted(places)


def test_the_pictures_are_files_too(folder: Path) -> None:
    kinds = {"step-time", "bytes", "time", "steps", "gradients", "layers"}
    names = {path.name for path in (folder / "plots").iterdir()}
    assert names == {f"{link}.{kind}.png" for link in ("100-Mbit-s", "1-Gbit-s") for kind in kinds} | {
        "series-1.rate.png"
    }


def test_a_report_of_nothing_is_refused_and_one_of_failures_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one finished or failed run"):
        write([], tmp_path, baseline=None, target_loss=None, command="")
    path = write([], tmp_path, baseline=None, target_loss=None, command="", failures={FAILED: ""})
    assert "no reason given" in path.read_text()


@pytest.mark.parametrize(("width", "tables"), [(100, 3), (80, 5)])
def test_the_terminal_has_the_same_numbers_and_a_finding_and_they_fit(width: int, tables: int) -> None:
    out = StringIO()
    print_tables(results(tasks=("gpt",), seeds=SEEDS), Console(file=out, width=width))
    text = out.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert text.count("speed-up") == 3  # a column of two tables, and a caption
    rows = [line for line in text.splitlines() if line.startswith(" all-reduce ")]
    assert len(rows) == tables  # where one table has no room, each of several has the names
    for cell in ("3 of 3", "8.00 MB", "20.0×", "52.0 ms / 10.0 ms / ", "does not matter", "95 % interval"):
        assert cell in text


def test_several_settings_end_with_a_table_of_all() -> None:
    out = StringIO()
    print_tables(results(), Console(file=out, width=120))
    assert "Step speed-up in every setting" in out.getvalue()


def test_with_one_seed_the_table_shows_the_quartiles_of_the_steps_and_says_why() -> None:
    (one,) = settings_of(results(tasks=("gpt",)))
    grid = cost_grid(one)
    (step,) = (n for n, heading in enumerate(grid.headings) if heading.text == "step")
    assert grid.headings[step].small == "IQM, quartiles"
    assert grid.rows[0][step].small == ("380 to 384",)
    assert grid.caption.startswith("IQM: interquartile mean") and grid.caption.endswith("One seed: no intervals.")


@pytest.mark.parametrize("seeds", [(0,), SEEDS])
def test_bars_and_table_show_the_same_times_and_speed_ups(
    seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(bars, "png", drawn.append)
    (one,) = settings_of(results(tasks=("gpt",), seeds=seeds))
    bars.step_time(one)
    (axes,) = drawn[0].axes
    grid = cost_grid(one)
    step, speed_up = (
        next(n for n, heading in enumerate(grid.headings) if (heading.text, heading.small) == found)
        for found in (("step", "IQM" if len(seeds) > 1 else "IQM, quartiles"), ("speed-up", "step"))
    )
    shown = [f"{row[step].main}   {row[speed_up].main} as fast" for row in grid.rows]
    shown[0] = grid.rows[0][step].main
    assert [text.get_text().strip() for text in axes.texts] == shown
    boxes = [bar.get_path().get_extents(bar.get_patch_transform()) for bar in axes.patches]
    ends = [max(box.x1 for box in boxes if box.y0 < row < box.y1) for row in range(3)]
    assert ends == pytest.approx([1e3 * outcome.step.mean for outcome in one.outcomes])


def test_the_best_time_is_never_that_of_a_hook_that_missed_the_target_once() -> None:
    runs = results(tasks=("gpt",), seeds=SEEDS)
    runs = [diverged(one) if (one.settings.hook.name, one.settings.seed) == ("powersgd", 1) else one for one in runs]
    (one,) = settings_of(runs)
    best = [row[0].main for row in time_grid(one).rows if any(cell.best for cell in row)]
    assert best == ["fp16"]


def test_the_link_use_stands_in_the_table_if_the_interface_was_counted() -> None:
    runs = [stepwise(one, lambda step: {"interface_bytes": step.moved_bytes}) for one in results(tasks=("gpt",))]
    (one,) = settings_of(runs)
    assert [heading.text for heading in cost_grid(one).headings[-2:]] == ["interface bytes", "link use"]
    assert cost_grid(one).rows[0][-2].main == "1.00×"


def test_many_layers_are_the_largest_by_name_and_the_median_of_the_others() -> None:
    (one,) = settings_of([result(), result("fp16", ratio=2, layers=200)])
    layers = layers_of(one.outcomes[1])
    assert len(layers) == 15
    assert layers[-1].name == "186 smaller ones (median)"
    assert layers[0].smaller == pytest.approx(2, rel=0.05)


def test_the_table_of_layers_has_a_column_for_each_hook() -> None:
    (one,) = settings_of(results(tasks=("gpt",)))
    grid = layer_grid(one)
    assert grid is not None
    assert [heading.text for heading in grid.headings] == ["layer", "all-reduce", "fp16", "powersgd:rank=4"]
    assert [row[0].main for row in grid.rows] == ["layer0", "layer1", "layer2"]


def test_settings_that_differ_in_one_number_are_a_series() -> None:
    runs = [
        result(hook, link=link, ranks=ranks)
        for hook in ("all-reduce", "fp16")
        for link in ("1Gbit/s", "10Mbit/s")
        for ranks in (2, 4)
    ]
    found = [(one.along, one.name, one.places) for one in series_of(settings_of(runs))]
    assert found == [
        ("rate", "2 ranks", (1e7, 1e9)),
        ("rate", "4 ranks", (1e7, 1e9)),
        ("ranks", "1 Gbit/s", (2.0, 4.0)),
        ("ranks", "10 Mbit/s", (2.0, 4.0)),
    ]


def test_twenty_hooks_are_all_drawn_differently() -> None:
    found = looks([f"powersgd:rank={n}" for n in range(20)], "powersgd:rank=0")
    assert len({(look.colour, str(look.dashes)) for look in found.values()}) == 20
    assert found["powersgd:rank=0"].colour == LIGHT.first


def test_numbers_read_well() -> None:
    assert [bytes_in_words(n) for n in (12, 4_200, 72_600_000, 1.5e9)] == ["12 B", "4.20 kB", "72.6 MB", "1.50 GB"]
    assert [seconds_in_words(s) for s in (0.0981, 65.2, None)] == ["98.1 ms", "65.2 s", "—"]
    assert (times(7.123), times(float("inf")), percent(0.975)) == ("7.12×", "nothing moved", "97.5 %")
    assert [signed(value) for value in (0.0123, -0.0004, -1.5)] == ["+0.012", "0.000", "-1.500"]
    assert interval_of_seconds(Interval(0.1, -0.01, 0.21)) == "0.00 to 210"
    assert [listed(names) for names in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert shortened("blocks.15.attention.weight", 11) == "block…eight"


def test_links_read_well() -> None:
    said = {
        "100Mbit/s": "an emulated link of 100 Mbit/s",
        "emulated:rate=1Gbit/s,latency=0.2ms": "an emulated link of 1 Gbit/s, latency 0.2 ms",
        "hosts:rate=10Mbit/s": "network namespaces linked at 10 Mbit/s",
        "unlimited": "an emulated link without a limit",
        "unlimited,latency=5ms": "an emulated link without a limit, latency 5 ms",
        "hosts": "network namespaces linked without a limit",
        "real": "the real network",
    }
    assert {text: link_in_words(LinkSettings.parse(text)) for text in said} == said
