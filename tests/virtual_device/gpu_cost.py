"""`python -m tests.virtual_device.gpu_cost` is the study `gpu-cost` on the virtual device, with the study's options.

The study counts operators on whichever device it is given, since studies import no tests; this gives it a device on
which the code for a GPU runs, so that the counts are those of that code.
"""

from __future__ import annotations

import sys

from experiments.studies.app import app
from tests import virtual_device

SCHEDULE = "empty"
"""No kernel runs: what is counted depends on no value, except where the host reads one."""


def main() -> None:
    """Install the device, and run the study with this command's options."""
    virtual_device.install()
    virtual_device.begin(SCHEDULE)
    app(["gpu-cost", *sys.argv[1:]])


if __name__ == "__main__":
    main()
