"""A slow cluster on one machine: hosts that are network namespaces, links with a real rate, and their counters."""

from .counters import gloo_interface, interface_bytes
from .iproute import ClusterError
from .namespaces import INTERFACE, Cluster, HostState, clusters, remove_abandoned
from .preflight import why_not
from .schedule import follow

__all__ = [
    "INTERFACE",
    "Cluster",
    "ClusterError",
    "HostState",
    "clusters",
    "follow",
    "interface_bytes",
    "gloo_interface",
    "remove_abandoned",
    "why_not",
]
