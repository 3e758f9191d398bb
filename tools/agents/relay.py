"""A loopback relay that keeps the bytes of every connection, as evidence and for the status codes."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path

_REQUEST = re.compile(rb"^([A-Z]+) (\S+) HTTP/1\.1\r$", re.MULTILINE)
_STATUS = re.compile(rb"^HTTP/1\.1 (\d{3})", re.MULTILINE)


@dataclass
class Exchange:
    """What one connection carried, in bytes."""

    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)

    def answers(self) -> list[tuple[str, int]]:
        """Request line and status of each request, in order; 0 where no answer came."""
        asked = [f"{method.decode()} {path.decode()}" for method, path in _REQUEST.findall(self.sent)]
        statuses = [int(status) for status in _STATUS.findall(self.received)]
        return [(line, statuses[i] if i < len(statuses) else 0) for i, line in enumerate(asked)]


class Relay:
    """Listens on a free port of 127.0.0.1 and passes every connection on to `port` there."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.exchanges: list[Exchange] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def save(self, folder: Path) -> None:
        """Write each connection's two directions as files."""
        folder.mkdir(parents=True, exist_ok=True)
        for number, exchange in enumerate(self.exchanges):
            (folder / f"{number:03}-sent").write_bytes(exchange.sent)
            (folder / f"{number:03}-received").write_bytes(exchange.received)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            exchange = Exchange()
            self.exchanges.append(exchange)
            for source, target, kept in (
                (client, server, exchange.sent),
                (server, client, exchange.received),
            ):
                threading.Thread(target=_pass_on, args=(source, target, kept), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            kept += data
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
