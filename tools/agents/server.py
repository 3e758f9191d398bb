"""The server with the scripted engine process, as a child of this program."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_START_SECONDS = 120
_STOP_SECONDS = 60


@dataclass(frozen=True)
class RunningServer:
    """A server that answers on 127.0.0.1; its model is called `model`."""

    port: int
    key: str
    model: str
    request_log: Path

    def records(self) -> list[dict[str, Any]]:
        """The request log so far."""
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in self.request_log.read_text().splitlines()]
        return []


@contextmanager
def running(artifact: Path, context: int, model: str, folder: Path) -> Iterator[RunningServer]:
    """Start a server whose model is called `model`, wait until it is ready, and end it by SIGTERM. `folder`
    gets its logs."""
    server = RunningServer(_free_port(), secrets.token_hex(8), model, folder / "requests.jsonl")
    command = [
        *(sys.executable, "-m", "tools.agents.serve", str(artifact)),
        *("--port", str(server.port), "--api-key", server.key, "--model-id", server.model),
        *("--max-context", str(context), "--kv-capacity", str(2 * context), "--max-concurrency", "2"),
        *("--request-log-jsonl", str(server.request_log)),
    ]
    with open(folder / "server.err", "wb") as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
        try:
            _wait_until_ready(process, server.port, folder / "server.err")
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
    if code != 0:
        raise RuntimeError(f"the server ended with exit code {code}; see {folder / 'server.err'}")


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(
                f"the server did not start (exit code {process.returncode}):\n{log.read_text()}"
            )
        with (
            contextlib.suppress(OSError),
            opener.open(f"http://127.0.0.1:{port}/health", timeout=5) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the server was not ready within {_START_SECONDS} s:\n{log.read_text()}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
