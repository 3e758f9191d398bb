"""Eight clients that come and go; afterwards nothing of them is left in the server."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import monotonic

import httpx
import pytest

from tests.serve.soak.answers import Events, failure
from tests.serve.soak.asks import CHAT, ask, pool
from tests.serve.soak.clients import Client, Known, Tally
from tests.serve.soak.server import Process, Server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

CLIENTS = 8
CONCURRENCY, PENDING = 4, 4
OPTIONS = (
    *("--max-concurrency", str(CONCURRENCY), "--max-pending-requests", str(PENDING), "--seed", "11"),
    *("--max-context", "2048", "--kv-capacity", "12288", "--prefill-chunk", "256"),
    *("--response-store-max-records", "20"),
)
LAZY_THREADS = 4
"""Threads that render are made when so many are wanted at a time."""
QUIET = ("requests_in_progress", "requests_running", "requests_waiting", "requests_prefilling",
         "kv_pages_active", "kv_pages_reserved")  # fmt: skip


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path, *OPTIONS) as server:
        yield server


def left_over(server: Server, tasks: float, before: dict[str, Process]) -> list[str]:
    """What hasn't been given back."""
    processes = server.processes()  # before we connect ourselves
    metrics = server.metrics()
    found = [f"{name} {metrics[f'ninfer_{name}']:g}" for name in QUIET if metrics[f"ninfer_{name}"]]
    slots, kept = metrics["ninfer_state_slots_used"], metrics["ninfer_prefix_cache_snapshots"]
    if slots != kept:
        found.append(f"{slots:g} state slots are used for {kept:g} snapshots")
    if metrics["ninfer_server_tasks"] > tasks:
        found.append(f"{metrics['ninfer_server_tasks']:g} tasks, {tasks:g} before")
    for name, now in processes.items():
        if now.descriptors > before[name].descriptors:
            found.append(f"{name}: {now.descriptors} file descriptors, {before[name].descriptors} before")
        if now.threads > before[name].threads + LAZY_THREADS:
            found.append(f"{name}: {now.threads} threads, {before[name].threads} before")
    return found


def wait_until_quiet(server: Server, tasks: float, before: dict[str, Process], seconds: float = 20) -> None:
    end = monotonic() + seconds
    while found := left_over(server, tasks, before):
        assert monotonic() < end, found
        time.sleep(0.2)


async def load(server: Server, known: Known, tally: Tally, seconds: float) -> list[dict[str, Process]]:
    """Let the clients do what they do; how large the processes were, every half second."""
    end = monotonic() + seconds
    clients = [Client(server.url, known, tally, seed) for seed in range(CLIENTS)]
    work = asyncio.gather(*(client.run(end) for client in clients))
    sizes = []
    while not work.done():
        sizes.append(server.processes())
        await asyncio.wait([work], timeout=0.5)
    await work
    return sizes


async def take_every_place(server: Server, rounds: int) -> Counter[str]:
    """As many clients as there are places, each with one request after the other, are never refused: one
    place that was lost, or came back late, would be missed."""
    ends: Counter[str] = Counter()

    async def ask_on(number: int, http: httpx.AsyncClient) -> None:
        for turn in range(rounds):
            body = ask(CHAT, f"Say {number}.", max_tokens=1 + turn % 2, stream=True).body
            answer = await http.post(CHAT, json=body)
            error = failure(Events().feed(answer.content)) if answer.status_code == 200 else answer.text
            ends["well" if error is None else str(error)] += 1

    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        await asyncio.gather(*(ask_on(number, http) for number in range(CONCURRENCY + PENDING)))
    return ends


def soak(server: Server, seconds: float, growth: dict[str, int]) -> str:
    """Load the server, look at what is left; `growth` in bytes is what a process may have grown by between
    the second and the last third of the time. What happened, in a line."""
    known, tally = Known(pool()), Tally()
    asyncio.run(known.record(server.url))
    # Threads and buffers that are made on demand are there after that.
    asyncio.run(load(server, known, Tally(), 2))
    time.sleep(1)
    before, tasks = server.processes(), server.metrics()["ninfer_server_tasks"]
    sizes = asyncio.run(load(server, known, tally, seconds))
    wait_until_quiet(server, tasks, before)
    assert set(asyncio.run(take_every_place(server, 20))) == {"well"}
    wait_until_quiet(server, tasks, before)
    third = len(sizes) // 3
    grown = {
        name: median(s[name].resident for s in sizes[-third:])
        - median(s[name].resident for s in sizes[third : 2 * third])
        for name in growth
    }
    memory = ", ".join(f"{name} {bytes_ / 2**20:+.1f} MiB" for name, bytes_ in grown.items())
    line = f"{seconds:g} s, {CLIENTS} clients, {tally}; {memory}"
    print(line, *tally.broken[:20], sep="\n")
    assert not tally.broken
    assert not server.open_requests()
    assert not server.complaints(), server.complaints()
    assert all(grown[name] < limit for name, limit in growth.items()), line
    return line


def test_clients_come_and_go(server: Server) -> None:
    soak(server, 10, {"server": 24 << 20, "engine": 24 << 20})


@pytest.mark.soak
def test_clients_come_and_go_for_five_minutes(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    line = soak(server, 300, {"server": 8 << 20, "engine": 8 << 20})
    with capsys.disabled():
        print(f"\n{line}")
