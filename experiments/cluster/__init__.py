"""A slow cluster on one machine: hosts that are network namespaces, links with a real rate, and their counters."""

from .counters import gloo_interface, interface_bytes
from .iproute import ClusterError
from .namespaces import INTERFACE, Cluster, HostState, check_hosts, clusters, hosts_on, remove_abandoned
from .preflight import why_not
from .schedule import follow, set_rate
from .shaping import check_rates

__all__ = [
    "Cluster",
    "ClusterError",
    "HostState",
    "INTERFACE",
    "check_hosts",
    "check_rates",
    "clusters",
    "follow",
    "gloo_interface",
    "hosts_on",
    "interface_bytes",
    "remove_abandoned",
    "set_rate",
    "why_not",
]
