"""The device in every process of a command: Python imports this file when it starts, if its folder is on the path.

The variable that names a schedule (`tests.virtual_device.ranks.RUN`) must be set, and the repository on the path too.
A process with a race ends with an error, a rank too, although it skips an orderly exit.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

EXIT_CODE = 77  # of a process with races


def _install() -> None:
    from tests.virtual_device import begin, install, report
    from tests.virtual_device.ranks import RUN, parse

    install()
    schedule, seed = parse(os.environ[RUN])
    begin(schedule, seed + int(os.environ.get("RANK", "0")))
    leave = os._exit

    def check_and_leave(status: int) -> NoReturn:
        races = report().races if status == 0 else ()
        if races:
            print("races on the virtual device:", *races, sep="\n", file=sys.stderr, flush=True)
        leave(EXIT_CODE if races else status)

    os._exit = check_and_leave
    atexit.register(lambda: report().races and check_and_leave(0))


if "multiprocessing.resource_tracker" not in " ".join(sys.orig_argv):
    _install()
