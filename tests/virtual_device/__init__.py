"""An asynchronous device that lives in a CPU-only PyTorch, under the name of CUDA.

Its memory is the host's, and a kernel is PyTorch's own CPU kernel, queued on a stream and run later: as late, and in as
odd an order, as CUDA permits. Streams, events, `Future(devices=)`, autograd's device threads and `record_stream` are
PyTorch's own. What it reports, whatever the numbers are:

- races: two accesses of the same bytes in no order, or the reuse of freed memory that is still read;
- host waits: every place where the host waits for the device;
- deadlocks, and ranks that disagree about a collective.

`install()` before anything asks for CUDA; the process keeps the device until it ends. `begin(schedule, seed)` begins a
run, `report()` says what was seen since. Pytest: `--virtual-device=late,random:1` (tests/virtual_device/plugin.py).
"""

from tests.virtual_device.building import BuildError
from tests.virtual_device.device import SCHEDULES, HostWait, Report, begin, install, report

__all__ = ["SCHEDULES", "BuildError", "HostWait", "Report", "begin", "install", "report"]
