"""A server process, and what can be seen of it from outside."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tests.serve.e2e.process import NANO, ServerProcess

_COMPLAINTS = ("Traceback", " ERROR ", "internal error", "Exception", "Task was destroyed", "never awaited")


class Server(ServerProcess):
    """ninfer-nano, served."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(NANO, folder, *options)

    @property
    def pid(self) -> int:
        return self.process.pid

    def __enter__(self) -> Server:
        super().__enter__()
        return self

    def complaints(self) -> list[str]:
        """Lines of the log that speak of a defect."""
        return [line for line in self.output().splitlines() if any(word in line for word in _COMPLAINTS)]

    def open_requests(self) -> set[int]:
        """Numbers of the requests that have begun, by the request log, and not ended."""
        begun, *ended = (
            {record["request"]["request_id"] for record in self.records(f"request_{event}")}
            for event in ("start", "done", "error")
        )
        return begun - set().union(*ended)

    def processes(self) -> dict[str, Process]:
        return {"server": seen(self.pid), "engine": seen(self.engine)}

    def metrics(self) -> dict[str, float]:
        """The values of /metrics by name; of those with labels, the sum."""
        with self.http() as http:
            text = http.get("/metrics").text
        values: dict[str, float] = {}
        for line in text.splitlines():
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
