"""One life of the engine process: started, talked to, noticed when it ends, and nothing of it left behind.

Everything here is called in the server's event loop. The process hangs on a pipe to its stdin, which closes
with ours, so that it can't outlive the server.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

import msgspec
import zmq

from ninfer.api.options import EngineOptions
from ninfer.serve.records import Command, Hello, Report, Setup, Shutdown, decode_report, encode

_KEY_VARIABLE = "NINFER_API_KEY"
_SOCKET_PATH = 100
"""Longest path of a Unix socket, in bytes (108 with its end on Linux, 104 on macOS)."""
_AT_ONCE = 64
"""Messages that are read before the rest of the event loop has its turn."""
_LAST_WORDS = 0.1
"""Seconds in which the last messages of a process that has ended may still arrive."""


def worker_command() -> tuple[str, ...]:
    """Python and the worker's module. What lies in the current folder is none of its modules, unless this
    process finds modules there as well."""
    found = "" in sys.path or os.getcwd() in sys.path
    return (sys.executable, *(() if found else ("-P",)), "-m", "ninfer.serve.worker")


class EngineProcess:
    """Starts at once. `receive` gets its reports in order; `ended` gets the exit code (negative: a signal)
    once, after the last report, when everything that belonged to the process is gone."""

    def __init__(
        self,
        command: Sequence[str],
        model: Path,
        options: EngineOptions,
        *,
        warm_up: bool,
        receive: Callable[[Report], None],
        ended: Callable[[int], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive, self._ended = receive, ended
        self._token = secrets.token_bytes(16)
        self._commands: bytes | None = None
        """The identity of its command socket, once it has said hello."""
        self._early: list[bytes] = []
        """Commands for when it has: its other socket may be the faster one."""
        self._over = asyncio.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="ninfer-"))
        """Readable by us only, and the socket in it."""
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.ROUTER)
            self._socket.set_hwm(0)
            self._socket.linger = 0
            address = self._bind()
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=_environment(), **_APART
            )
        except BaseException:
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._descriptor = self._socket.fileno()
        self._loop.add_reader(self._descriptor, self._read)
        setup = encode(Setup(address, self._token, model, options, warm_up))
        self._thread = Thread(target=self._attend, args=(setup,), name="ninfer-engine-process", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._over.is_set()

    def send(self, command: Command) -> None:
        """Never waits; without effect on a process that has ended."""
        self._post(encode(command))

    def kill(self) -> None:
        """End it now; `ended` follows."""
        with suppress(OSError):
            self._process.kill()

    async def stop(self, grace: float) -> None:
        """Ask it to end, kill it after `grace` seconds, and wait until it is gone. One that still loads
        doesn't listen; it must be killed."""
        self.send(Shutdown())
        try:
            await asyncio.wait_for(self._over.wait(), grace)
        except TimeoutError:
            self.kill()
            await self._over.wait()

    def _bind(self) -> str:
        path = self._folder / "engine"
        if sys.platform != "win32" and len(os.fsencode(path)) <= _SOCKET_PATH:
            self._socket.bind(f"ipc://{path}")
            return f"ipc://{path}"
        # Anybody here can connect to this one; without the token nobody is listened or talked to.
        return f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    def _post(self, data: bytes) -> None:
        if self._commands is None:
            self._early.append(data)
            return
        if self._socket.closed:
            return
        self._socket.send_multipart([self._commands, data])
        # Sending may take up the event that would have told of a message.
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        # The socket's descriptor tells of the first message only, so we look until there is none.
        if not self._socket.closed and self._read_some():
            self._loop.call_soon(self._read)

    def _read_some(self) -> bool:
        """Take a bounded number of messages; False if there are no more."""
        for _ in range(_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            if len(frames) == 2 and secrets.compare_digest(frames[0][: len(self._token)], self._token):
                self._take(frames[0], frames[1])
        return True

    def _take(self, sender: bytes, data: bytes) -> None:
        try:
            report = decode_report(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.kill()
            return
        if isinstance(report, Hello):
            self._commands = sender
            for early in self._early:
                self._post(early)
        self._receive(report)

    def _attend(self, setup: bytes) -> None:
        """In a thread of its own: hand over the setup, then wait for the end."""
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(OSError):
            pipe.write(len(setup).to_bytes(4, "little") + setup)
            pipe.flush()
        code = self._process.wait()
        with suppress(OSError):
            pipe.close()
        with suppress(RuntimeError):  # the loop is closed: nobody wants to know
            self._loop.call_soon_threadsafe(self._loop.call_later, _LAST_WORDS, self._finish, code)

    def _finish(self, code: int) -> None:
        while self._read_some():
            pass
        self._loop.remove_reader(self._descriptor)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._thread.join()
        self._over.set()
        self._ended(code)


def describe_exit(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    # The kernel's way of saying that memory is exhausted.
    return f"{name}, perhaps for want of memory" if name == "SIGKILL" else name


# A Ctrl-C on the terminal is for the server, which lets answers finish first.
_APART: dict = (
    {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    if sys.platform == "win32"
    else {"process_group": 0}
)


def _environment() -> dict[str, str]:
    """Ours without the server's secrets; idle threads of the OpenMP runtime sleep soon (see cli.common)."""
    environment = {name: value for name, value in os.environ.items() if name != _KEY_VARIABLE}
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environment.keys():
        environment["GOMP_SPINCOUNT"] = "10000"
    return environment
