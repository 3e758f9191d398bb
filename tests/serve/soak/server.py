"""A server as users start it, in processes of its own, and what can be seen of it from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

ROOT = Path(__file__).parents[3]
NANO = ROOT / "models" / "ninfer-nano.ninfer"
START = 120.0
"""Seconds that a start may take on a busy machine."""


class Server:
    """`ninfer-serve` with ninfer-nano on a free port of the loopback address; its output goes into `log`.

    Use as a context manager: at the end nothing of it is left.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.log = folder / "server.log"
        self.url = ""
        command = [sys.executable, "-m", "ninfer.cli.serve", str(NANO), "--port", "0", "--threads", "1"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def __enter__(self) -> Server:
        try:
            end = time.monotonic() + START
            while not (found := re.search(r"Anthropic clients +base URL (\S+)", self.output())):
                assert self._process.poll() is None, self.output()
                assert time.monotonic() < end, f"not ready within {START:g} s:\n{self.output()}"
                time.sleep(0.05)
            self.url = found.group(1)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        code = self._end()
        assert kind is not None or code == 0, f"exit code {code}:\n{self.output()[-2000:]}"

    def _end(self) -> int:
        self._process.terminate()
        try:
            return self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def output(self) -> str:
        return self.log.read_text("utf-8")

    def complaints(self) -> list[str]:
        """Lines of the log that speak of a defect."""
        words = ("Traceback", " ERROR ", "internal error", "Exception", "Task was destroyed", "never awaited")
        return [line for line in self.output().splitlines() if any(word in line for word in words)]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def engine(self) -> int:
        """The engine's process id."""
        (pid,) = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(pid)

    def processes(self) -> dict[str, Process]:
        return {"server": seen(self.pid), "engine": seen(self.engine)}

    def metrics(self) -> dict[str, float]:
        """The values of /metrics by name; of those with labels, the sum."""
        values: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                values[name] = values.get(name, 0.0) + float(value)
        return values


@dataclass(frozen=True)
class Process:
    """File descriptors, threads; bytes that are resident and nobody else's, all that are resident, and the
    most that ever were (since `peak_reset`)."""

    descriptors: int
    threads: int
    resident: int
    resident_all: int
    peak: int


def seen(pid: int) -> Process:
    status = Path(f"/proc/{pid}/status").read_text()
    found = dict(re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE))
    sizes = [int(found[name]) << 10 for name in ("RssAnon", "VmRSS", "VmHWM")]
    return Process(len(os.listdir(f"/proc/{pid}/fd")), int(found["Threads"]), *sizes)


def peak_reset(pid: int) -> None:
    """Measure the peak from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
