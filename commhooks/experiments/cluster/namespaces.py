"""Clusters: hosts that are network namespaces, on a bridge in a namespace of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Literal, TypeVar

from commhooks.experiments.cluster.iproute import NAMESPACES, run
from commhooks.experiments.cluster.iproute import enter as enter_namespace
from commhooks.experiments.cluster.iproute import inside as inside_namespace
from commhooks.experiments.cluster.preflight import require
from commhooks.experiments.cluster.records import Owner, Record, locked, record_of, records
from commhooks.experiments.cluster.shaping import check_rate, largest_packet, shaped, shaping
from commhooks.experiments.links.link import LinkSettings

INTERFACE = "eth0"
"""The interface of every host."""
MOST_HOSTS = 250
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")

Direction = Literal["up", "down", "both"]
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class HostState:
    """A host and its link, at one moment."""

    host: int
    address: str
    up: float | None  # bits per second; None: no limit
    down: float | None
    sent: int  # bytes that have passed the link, with the headers of every frame
    received: int
    plugged_in: bool


def check_hosts(hosts: int) -> None:
    """Raise an error if a cluster cannot have this many hosts.

    Raises:
        ValueError: The number is below 1, or larger than the number of addresses.

    """
    if not 1 <= hosts <= MOST_HOSTS:
        raise ValueError(f"a cluster has 1 to {MOST_HOSTS} hosts, one address each (got {hosts})")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts on this machine that reach only each other, each over a link with a rate; `create` makes one.

    As a context manager it is removed at the end. It is also removed if this process is killed: by the next process
    that makes or lists clusters. An instance is only a name; it can be sent to other processes.

        with Cluster.create(4, up=100e6, down=100e6) as cluster:
            run_world(function, 4, argument, print, timeout=60, cluster=cluster)
    """

    name: str
    hosts: int

    @classmethod
    def create(
        cls,
        hosts: int,
        *,
        up: float | None = None,
        down: float | None = None,
        name: str | None = None,
        kept: bool = False,
    ) -> Cluster:
        """Make a cluster.

        Args:
            hosts: The number of hosts.
            up: The rate at which a host sends, in bits per second, headers included; None: no limit.
            down: The rate at which a host receives, in the same unit.
            name: Lower-case letters, digits and hyphens; None: a free name made of this process's number.
            kept: If True, the cluster stays until it is removed. Otherwise it belongs to this process.

        Raises:
            ClusterError: This machine cannot have one; the message says why.
            ValueError: An argument is not possible, or the name is taken.

        """
        check_hosts(hosts)
        for rate in (up, down):
            check_rate(rate)
        if name is not None and not _NAME.fullmatch(name):
            raise ValueError(
                f"cluster name {name!r}: expected at most 40 lower-case letters, digits and hyphens, such as 'demo'"
            )
        require()
        remove_abandoned()
        with locked() as lock:
            taken = {record.name for record in records()}
            if name in taken:
                raise ValueError(f"there is a cluster {name!r} already: choose another name, or remove that one")
            own = f"run-{os.getpid()}"
            names = (own, *(f"{own}-{number}" for number in range(2, 100)))
            cluster = cls(name or next(one for one in names if one not in taken), hosts)
            Record(cluster.name, hosts, Owner.this_process()).write()
            try:
                cluster._build(up, down, lock)
                if kept:
                    Record(cluster.name, hosts, owner=None).write()
            except BaseException:
                cluster._demolish(lock)
                raise
        return cluster

    @classmethod
    def find(cls, name: str) -> Cluster:
        """Return the cluster of this name.

        Raises:
            ValueError: There is no such cluster.

        """
        if (record := record_of(name)) is None:
            others = ", ".join(one.name for one in records()) or "none"
            raise ValueError(f"there is no cluster {name!r}; those on this machine: {others}")
        return cls(record.name, record.hosts)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the hosts and their links; a process that still runs on a host loses its network."""
        with locked() as lock:
            # From now on it is this process's: if it is killed halfway, the next one removes the rest.
            Record(self.name, self.hosts, Owner.this_process()).write()
            self._demolish(lock)

    def address(self, host: int) -> str:
        """Return a host's address, which only the hosts of its cluster can reach."""
        self._check(host)
        return f"10.77.0.{host + 1}"

    def namespace(self, host: int) -> str:
        """Return the name of a host's network namespace, for `ip netns`."""
        self._check(host)
        return self._namespaces[host]

    def enter(self, host: int) -> None:
        """Move this thread to a host, with every thread and process that it starts from now on."""
        enter_namespace(self.namespace(host))

    def inside(self, host: int, function: Callable[[], _T]) -> _T:
        """Call the function on a host and return its result: its sockets belong to the host."""
        return inside_namespace(self.namespace(host), function)

    def unplug(self, host: int) -> None:
        """Pull a host's cable: it loses its carrier, and packets get lost in both directions."""
        run("ip", "-n", self._switch, "link", "set", self._port(host), "down")

    def plug_in(self, host: int) -> None:
        """Plug a host's cable in again."""
        run("ip", "-n", self._switch, "link", "set", self._port(host), "up")

    def set_rate(self, rate: float | None, *, direction: Direction = "both", host: int | None = None) -> None:
        """Change the rate of links that may be in use; packets that wait for them are kept.

        Args:
            rate: Bits per second, headers included; None: no limit.
            direction: "up": the rate at which hosts send; "down": the rate at which they receive.
            host: One host; None: all.

        Raises:
            ValueError: The rate or the host is not possible.

        """
        check_rate(rate)
        hosts = range(self.hosts) if host is None else [host]
        if direction != "down":
            for namespace in map(self.namespace, hosts):
                run("tc", "-n", namespace, "-batch", "-", lines=shaping(INTERFACE, rate, new=False))
        if direction != "up":
            ports = map(self._port, hosts)
            run("tc", "-n", self._switch, "-batch", "-", lines=[s for p in ports for s in shaping(p, rate, new=False)])
        # What a host receives comes in packets that the others have made.
        for namespace in self._namespaces if direction == "down" else map(self.namespace, hosts):
            run("ip", "-n", namespace, "link", "set", INTERFACE, "gso_max_size", str(largest_packet(rate)))

    def state(self) -> list[HostState]:
        """Return all hosts with their links, read from the kernel."""
        ports = [self._port(host) for host in range(self.hosts)]
        downs = shaped(self._switch, ports)
        links = json.loads(run("ip", "-j", "-n", self._switch, "link", "show", "master", "bridge"))
        plugged_in = {link["ifname"] for link in links if "UP" in link["flags"]}
        states = []
        for host, (port, (down, received)) in enumerate(zip(ports, downs, strict=True)):
            [(up, sent)] = shaped(self.namespace(host), [INTERFACE])
            states.append(HostState(host, self.address(host), up, down, sent, received, port in plugged_in))
        return states

    @property
    def _switch(self) -> str:
        return f"commhooks-{self.name}-switch"

    @property
    def _namespaces(self) -> list[str]:
        return [f"commhooks-{self.name}-{host}" for host in range(self.hosts)]

    def _port(self, host: int) -> str:
        """Return the name of the switch's interface at the other end of a host's cable."""
        self._check(host)
        return f"port{host}"

    def _check(self, host: int) -> None:
        if not 0 <= host < self.hosts:
            raise ValueError(f"cluster {self.name!r} has the hosts 0 to {self.hosts - 1} (got {host})")

    def _build(self, up: float | None, down: float | None, lock: int) -> None:
        """Make the namespaces; no interface speaks IPv6, whose own messages would count as traffic."""
        run("ip", "-batch", "-", lines=[f"netns add {name}" for name in (self._switch, *self._namespaces)], lock=lock)
        lines = ["link add bridge type bridge mcast_snooping 0", "link set bridge addrgenmode none up"]
        run("ip", "-n", self._switch, "-batch", "-", lines=lines, lock=lock)
        packet = min(largest_packet(up), largest_packet(down))
        for host, namespace in enumerate(self._namespaces):
            port = self._port(host)
            lines = [
                "link set lo up",
                f"link add {INTERFACE} gso_max_size {packet} type veth peer name {port} netns {self._switch}",
                f"link set {INTERFACE} addrgenmode none",
                f"addr add {self.address(host)}/24 dev {INTERFACE}",
                f"link set {INTERFACE} up",
            ]
            run("ip", "-n", namespace, "-batch", "-", lines=lines, lock=lock)
            run("tc", "-n", namespace, "-batch", "-", lines=shaping(INTERFACE, up, new=True), lock=lock)
            self.inside(host, _use_reno)
        ports = [self._port(host) for host in range(self.hosts)]
        cables = [s for p in ports for s in (f"link set {p} addrgenmode none", f"link set {p} master bridge up")]
        run("ip", "-n", self._switch, "-batch", "-", lines=cables, lock=lock)
        rates = [line for port in ports for line in shaping(port, down, new=True)]
        run("tc", "-n", self._switch, "-batch", "-", lines=rates, lock=lock)

    def _demolish(self, lock: int) -> None:
        """Delete the namespaces that exist, the switch first, in which every cable ends; then the record."""
        for namespace in (self._switch, *self._namespaces):
            if (NAMESPACES / namespace).exists():
                run("ip", "netns", "delete", namespace, lock=lock)
        Record(self.name, self.hosts, owner=None).delete()


