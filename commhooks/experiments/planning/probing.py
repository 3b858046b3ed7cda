"""Measuring a probe: the collectives that compressors use, over a group like the one that carries gradients."""

from __future__ import annotations

import functools
import platform
import socket

import torch
import torch.distributed as dist

from commhooks.communicators import Collective, Communicator, ProcessGroupCommunicator
from commhooks.communicators.parent_group import backend_of
from commhooks.communicators.private_group import Address, PrivateGroup, WrapCommunicator
from commhooks.devices import ACCELERATOR, runs_on_streams, wait_for_device
from commhooks.experiments.planning.errors import ProbeError
from commhooks.experiments.planning.meter import Clocks, Meter, sum_of
from commhooks.experiments.planning.probes import MOST_DISAGREEMENT, Probe
from commhooks.experiments.planning.profiles import Profile
from commhooks.experiments.planning.sizes import ATTEMPTS, LEAST_SECONDS, MOST_SECONDS, sizes_of

_LATE = 1.25  # times its share that an attempt may have taken for another one to follow
_NAME_BYTES = 253  # of a host, at most
_CLOSING_SECONDS = 5.0


def probe(
    process_group: dist.ProcessGroup | None = None,
    *,
    seconds: float = 20.0,
    device: torch.device | str | None = None,
    wrap_communicator: WrapCommunicator | None = None,
    link: str = "",
    profile: Profile | None = None,
) -> Probe:
    """Measure the collectives that compressors use between the ranks of a group; all of them must call it.

    The collectives run on a private Gloo group, as an attachment's do, or on the group itself if that is NCCL. If two
    halves of the measurement disagree by more than 10 %, it is repeated once, and the better one counts.

    Args:
        process_group: The ranks; default: the default group.
        seconds: The longest time to measure, 1 to 120. Higher: larger messages over a slow link, steadier medians.
        device: The gradients' device; default: the GPU if the group uses NCCL, otherwise the CPU.
        wrap_communicator: As for `attach`.
        link: The link's name, kept in the result.
        profile: If given, the same on all ranks. Then only the collectives that its hooks send are measured, up to the
            sizes that they send, so that the time is spent on what `plan` needs.

    Raises:
        ProbeError: There is no group or only one rank, or the network is too slow for the time given.
        CollectiveError: A collective failed.

    """
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise ProbeError(f"probe(seconds={seconds!r}): seconds must be from {LEAST_SECONDS:g} to {MOST_SECONDS:g}.")
    group = dist.group.WORLD if process_group is None and dist.is_initialized() else process_group
    if group is None:
        raise ProbeError("probe: there is no process group; call torch.distributed.init_process_group first.")
    if group.size() == 1:
        raise ProbeError(
            "probe: a single rank has no link to measure; start two ranks or more, such as with 'torchrun "
            "--nproc-per-node 2'."
        )
    where = _device_of(group, device)
    backend = backend_of(group, where)
    over = functools.partial(
        probe_over,
        seconds=seconds,
        link=link,
        device=where,
        clocks=Clocks(settle=functools.partial(wait_for_device, where)),
        profile=profile,
    )
    if runs_on_streams(backend):
        carrier = ProcessGroupCommunicator(group, has_tensor_forms=True)
        return over(wrap_communicator(carrier) if wrap_communicator else carrier, backend=backend)
    address = Address.under(group, "probe")
    try:
        private_group = PrivateGroup(address, wrap_communicator)
        try:
            assert private_group.communicator is not None, "it was just opened"
            return over(private_group.communicator)
        finally:
            private_group.close(_CLOSING_SECONDS)
    finally:
        address.store_thread.close()
        address.section.release()


def probe_over(
    communicator: Communicator,
    seconds: float,
    *,
    backend: str = "gloo",
    link: str = "",
    device: torch.device | None = None,
    clocks: Clocks | None = None,
    profile: Profile | None = None,
) -> Probe:
    """Measure over a communicator; see `probe`."""
    clocks = clocks or Clocks()
    hosts = _hosts(communicator, device)
    share = seconds / ATTEMPTS

    def measured() -> Probe:
        begun = clocks.wall()
        costs = Meter(communicator, device, clocks, sizes_of(profile, communicator.world_size)).measure(share)
        return Probe(
            ranks=communicator.world_size,
            costs=costs,
            took=clocks.wall() - begun,
            backend=backend,
            link=link,
            hosts=hosts,
            machine=f"{platform.system()} {platform.machine()}",
            versions={"python": platform.python_version(), "torch": torch.__version__},
        )

    found = measured()
    is_late = sum_of(communicator, float(found.took > _LATE * share), device)  # on any rank: all must agree
    if found.disagreement > MOST_DISAGREEMENT and not is_late:
        found = min(found, measured(), key=lambda one: one.disagreement)
    return found


def _hosts(communicator: Communicator, device: torch.device | None) -> tuple[str, ...]:
    """Return the network name of each rank's host."""
    name = socket.gethostname().encode()[:_NAME_BYTES]
    own = torch.tensor(list(name.ljust(_NAME_BYTES, b"\0")), dtype=torch.uint8, device=device)
    pending = communicator.start(Collective("all-gather", own))
    pending.wait()
    return tuple(bytes(row).rstrip(b"\0").decode(errors="replace") for row in pending.result.tolist())


def _device_of(group: dist.ProcessGroup, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return ACCELERATOR if runs_on_streams(backend_of(group, ACCELERATOR)) else torch.device("cpu")
