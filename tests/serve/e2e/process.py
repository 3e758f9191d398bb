"""A server as users start it: a process of its own, talked to over HTTP, ended by a signal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

ROOT = Path(__file__).parents[3]
NANO = ROOT / "models" / "ninfer-nano.ninfer"
START = 120.0
"""Seconds that a start may take on a busy machine."""
KEY = "any"


class ServerProcess:
    """`ninfer-serve` on a free port of the loopback address. Its output goes into `log`, its request log into
    `records` beside it. Use as a context manager: at the end nothing of it is left."""

    def __init__(self, model: Path, folder: Path, *options: str, key: str | None = None) -> None:
        self.log, self._records, self.key = folder / "server.log", folder / "requests.jsonl", key
        self.url = ""
        self.name = ""
        environment = dict(os.environ, PYTHONPATH=str(ROOT))
        if key is not None:
            environment["NINFER_API_KEY"] = key
        command = [sys.executable, "-m", "ninfer.cli.serve", str(model), "--port", "0", "--threads", "1"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--request-log-jsonl", str(self._records), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=folder,
            )

    def __enter__(self) -> ServerProcess:
        try:
            return self.ready()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def ready(self) -> ServerProcess:
        """Wait until it says where it listens."""
        found = wait_for(self._announced, START, lambda: f"no announcement in:\n{self.output()}")
        self.url, self.name = found.group(1), found.group(2)
        return self

    def _announced(self) -> re.Match[str] | None:
        assert self.process.poll() is None, self.output()
        return re.search(r"Anthropic clients +base URL (\S+) .*\n +model +(\S+)", self.output())

    def output(self) -> str:
        return self.log.read_text("utf-8")

    @property
    def engine(self) -> int:
        """The engine's process id."""
        (pid,) = self.engines
        return pid

    @property
    def engines(self) -> list[int]:
        """Process ids of the children that are no zombies."""
        folder = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = [int(pid) for pid in folder.read_text().split()]
        return [pid for pid in children if _runs(pid)]

    def records(self, event: str = "request_done") -> list[dict[str, Any]]:
        """The records of the request log of that kind."""
        lines = [json.loads(line) for line in self.log_of_requests().splitlines()]
        return [record for record in lines if record["event"] == event]

    def log_of_requests(self) -> str:
        return self._records.read_text("utf-8")

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, headers=self._headers(), **options)

    def _headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._client("/v1", options))

    def openai_async(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._client("/v1", options))

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._client("", options))

    def anthropic_async(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._client("", options))

    def _client(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
        known = {"api_key": self.key or KEY, "max_retries": 0, "timeout": 60}
        return {"base_url": self.url + path, **known, **options}

    def tokens(self, prompt: dict[str, Any]) -> list[int]:
        """Those of a chat's `messages`, or of a text as `content`."""
        with self.http() as http:
            answer = http.post("/tokenize", json=prompt)
        assert answer.status_code == 200, answer.text
        return answer.json()["tokens"]

    def stop(self) -> int:
        """Send SIGTERM, wait, give the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_for(look: Callable[[], Any], seconds: float = 10, otherwise: Callable[[], str] | None = None) -> Any:
    """The first value of `look` that is true."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, otherwise() if otherwise else f"not within {seconds:g} s"
        time.sleep(0.02)
    return found


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """What happens inside may take so long, on a machine that has other work too."""
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert took < seconds, f"took {took:.2f} s"
