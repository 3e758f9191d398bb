"""The engine process: `python -m ninfer.serve.worker`, started by the server, which tells it all by records.

The main thread takes commands and sleeps in between. Events are sent by whoever makes them, which is the
engine's worker: encoding and sending them takes it less time than waking another thread, which would then
compete for the interpreter.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from time import perf_counter
from typing import TYPE_CHECKING

import zmq

from ninfer.api import Engine, Generation, GenerationOptions, Output
from ninfer.api.loading import located
from ninfer.api.signature import prefill_signature, weight_formats
from ninfer.errors import ContextLengthError, NInferError, UnavailableError
from ninfer.serve.jobs import EngineInfo
from ninfer.serve.records import (
    Cancel,
    Counters,
    EngineFailed,
    Events,
    Failed,
    Heartbeat,
    Hello,
    LoadFailed,
    Loading,
    Opened,
    Query,
    Ready,
    Report,
    Setup,
    Submit,
    clean,
    decode_command,
    decode_setup,
    described,
    encode,
)

if TYPE_CHECKING:
    from ninfer.engine import Event
    from ninfer.runtime import Plan

_HEARTBEAT = 1.0
"""Seconds between signs of life."""
_SWITCH = 0.5e-3
"""Seconds that the engine's worker waits at most while the main thread takes in a long prompt."""
_LINGER = 2000
"""Milliseconds in which last words may leave at the end."""


class Line:
    """Both directions to the server. `send` may be called from any thread and never waits."""

    def __init__(self, setup: Setup) -> None:
        self._context = zmq.Context()
        self._lock = Lock()
        self._out = self._connect(setup, b"events")
        self._in = self._connect(setup, b"commands")
        self._in.rcvtimeo = round(_HEARTBEAT * 1000)
        self._in.send(encode(Hello()))

    def _connect(self, setup: Setup, role: bytes) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.linger = _LINGER
        socket.setsockopt(zmq.IDENTITY, setup.token + role)
        socket.connect(setup.address)
        return socket

    def send(self, report: Report) -> None:
        data = encode(report)
        with self._lock:
            self._out.send(data)

    def receive(self) -> bytes | None:
        """The next command; None after a second without one."""
        try:
            return self._in.recv()
        except zmq.Again:
            return None

    def close(self) -> None:
        with self._lock:
            self._out.close()
        self._in.close()
        self._context.term()


class Jobs:
    """The running answers; each sends its own events."""

    def __init__(self, engine: Engine, send: Callable[[Report], None]) -> None:
        self._engine, self._send = engine, send
        self._running: dict[int, Generation] = {}
        self._lock = Lock()
        """Of two threads that hand over at a time (the first look comes from the main thread) one waits."""
        self._failed = False
        self.handovers, self.seconds = 0, 0.0

    def submit(self, command: Submit) -> None:
        """Queue a job; what is wrong with it is its own error."""
        try:
            generation = self._engine.generate(command.whole_prompt(), command.options)
        except Exception as error:
            self._fail(command.job, error)
            return
        self._running[command.job] = generation
        generation.handle.listen(partial(self._hand_over, command.job, generation))

    def cancel(self, job: int) -> None:
        if (generation := self._running.get(job)) is not None:
            generation.cancel()

    def _hand_over(self, job: int, generation: Generation) -> None:
        """Send what there is; called in the engine's worker."""
        begin = perf_counter()
        handle = generation.handle
        with self._lock:
            events: list[Event] = []
            failure: Exception | None = None
            try:
                while (event := handle.poll()) is not None:
                    if not (events and isinstance(event, Output) and _joined(events, event)):
                        events.append(event)
            except Exception as error:
                failure = error
            try:
                if events:
                    self._send(Events.of(job, events))
            except Exception as error:
                failure = failure or error
                generation.cancel()
            if failure is not None:
                self._fail(job, failure)
            if handle.drained or failure is not None:
                self._running.pop(job, None)
                handle.listen(None)
                handle.close()
            self.handovers += 1
            self.seconds += perf_counter() - begin

    def _fail(self, job: int, error: Exception) -> None:
        if not isinstance(error, NInferError):
            _print_defect(error)
        self._send(Failed(job, *described(error)))
        if isinstance(error, UnavailableError):
            self.check()

    def check(self) -> None:
        """Tell, once, if the engine has failed."""
        health = self._engine.health()
        if not health.available and not self._failed:
            self._failed = True
            self._send(EngineFailed(clean(health.error or "the engine has failed")))

    def close(self) -> None:
        """The engine is about to be closed, which is no failure."""
        self._failed = True


def _joined(events: list[Event], event: Output) -> bool:
    """Texts that go out together are one event, which costs everyone behind us as much as each of them
    would. Adds `event` to the last one, if that is text of the same channel."""
    last = events[-1]
    if not isinstance(last, Output) or last.channel is not event.channel:
        return False
    events[-1] = replace(event, text=last.text + event.text, logprobs=last.logprobs + event.logprobs)
    return True


def main(work: Callable[[Setup, Line], int] | None = None) -> int:
    """Do the work of an engine process (a test's own instead) until the server ends it; the exit code."""
    # The server decides when we end, also where a terminal or a supervisor signals everybody.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH)
    setup = decode_setup(_read(int.from_bytes(_read(4), "little")))
    Thread(target=_end_with_server, args=(setup.address,), daemon=True).start()
    line = Line(setup)
    try:
        return (work or _work)(setup, line)
    finally:
        line.close()


