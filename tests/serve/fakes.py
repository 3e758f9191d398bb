"""An engine that says what a test wants, in real time or none, and a client that can leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import orjson
from starlette.types import ASGIApp

from ninfer.api.loading import load_frontend, opened
from ninfer.api.options import EngineOptions
from ninfer.engine import Done, Event, Output, PromptProgress, RuntimeStatistics, Started, Statistics
from ninfer.errors import NInferError
from ninfer.events import Channel, FinishReason, TokenLogprob
from ninfer.frontend import Frontend
from ninfer.serve.generation import Service
from ninfer.serve.jobs import EngineInfo, Job, LinkState
from ninfer.serve.observer import Observer, Outcome, RequestRecord
from ninfer.serve.options import ServeOptions
from ninfer.serve.server import Server

NANO = Path(__file__).parents[2] / "models" / "ninfer-nano.ninfer"
MODEL = "ninfer-nano"

Step = Event | float | asyncio.Event | NInferError | Exception
"""One step of a script: say something, sleep so many seconds, wait for a signal, or fail."""
Script = Iterable[Step]


@cache
def nano_frontend() -> Frontend:
    """The frontend of the model in git; loads no weights and no torch."""
    with opened(NANO, None, None) as artifact:
        return load_frontend(artifact)


def statistics(
    *,
    prompt: int = 10,
    reused: int = 0,
    generated: int = 5,
    reasoning: int = 0,
    reason: FinishReason = FinishReason.STOP_TOKEN,
    stop_string: str | None = None,
) -> Statistics:
    return Statistics(
        finish_reason=reason,
        prompt_tokens=prompt,
        reused_tokens=reused,
        generated_tokens=generated,
        reasoning_tokens=reasoning,
        prefill_seconds=0.02,
        decode_seconds=0.04,
        token_ids=tuple(range(generated)),
        queue_seconds=0.001,
        first_token_seconds=0.021 if generated else None,
        total_seconds=0.061,
        rounds=max(0, generated - 1),
        stop_string=stop_string,
    )


def says(
    *texts: str | tuple[Channel, str] | Output | float | asyncio.Event | NInferError,
    prompt: int | None = None,
    reused: int = 0,
    reasoning: int | None = None,
    reason: FinishReason = FinishReason.STOP_TOKEN,
    stop_string: str | None = None,
) -> Callable[[Job], list[Step]]:
    """A script: start, the prompt's progress, each text (a string is content) as one token, done."""

    def script(job: Job) -> list[Step]:
        tokens = len(job.prompt.tokens) if prompt is None else prompt
        steps: list[Step] = [Started(tokens, reused), PromptProgress(tokens, tokens, 0.02)]
        count = thought = 0
        for text in texts:
            if isinstance(text, str):
                text = Output(Channel.CONTENT, text)
            elif isinstance(text, tuple):
                text = Output(*text)
            if isinstance(text, Output):
                count += 1
                thought += text.channel is Channel.REASONING
                text = Output(text.channel, text.text, text.logprobs, count, 0.01 * (count - 1))
            steps.append(text)
        done = statistics(
            prompt=tokens,
            reused=reused,
            generated=count + (reason is FinishReason.STOP_TOKEN),
            reasoning=thought if reasoning is None else reasoning,
            reason=reason,
            stop_string=stop_string,
        )
        return [*steps, Done(done)]

    return script


def thinks(text: str) -> tuple[Channel, str]:
    return Channel.REASONING, text


def calls(text: str) -> tuple[Channel, str]:
    """Text of the tool channel."""
    return Channel.TOOL, text


def call_text(name: str, **parameters: str) -> str:
    """A tool call as the model writes it."""
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


class FakeStream:
    """A `JobStream` that plays a script; cancelled, it ends with a `Done` that says so."""

    def __init__(self, job: Job, script: Script) -> None:
        self.job = job
        self.cancelled = self.closed = self.ended = False
        self._script = script
        self._stop = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled = True
        self._stop.set()

    def close(self) -> None:
        self.closed = True
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        generated = 0
        for step in self._script:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, float | asyncio.Event):
                await self._wait(step)
            if self._stop.is_set():
                tokens = len(self.job.prompt.tokens)
                step = Done(statistics(prompt=tokens, generated=generated, reason=FinishReason.CANCELLED))
            if not isinstance(step, Event):
                continue
            if isinstance(step, Output):
                generated = step.generated
            self.ended = isinstance(step, Done)
            yield step
            if self.ended:
                return

    async def _wait(self, step: float | asyncio.Event) -> None:
        waits = [asyncio.ensure_future(self._stop.wait())]
        if isinstance(step, asyncio.Event):
            waits.append(asyncio.ensure_future(step.wait()))
        timeout = step if isinstance(step, float) else None
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


