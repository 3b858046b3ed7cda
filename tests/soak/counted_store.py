"""A TCPStore behind a relay that counts its bytes, of all ranks together."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store, TCPStore

HOST = "127.0.0.1"
CHUNK = 1 << 16


class Relay:
    """A store in this process, and a port in front of it, served by daemon threads."""

    def __init__(self, limit: timedelta) -> None:
        self._server = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=limit)
        self._listener = socket.create_server((HOST, 0), backlog=256)
        self._lock = threading.Lock()
        self.moved_bytes = 0
        self.connections = 0
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def keys(self) -> int:
        """Return the number of keys, without passing the port."""
        return self._server.num_keys()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection((HOST, self._server.port))
            self.connections += 1
            for source, sink in ((client, server), (server, client)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(CHUNK):
                with self._lock:
                    self.moved_bytes += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # the other end has closed
            source.close()
            sink.close()


def open_counted(rank: int, world_size: int, folder: Path, seconds: float) -> tuple[Store, Relay | None]:
    """Return the store that all ranks reach through one relay, and on rank 0 that relay."""
    limit, written = timedelta(seconds=seconds), folder / "port"
    relay = Relay(limit) if rank == 0 else None
    if relay is not None:
        part = folder / "port.part"
        part.write_text(str(relay.port))
        part.rename(written)
    while not written.exists():
        time.sleep(0.01)
    return TCPStore(HOST, int(written.read_text()), world_size, is_master=False, timeout=limit), relay