def _work(setup: Setup, line: Line) -> int:
    try:
        engine = _load(setup, line.send)
    except Exception as error:
        if not isinstance(error, NInferError):
            traceback.print_exc()
        line.send(LoadFailed(*described(error)))
        return 1
    with engine:
        _serve(engine, line)
    return 0


def _load(setup: Setup, send: Callable[[Report], None]) -> Engine:
    def tell(stage: str, done: int, total: int) -> None:
        send(Loading(clean(stage), done, total))

    path = located(setup.model, setup.options.cache_dir, tell)
    send(Opened(path))
    engine = Engine.load(path, replace(setup.options, warm_up=setup.warm_up), progress=tell)
    try:
        if setup.warm_up:
            # Seconds for a large vocabulary, with the interpreter locked: not in the middle of an answer.
            engine.frontend.prepare_grammars()
            short = GenerationOptions(max_new=4, prefix_reuse=False)
            with suppress(ContextLengthError):
                engine.chat([{"role": "user", "content": "hi"}], short).text()
        # What is there now stays: the collector need not look through it again in the middle of an answer.
        gc.collect()
        gc.freeze()
        send(Ready(_info(engine)))
    except BaseException:
        engine.close()
        raise
    return engine


def _serve(engine: Engine, line: Line) -> None:
    jobs = Jobs(engine, line.send)
    beat = perf_counter()
    while True:
        data = line.receive()
        if perf_counter() - beat >= _HEARTBEAT:
            beat = perf_counter()
            jobs.check()
            line.send(Heartbeat())
        if data is None:
            continue
        command = decode_command(data)
        if isinstance(command, Submit):
            jobs.submit(command)
        elif isinstance(command, Cancel):
            jobs.cancel(command.job)
        elif isinstance(command, Query):
            counters = replace(engine.statistics(), handovers=jobs.handovers, handover_seconds=jobs.seconds)
            line.send(Counters(command.number, counters))
        else:
            jobs.close()
            return


def _info(engine: Engine) -> EngineInfo:
    description, plan, artifact = engine.description, engine.plan, engine.artifact
    return EngineInfo(
        name=description.name,
        architecture=description.architecture,
        device=description.device,
        threads=description.threads,
        max_context=description.max_context,
        kv_dtype=description.kv_dtype,
        kv_tokens=description.kv_tokens,
        kv_bytes=description.kv_bytes,
        weight_bytes=description.weight_bytes,
        load_seconds=description.load_seconds,
        memory=description.memory,
        max_concurrency=plan.concurrency,
        prefill_chunk=plan.prefill_chunk,
        pages=plan.pages,
        snapshots=plan.snapshots,
        slots=plan.slots,
        slot_bytes=plan.slot_bytes,
        buffer_bytes=plan.buffer_bytes,
        workspace_bytes=plan.workspace_bytes,
        record_bytes=plan.record_bytes,
        graph_bytes=plan.graph_bytes,
        artifact_path=clean(str(artifact.path)),
        artifact_bytes=sum(
            artifact.path.with_name(file.path or artifact.path.name).stat().st_size
            for file in artifact.directory.files
        ),
        artifact_objects=len(artifact.objects),
        formats=tuple(weight_formats(artifact)),
        prefill_signature=prefill_signature(artifact),
        process=os.getpid(),
        memory_available=_free(plan, description.device),
        device_name=description.device_name,
        cuda_graph=description.cuda_graph,
        upload_seconds=description.upload_seconds,
        extra={"artifact_id": artifact.artifact_id.hex(), **_cuda(description.device)},
    )


def _free(plan: Plan, device: str) -> int | None:
    """Memory for what the plan counts and more. The machine's is taken page by page, a GPU's at once."""
    from ninfer.runtime.memory import machine_bytes

    return machine_bytes() if device == "cpu" else plan.available_bytes


def _cuda(device: str) -> dict[str, str]:
    """Which GPU it is, whatever number the driver gives it, and with which CUDA."""
    if device == "cpu":
        return {}
    import torch

    version = torch.version.cuda or ""
    return {
        "gpu_uuids": str(torch.cuda.get_device_properties(device).uuid),
        "cuda_compile_version": version,
        "cuda_runtime_version": version,
    }


def _read(count: int) -> bytes:
    """So many bytes of stdin; past its buffered reader, which mustn't be in use when Python ends."""
    data = b""
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            os._exit(1)
        data += piece
    return data


def _end_with_server(address: str) -> None:
    """The server holds the other end of our stdin and never writes to it again: it is readable when the
    server is gone, however it went. Nothing that we are doing is of use then."""
    os.read(0, 1)
    kind, _, place = address.partition("://")
    if kind == "ipc":
        shutil.rmtree(Path(place).parent, ignore_errors=True)
    os._exit(1)


def _print_defect(error: Exception) -> None:
    """Where it happened; not the error's words, which might be a request's."""
    place = "".join(traceback.format_tb(error.__traceback__))
    with suppress(OSError, ValueError):  # nobody may be reading
        print(f"{place}{type(error).__name__}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
