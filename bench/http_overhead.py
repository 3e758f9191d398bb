"""What the way over processes and HTTP costs one stream: added time to the first token, throughput, and what
the engine spends on handing its events over.

The same conversations are answered by an engine in this process, by one behind the link, and by a server over
HTTP (chat completions, streamed), in turns within one run. The prefix cache is off. An engine is idle while
another answers.

    python -m bench.http_overhead --artifact models/smollm2-135m-instruct.ninfer
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from ninfer.api import (
    Done,
    Engine,
    EngineOptions,
    Event,
    GenerationOptions,
    Output,
    RuntimeStatistics,
    Statistics,
)
from ninfer.serve.jobs import Job
from ninfer.serve.link import EngineLink

TEXT = Path(__file__).parent.parent / "tests" / "data" / "python_reference.txt"
START = 120.0
"""Seconds that the server may take to start."""


@dataclass(frozen=True)
class Answer:
    """One answer as its reader saw it: seconds until the first text and from there to the last, tokens; and
    what the engine itself counted: seconds of prefill, decode rate (tokens a second)."""

    first: float
    rest: float
    tokens: int
    prefill: float
    engine_rate: float
    text: str

    @property
    def beside(self) -> float:
        """Seconds before the first text in which the model did not compute. How long it does differs by more
        from one process to the next than all the rest takes."""
        return self.first - self.prefill

    @property
    def rate(self) -> float:
        return (self.tokens - 1) / self.rest


@dataclass(frozen=True)
class Handover:
    """The worker's time for other processes: microseconds per decode round and per message, and the part of
    the decode time that this and all of the host's work take."""

    per_round: float
    per_message: float
    messages_per_round: float
    share: float
    host_share: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments))
    print(table(figures))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


async def measure(arguments: argparse.Namespace) -> dict:
    options = EngineOptions(prefix_reuse=False, threads=arguments.threads)
    generation = GenerationOptions(
        max_new=arguments.tokens, temperature=0.0, presence_penalty=0.0, thinking=None, prefix_reuse=False
    )
    with Engine.load(arguments.artifact, options) as engine, server(arguments) as port:
        link = EngineLink(arguments.artifact, options)
        await link.start()
        await link.wait_ready()

        async def here(messages: list[dict]) -> Answer:
            return await asyncio.to_thread(in_process, engine, messages, generation)

        async def linked(messages: list[dict]) -> Answer:
            return await behind_link(link, engine, messages, generation)

        async def served(messages: list[dict]) -> Answer:
            return await asyncio.to_thread(over_http, port, messages, arguments.tokens)

        ways: dict[str, Callable[[list[dict]], Awaitable[Answer]]] = {
            "in process": here,
            "link": linked,
            "HTTP": served,
        }
        answers: dict[str, list[Answer]] = {name: [] for name in ways}
        before = None
        for number in range(arguments.rounds + 2):
            messages = conversation(engine, arguments.prompt_tokens, number)
            order = list(ways)
            order = order[number % 3 :] + order[: number % 3]
            got = {}
            for name in order:
                await asyncio.sleep(0.05)
                got[name] = await ways[name](messages)
            if len({answer.text for answer in got.values()}) > 1:
                raise SystemExit("the three ways gave different texts; the comparison means nothing")
            if number < 2:  # everything has run once, caches are warm
                before = await link.statistics()
            elif got["HTTP"].tokens >= arguments.tokens // 2:
                for name in ways:
                    answers[name].append(got[name])
        after = await link.statistics()
        await link.stop()
        assert before is not None
        assert after is not None
        return figures(arguments, answers, handed_over(before, after))


def conversation(engine: Engine, tokens: int, number: int) -> list[dict]:
    """One long message, another each time."""
    ids = engine.frontend.encode(TEXT.read_text(encoding="utf-8"))
    begin = (number * tokens) % max(len(ids) - tokens, 1)
    text = engine.frontend.decode(ids[begin : begin + tokens])
    return [{"role": "user", "content": f"{number}. Explain at length, in many sentences: {text}"}]


