"""TCP streams between the hosts of a cluster, and processes that are killed while they own one."""

from __future__ import annotations

import functools
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from commhooks.experiments.cluster import Cluster
from commhooks.experiments.launch import Send, run_world

PORT = 5000
Pair = tuple[socket.socket, socket.socket]


def connect(cluster: Cluster, sender: int, receiver: int) -> Pair:
    """Return both ends of a connection."""
    with cluster.inside(receiver, lambda: socket.create_server(("", PORT))) as listener:
        one = cluster.inside(sender, lambda: socket.create_connection((cluster.address(receiver), PORT), 10))
        other, _ = listener.accept()
    return one, other


def transfer(pair: Pair, size: int, arrived: Callable[[int], None] = lambda total: None) -> float:
    """Send so many bytes, and return how many seconds it took until they had arrived."""
    sender, receiver = pair
    # The buffers hold what the kernel takes at once; the time is that of the receiver.
    thread = threading.Thread(target=sender.sendall, args=(bytes(size),))
    buffer, total, begin = bytearray(1 << 20), 0, time.monotonic()
    thread.start()
    while total < size:
        total += receiver.recv_into(buffer)
        arrived(total)
    thread.join()
    return time.monotonic() - begin


def rates(pairs: list[Pair], size: int) -> list[float]:
    """Transfer over all pairs at once, and return the bits per second of each on the wire, headers included."""
    with ThreadPoolExecutor(len(pairs)) as threads:
        seconds = list(threads.map(lambda pair: transfer(pair, size), pairs))
    return [8 * size * 1514 / 1448 / each for each in seconds]


def sleep_on_a_host(rank: int, ranks: int, argument: None, send: Send) -> None:
    """Say that this rank is there, and stay."""
    send("here")
    time.sleep(600)


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "again and again":
        while True:
            with Cluster.create(2, up=1e8, down=1e8):
                pass
    with Cluster.create(2) as made:
        run_world(sleep_on_a_host, 2, None, functools.partial(print, flush=True), timeout=600, cluster=made)