def hosts_on(link: LinkSettings, hosts: int) -> AbstractContextManager[Cluster | None]:
    """Return a cluster with the link's first rates, if the link is of the kind "hosts"; otherwise None."""
    if link.kind != "hosts":
        return nullcontext()
    up, down = link.bits_per_second, link.down_bits_per_second or link.bits_per_second
    return Cluster.create(hosts, up=up, down=down)


def clusters() -> list[Cluster]:
    """Return all clusters of this machine, sorted by name, after removing clusters of dead processes."""
    remove_abandoned()
    return [Cluster(record.name, record.hosts) for record in records()]


def remove_abandoned() -> list[str]:
    """Remove the clusters whose owners ended without doing so, and return their names."""
    if os.geteuid() != 0 or not any(record.is_abandoned for record in records()):
        return []
    with locked() as lock:
        abandoned = [record for record in records() if record.is_abandoned]
        for record in abandoned:
            Cluster(record.name, record.hosts)._demolish(lock)
    return [record.name for record in abandoned]


def _use_reno() -> None:
    """Choose TCP's congestion control, which belongs to the namespace.

    The machine's own may be any. Reno is in every kernel and any namespace may use it; on a link without other losses
    or delay it fills the rate in both directions at once. BBR, for example, lost up to 28 % there.
    """
    with open("/proc/sys/net/ipv4/tcp_congestion_control", "w") as file:
        file.write("reno")