class Reader:
    """Reads the events of one answer; made when it is asked for."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._first = self._last = 0.0
        self._pieces: list[str] = []
        self._statistics: Statistics | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Output):
            self._last = time.perf_counter()
            self._first = self._first or self._last
            self._pieces.append(event.text)
        elif isinstance(event, Done):
            self._statistics = event.statistics

    def answer(self) -> Answer:
        assert self._statistics is not None, "an answer ends with Done"
        return Answer(
            self._first - self._begin,
            self._last - self._first,
            self._statistics.generated_tokens,
            self._statistics.prefill_seconds,
            self._statistics.decode_rate or math.nan,
            "".join(self._pieces),
        )


def in_process(engine: Engine, messages: list[dict], options: GenerationOptions) -> Answer:
    reader = Reader()
    for event in engine.chat(messages, options):
        reader.take(event)
    return reader.answer()


async def behind_link(
    link: EngineLink, engine: Engine, messages: list[dict], options: GenerationOptions
) -> Answer:
    reader = Reader()
    async for event in await link.submit(Job(engine.frontend.render(messages), options)):
        reader.take(event)
    return reader.answer()


def over_http(port: int, messages: list[dict], tokens: int) -> Answer:
    body = json.dumps(
        {
            "model": "bench",
            "messages": messages,
            "stream": True,
            "max_tokens": tokens,
            "temperature": 0,
            "presence_penalty": 0,
            "stream_options": {"include_usage": True},
        }
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.connect()
    begin = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"the server said {response.status}: {response.read()[:300]!r}")
    first = last = 0.0
    generated, prefill, rate, pieces = 0, math.nan, math.nan, []
    for line in response:
        now = time.perf_counter()
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if timings := chunk.get("timings"):
            generated, prefill = timings["predicted_n"], timings["prompt_ms"] / 1e3
            rate = (generated - 1) / timings["predicted_ms"] * 1e3
        for choice in chunk["choices"]:
            delta = choice["delta"]
            text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            if text:
                last = now
                first = first or now
                pieces.append(text)
    connection.close()
    return Answer(first - begin, last - first, generated, prefill, rate, "".join(pieces))


@contextmanager
def server(arguments: argparse.Namespace) -> Iterator[int]:
    """A server process; its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ninfer.cli.serve", str(arguments.artifact), "--port", str(port)]
    command += ["--model-id", "bench", "--no-prefix-reuse", "--max-context", "2048"]
    if arguments.threads is not None:
        command += ["--threads", str(arguments.threads)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START
        while not healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start; try: {' '.join(command)}")
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(30)


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def handed_over(before: RuntimeStatistics, after: RuntimeStatistics) -> Handover:
    rounds = after.rounds - before.rounds
    messages = after.handovers - before.handovers
    seconds = after.handover_seconds - before.handover_seconds
    decode = after.decode_seconds - before.decode_seconds
    device = after.decode_device_seconds - before.decode_device_seconds
    return Handover(
        per_round=1e6 * seconds / rounds,
        per_message=1e6 * seconds / messages,
        messages_per_round=messages / rounds,
        share=seconds / decode,
        host_share=1 - device / decode,
    )


def figures(arguments: argparse.Namespace, answers: dict[str, list[Answer]], handover: Handover) -> dict:
    """Differences and ratios are those of one round; medians (and 95th percentiles) over rounds."""
    base = answers["in process"]
    ways = {}
    for name, own in answers.items():
        added = sorted(1e3 * (a.beside - b.beside) for a, b in zip(own, base, strict=True))
        ways[name] = {
            "first_token_ms": median(1e3 * a.first for a in own),
            "beside_prefill_ms": median(1e3 * a.beside for a in own),
            "added_first_token_ms": {"median": median(added), "p95": added[math.ceil(0.95 * len(added)) - 1]},
            "tokens_per_second": median(a.rate for a in own),
            "throughput_ratio": median(a.rate / b.rate for a, b in zip(own, base, strict=True)),
            "engine_decode_ratio": median(
                a.engine_rate / b.engine_rate for a, b in zip(own, base, strict=True)
            ),
        }
    return {
        "artifact": arguments.artifact.name,
        "rounds": len(base),
        "prompt_tokens": arguments.prompt_tokens,
        "tokens": median(a.tokens for a in base),
        "ways": ways,
        "handover": asdict(handover),
    }


def table(figures: dict) -> str:
    lines = [
        f"{figures['artifact']}, {figures['rounds']} rounds, answers of {figures['tokens']:g} tokens",
        "",
        f"{'':<12}{'first token':>13}{'less prefill':>14}{'added, median':>15}{'p95':>12}"
        f"{'tok/s':>9}{'ratio':>8}{'engine only':>13}",
    ]
    for name, way in figures["ways"].items():
        added = way["added_first_token_ms"]
        lines.append(
            f"{name:<12}{way['first_token_ms']:>10.2f} ms{way['beside_prefill_ms']:>11.2f} ms"
            f"{added['median']:>12.2f} ms{added['p95']:>9.2f} ms"
            f"{way['tokens_per_second']:>9.1f}{way['throughput_ratio']:>8.3f}{way['engine_decode_ratio']:>13.3f}"
        )
    h = figures["handover"]
    lines += [
        "",
        f"engine's hand-over: {h['per_round']:.1f} us a round ({h['messages_per_round']:.2f} messages of "
        f"{h['per_message']:.1f} us), {100 * h['share']:.2f} % of decoding; all of the host's time "
        f"{100 * h['host_share']:.2f} %",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
