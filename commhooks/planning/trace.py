"""A profile's steps in the trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Every rank is a process with two threads, training and worker. The steps of all settings, of median length each, stand
one after another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from commhooks.planning import stored
from commhooks.planning.profile import Event, Profile

THREADS = ("training", "worker")
_GAP = 1.2  # from the beginning of a step to that of the next, over its length


def trace_of(profile: Profile) -> dict[str, Any]:
    """Return the trace: what `json.dumps` makes a file of."""
    found = [*_names(profile)]
    begin = 0.0
    for label, events in profile.events.items():
        found += [_traced(event, label, begin) for event in events]
        begin += _GAP * max((event.begin + (event.seconds or 0.0) for event in events), default=0.0)
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def write_trace(profile: Profile, path: Path) -> None:
    """Write the trace into a file."""
    stored.write_text(path, json.dumps(trace_of(profile)) + "\n")


def _names(profile: Profile) -> list[dict[str, Any]]:
    """Return what names processes and threads."""
    found = []
    for rank in range(profile.ranks):
        process = {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}"}}
        found.append(process)
        for number, thread in enumerate(THREADS):
            found.append({**process, "tid": number, "name": "thread_name", "args": {"name": thread}})
    return found


def _traced(event: Event, label: str, begin: float) -> dict[str, Any]:
    """Return an event; times are in microseconds."""
    name = label if event.name == "step" else event.name
    common = {
        "name": name,
        "cat": label,
        "pid": event.rank,
        "tid": THREADS.index(event.thread),
        "ts": 1e6 * (begin + event.begin),
    }
    if event.seconds is None:
        return {**common, "ph": "i", "s": "t"}
    return {**common, "ph": "X", "dur": 1e6 * event.seconds}
