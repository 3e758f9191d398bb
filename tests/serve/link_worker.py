"""An engine process that follows a script instead of loading a model: `python link_worker.py SCRIPT [WORD]`.

Speaks through the real worker's `Line`; scripts are the functions below.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from ninfer.engine import Done, Output, PromptProgress, RuntimeStatistics, Started, Statistics
from ninfer.events import Channel, FinishReason
from ninfer.serve import worker
from ninfer.serve.jobs import EngineInfo
from ninfer.serve.records import (
    Cancel,
    Counters,
    EngineFailed,
    Events,
    Failed,
    Heartbeat,
    LoadFailed,
    Loading,
    Opened,
    Query,
    Ready,
    Setup,
    Shutdown,
    Submit,
    decode_command,
    encode,
)


def info(setup: Setup, identity: str = "one") -> EngineInfo:
    return EngineInfo(
        name="scripted",
        architecture="none",
        device="cpu",
        threads=1,
        max_context=100,
        kv_dtype="bf16",
        kv_tokens=128,
        kv_bytes=0,
        weight_bytes=0,
        load_seconds=0.0,
        memory="",
        artifact_path=str(setup.model),
        process=os.getpid(),
        extra={"artifact_id": identity, "cwd": os.getcwd(), "key": os.environ.get("NINFER_API_KEY", "")},
    )


def done(generated: int, reason: FinishReason = FinishReason.STOP_TOKEN) -> Done:
    return Done(Statistics(reason, 1, 0, generated, 0, 0.0, 0.0, tuple(range(generated))))


def text(word: str) -> Output:
    return Output(Channel.CONTENT, word)


def ready(setup: Setup, line: worker.Line, identity: str = "one") -> None:
    line.send(Loading("converting", 1, 2))
    line.send(Opened(setup.model))
    line.send(Ready(info(setup, identity)))


def echo(setup: Setup, line: worker.Line, identity: str = "one") -> None:
    """A job gets as many words back as its seed says. If its `max_new` is 0 it runs until it is cancelled; 7
    fails, 8 takes the engine down, 9 the process, and at 10 the process says nothing more."""
    ready(setup, line, identity)
    line._in.rcvtimeo = 100
    endless: set[int] = set()
    queries = 0
    while True:
        data = line.receive()
        if data is None:
            line.send(Heartbeat())
            continue
        command = decode_command(data)
        if isinstance(command, Shutdown):
            return
        if isinstance(command, Query):
            queries += 1
            line.send(Counters(command.number, RuntimeStatistics(running=len(endless), rounds=queries)))
        elif isinstance(command, Cancel):
            if command.job in endless:
                endless.discard(command.job)
                line.send(Events.of(command.job, [done(0, FinishReason.CANCELLED)]))
        elif isinstance(command, Submit):
            start = Started(len(command.whole_prompt().tokens), 0)
            line.send(Events.of(command.job, [start]))
            what, count = command.options.max_new, command.options.seed
            if what == 0:
                endless.add(command.job)
            elif what == 7:
                line.send(Failed(command.job, "ContextLengthError", "too long"))
            elif what == 8:
                line.send(EngineFailed("the engine has failed: it was told to"))
            elif what == 9:
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == 10:
                time.sleep(600)
            else:
                for number in range(count):
                    line.send(Events.of(command.job, [PromptProgress(1, 1, number), text(f"{number} ")]))
                line.send(Events.of(command.job, [done(count)]))


def changing(setup: Setup, line: worker.Line) -> None:
    """Another model each time."""
    echo(setup, line, identity=str(os.getpid()))


def refuse(setup: Setup, line: worker.Line) -> None:
    line.send(LoadFailed("ModelError", f"{setup.model} is no model"))
    sys.exit(1)


def once(setup: Setup, line: worker.Line) -> None:
    """Loads if a file beside the model isn't there yet, and makes it."""
    mark = Path(str(setup.model) + ".mark")
    if mark.exists():
        refuse(setup, line)
    mark.touch()
    echo(setup, line)


def vanish(setup: Setup, line: worker.Line) -> None:
    sys.exit(3)


def hang(setup: Setup, line: worker.Line) -> None:
    line.send(Opened(setup.model))
    time.sleep(600)


def babble(setup: Setup, line: worker.Line) -> None:
    ready(setup, line)
    line._out.send(b"\x93\xa5Ready")
    time.sleep(600)


def twice(setup: Setup, line: worker.Line) -> None:
    """Somebody else at the same address says that it is an engine."""
    other = worker.Line(Setup(setup.address, b"x" * 16, setup.model, setup.options))
    other.send(EngineFailed("I am an intruder"))
    other._in.send(encode(EngineFailed("I am an intruder")))
    time.sleep(0.2)
    echo(setup, line)
    other.close()


if __name__ == "__main__":
    script = globals()[sys.argv[1]]
    sys.exit(worker.main(lambda setup, line: script(setup, line) or 0))
