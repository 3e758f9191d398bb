"""A loopback relay that keeps the bytes of every connection, as evidence and for the status codes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Exchange:
    """What one connection carried, in bytes."""

    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)

    def answers(self) -> list[tuple[str, int]]:
        """Method and path of each request, in order, with its status; 0 where no answer came."""
        requests = [line.rpartition(b" ")[0] for line in _start_lines(bytes(self.sent))]
        bodiless = [request.startswith(b"HEAD ") for request in requests]
        statuses = [int(line.split()[1]) for line in _start_lines(bytes(self.received), bodiless)]
        statuses += [0] * (len(requests) - len(statuses))
        return list(zip(map(bytes.decode, requests), statuses, strict=False))


def _start_lines(data: bytes, bodiless: Sequence[bool] = ()) -> Iterator[bytes]:
    """The first line of each HTTP/1.1 message in `data`. `bodiless` says of answers which have no body,
    whatever their length says; those to HEAD."""
    count = 0
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        line, *fields = head.split(b"\r\n")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (f.partition(b":") for f in fields)
        }
        yield line
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            size = -1
            while data and size:
                length, _, data = data.partition(b"\r\n")
                size = int(length, 16)
                data = data[size + 2 :]
        elif not (count < len(bodiless) and bodiless[count]):
            data = data[int(headers.get(b"content-length", 0)) :]
        count += 1


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
