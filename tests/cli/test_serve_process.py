"""`ninfer-serve` as a process with ninfer-nano: start, signals, failure, and their exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

ROOT = Path(__file__).parents[2]
NANO = ROOT / "models" / "ninfer-nano.ninfer"
COMMAND = [sys.executable, "-m", "ninfer.cli.serve"]
STARTS = 60


class Server:
    """A server process, its address, and what it has written to stderr."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += iter(self.process.stderr.readline, "")

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def base(self) -> str:
        """Wait until it says where it is."""
        deadline = time.monotonic() + STARTS
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"base URL (http://\S+)/v1 ", self.log):
                return found[1]
            time.sleep(0.02)
        raise AssertionError(f"the server did not start:\n{self.log}")

    def workers(self) -> list[int]:
        """The engine process, if there is one."""
        listed = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for file in listed for pid in file.read_text().split()]

    def end(self, limit: float = 20) -> int:
        code = self.process.wait(limit)
        self._reader.join(5)
        return code


@contextmanager
def server(*options: object, model: object = NANO, **environment: str) -> Iterator[Server]:
    words = [str(word) for word in ("--port", 0, "--threads", 1, "--max-context", 512, *options)]
    process = subprocess.Popen(
        [*COMMAND, str(model), *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        running = Server(process)
        try:
            yield running
        finally:
            process.kill()
            running.end()


def get(url: str, body: object = None, **headers: str) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


QUESTION = {
    "model": "other",
    "messages": [{"role": "user", "content": "What is 2 + 3?"}],
    "max_tokens": 400,
    "temperature": 0,
}


def test_a_server_starts_answers_and_ends_with_its_answers_complete(tmp_path: Path):
    log = tmp_path / "log.jsonl"
    options = ("--model-alias", "other", "--api-key", "the-secret", "--request-log-jsonl", log)
    with server(*options) as running:
        base = running.base()
        assert get(f"{base}/health") == (200, '{"status":"ok"}')
        assert get(f"{base}/v1/chat/completions", QUESTION)[0] == 401
        [worker] = running.workers()
        environment = (
            Path(f"/proc/{worker}/environ").read_bytes() + Path(f"/proc/{worker}/cmdline").read_bytes()
        )
        assert b"the-secret" not in environment
        # Another server on the same port ends at once, before it loads anything.
        port = base.rpartition(":")[2]
        second = subprocess.run(
            [*COMMAND, str(NANO), "--port", port], cwd=ROOT, capture_output=True, text=True, timeout=STARTS
        )
        assert second.returncode == 1
        assert second.stderr.startswith(f"ninfer-serve: cannot listen on 127.0.0.1, port {port}: ")
        assert second.stderr.count("\n") == 1
        answers: list[tuple[int, str]] = []
        authorization = {"Authorization": "Bearer the-secret"}
        asking = Thread(
            target=lambda: answers.append(get(f"{base}/v1/chat/completions", QUESTION, **authorization))
        )
        asking.start()
        time.sleep(0.05)
        os.killpg(running.process.pid, signal.SIGINT)  # as from a terminal
        assert running.end() == 0
        asking.join(5)
        # The signal came before the answer or after it; begun, it is finished.
        if answers[0][0] == 200:
            assert json.loads(answers[0][1])["choices"][0]["finish_reason"] == "stop"
        assert not Path(f"/proc/{worker}").exists()
        assert "server stopped" in running.log
        assert "the-secret" not in running.log + log.read_text()
        assert "Authorization: Bearer $NINFER_API_KEY" in running.log


def test_a_dead_engine_ends_the_server_with_2():
    with server(NINFER_API_KEY="from-environment") as running:
        base = running.base()
        assert get(f"{base}/v1/models")[0] == 401
        assert get(f"{base}/v1/models", **{"x-api-key": "from-environment"})[0] == 200
        [worker] = running.workers()
        assert b"from-environment" not in Path(f"/proc/{worker}/environ").read_bytes()
        os.kill(worker, signal.SIGKILL)
        assert running.end() == 2
        assert "SIGKILL" in running.log
        assert "Traceback" not in running.log


def test_an_engine_does_not_outlive_its_server():
    with server() as running:
        running.base()
        [worker] = running.workers()
        running.process.kill()
        running.end()
        deadline = time.monotonic() + 5
        while Path(f"/proc/{worker}/exe").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not os.path.exists(f"/proc/{worker}/exe") or Path(f"/proc/{worker}/stat").read_text().count(
            " Z "
        )


@pytest.mark.parametrize(
    ("path", "words"),
    [("/no/such/model", "/no/such/model does not exist"), (__file__, "test_serve_process.py")],
)
def test_what_cannot_be_loaded_is_one_sentence(path: str, words: str):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run = subprocess.run(
        [*COMMAND, path, "--port", str(port), "--log-level", "error"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=STARTS,
    )
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.startswith("ninfer-serve: ")
    assert words in run.stderr
    assert run.stderr.count("\n") == 1


def test_a_synthetic_model_is_served():
    with server(model="synthetic:tiny/quasar") as running:
        base = running.base()
        code, text = get(f"{base}/v1/chat/completions", {**QUESTION, "model": "tiny-quasar-synthetic"})
        assert code == 200
        assert json.loads(text)["model"] == "tiny-quasar-synthetic"