class FakeLink:
    """A `Link` whose jobs play `scripts` in turn, the last one for all that follow.

    `jobs` and `streams` are what was submitted; `reload_seconds` what an unloaded engine takes to start.
    """

    def __init__(
        self,
        *scripts: Callable[[Job], Script] | Script,
        state: LinkState = LinkState.READY,
        max_context: int = 4096,
        max_concurrency: int = 4,
        reload_seconds: float = 0.0,
    ) -> None:
        self.state = state
        self.scripts = list(scripts) or [says("Hello", " there.")]
        self.jobs: list[Job] = []
        self.streams: list[FakeStream] = []
        self.reload_seconds = reload_seconds
        self.info = EngineInfo(
            name=MODEL,
            architecture="Qwen3_5ForCausalLM",
            device="cpu",
            threads=1,
            max_context=max_context,
            kv_dtype="bf16",
            kv_tokens=max_context,
            kv_bytes=0,
            weight_bytes=0,
            load_seconds=0.0,
            memory="",
            max_concurrency=max_concurrency,
        )

    async def submit(self, job: Job) -> FakeStream:
        if self.state is LinkState.UNLOADED:
            self.state = LinkState.STARTING
            await asyncio.sleep(self.reload_seconds)
            self.state = LinkState.READY
        script = self.scripts[min(len(self.jobs), len(self.scripts) - 1)]
        self.jobs.append(job)
        self.streams.append(FakeStream(job, script(job) if callable(script) else script))
        return self.streams[-1]

    async def statistics(self) -> RuntimeStatistics | None:
        return RuntimeStatistics() if self.state is LinkState.READY else None


class Recorder:
    """An observer that remembers: `told` is (event, record id), `facts` what came with it."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.facts: list[Any] = []
        self.records: list[RequestRecord] = []

    def started(self, record: RequestRecord) -> None:
        self._tell("started", record, None)

    def rejected(self, record: RequestRecord, error: Exception) -> None:
        self._tell("rejected", record, error)

    def done(self, record: RequestRecord, outcome: Outcome) -> None:
        self._tell("done", record, outcome)

    def failed(self, record: RequestRecord, error: Exception) -> None:
        self._tell("failed", record, error)

    def response_failed(self, record: RequestRecord, phase: str, error: BaseException) -> None:
        self._tell("response_failed", record, (phase, error))

    def _tell(self, event: str, record: RequestRecord, fact: Any) -> None:
        self.told.append((event, record.id))
        self.records.append(record)
        self.facts.append(fact)


def make_server(
    link: FakeLink | None = None,
    *observers: Observer,
    max_concurrency: int = 4,
    max_pending: int = 4,
    pending_timeout: float | None = 5.0,
    **options: Any,
) -> Server:
    """A server on a fake engine and the real frontend of ninfer-nano. Call it inside an event loop."""
    link = link or FakeLink()
    engine = EngineOptions(
        max_concurrency=max_concurrency, max_pending=max_pending, pending_timeout=pending_timeout
    )
    chosen = ServeOptions(NANO, engine, **options)
    service = Service(nano_frontend(), link, chosen, observers)
    name = chosen.model_id or MODEL
    return Server(chosen, nano_frontend(), link, service, name, frozenset((name, *chosen.model_aliases)))


def logprob(token: int, value: float = -0.5, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(token, value, top)


class Call:
    """One HTTP request straight into an ASGI app, read as it comes; `leave` closes the connection.

    `read` returns the next piece of the body (None at its end); `status` and `headers` are known after
    `start`.
    """

    def __init__(
        self,
        app: ASGIApp,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        pieces: Sequence[bytes] | None = None,
    ) -> None:
        data = body if isinstance(body, bytes) else orjson.dumps(body) if body is not None else b""
        self._pieces = list(pieces) if pieces is not None else [data]
        self.taken = 0
        self._left = asyncio.Event()
        self._out: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._gate = asyncio.Event()
        self._gate.set()
        self.status = 0
        self.headers: dict[str, str] = {}
        sent = [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()]
        if pieces is None:
            sent.append((b"content-length", str(len(data)).encode()))
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": sent,
            "scheme": "http",
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    def leave(self) -> None:
        self._left.set()

    def stall(self) -> None:
        """Stop reading: what the app sends waits."""
        self._gate.clear()

    def resume(self) -> None:
        self._gate.set()

    async def start(self) -> int:
        message = await asyncio.wait_for(self._out.get(), 10)
        assert message["type"] == "http.response.start"
        self.status = message["status"]
        self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        return self.status

    async def read(self) -> bytes | None:
        message = await asyncio.wait_for(self._out.get(), 10)
        if not message.get("more_body") and not message.get("body"):
            return None
        return message["body"]

    async def rest(self) -> bytes:
        """Everything up to the end."""
        await self.task
        parts = []
        while not self._out.empty():
            parts.append(self._out.get_nowait().get("body", b""))
        return b"".join(parts)

    async def _receive(self) -> dict[str, Any]:
        if self.taken < len(self._pieces) and not self._left.is_set():
            piece = self._pieces[self.taken]
            self.taken += 1
            more = self.taken < len(self._pieces)
            return {"type": "http.request", "body": piece, "more_body": more}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self._gate.wait()
        if not self._left.is_set():
            self._out.put_nowait(message)


def events_of(body: bytes) -> list[tuple[str | None, Any]]:
    """(event, data) of an SSE body; comments left out; `[DONE]` as that string."""
    found = []
    for block in body.decode().split("\n\n"):
        name, data = None, None
        for line in block.split("\n"):
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data = line[6:]
        if data is not None:
            found.append((name, data if data == "[DONE]" else orjson.loads(data)))
    return found
