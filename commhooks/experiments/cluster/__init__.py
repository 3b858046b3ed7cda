"""A slow cluster on one machine: hosts that are network namespaces, links with a real rate, and their counters."""

from commhooks.experiments.cluster.counters import gloo_interface, interface_bytes
from commhooks.experiments.cluster.iproute import ClusterError
from commhooks.experiments.cluster.namespaces import (
    INTERFACE,
    Cluster,
    HostState,
    check_hosts,
    clusters,
    hosts_on,
    remove_abandoned,
)
from commhooks.experiments.cluster.preflight import why_not
from commhooks.experiments.cluster.schedule import follow, set_rate
from commhooks.experiments.cluster.shaping import check_rates

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
