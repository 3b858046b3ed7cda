"""The section of `commhooks plan --sharded` about FSDP2."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from ..predicting import Plan
from ..predicting.sharded import PLAIN
from ..report.table import plain_table
from ..report.words import times


def sharded_table(plan: Plan) -> Table:
    """Return a table of the steps of plain FSDP2 and of compressors that can return shards, the fastest first."""
    table = plain_table("FSDP2: predicted steps", ("step, ms", "speed-up", "kB sent"))
    for one in plan.sharded:
        table.add_row(
            escape(one.compressor), f"{1e3 * one.seconds:.1f}", times(one.speed_up), f"{one.bytes_sent / 1e3:,.0f}"
        )
    table.caption = f"speed-up: over plain FSDP2 ({PLAIN}). Parameters are gathered as they are."
    return table


def sharded_sentences(plan: Plan) -> list[str]:
    """Return the conclusions from the table, as sentences."""
    best = plan.sharded[0]
    if best.compressor == PLAIN:
        said = "With FSDP2 none of these compressors makes steps faster."
    else:
        said = f"With FSDP2, {best.compressor} makes steps {times(best.speed_up)} as fast as without: {best.code}"
    return [
        said,
        "Those steps were not measured: they are computed from the profile, with links like the probe's. "
        "commhooks compare --sharded trains with FSDP2 and measures.",
    ]
