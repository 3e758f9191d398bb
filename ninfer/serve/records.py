"""What the server and the engine process say to each other: msgpack arrays that begin with their type's name.

The setup goes through the engine process's stdin, everything else through ZeroMQ.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import Struct, msgpack

from ninfer import errors
from ninfer.api.options import EngineOptions, GenerationOptions
from ninfer.engine import Done, Event, Output, PromptProgress, RuntimeStatistics, Started
from ninfer.errors import EngineError, NInferError
from ninfer.frontend import Prompt
from ninfer.serve.jobs import EngineInfo, Job


class _Record(Struct, array_like=True, tag=True):
    pass


class Setup(_Record):
    """How to reach the server (ZeroMQ `address`, the `token` that proves who we are) and what to load.

    `warm_up`: run a short generation before the engine is called ready."""

    address: str
    token: bytes
    model: Path
    options: EngineOptions
    warm_up: bool = True


# From the server


class Submit(_Record):
    """A new job, by a number that is never used again. `tokens` are the prompt's, 32 bits each; the prompt
    itself comes without tokens and text."""

    job: int
    tokens: bytes
    prompt: Prompt
    options: GenerationOptions

    @classmethod
    def of(cls, job: int, what: Job) -> Submit:
        tokens = array("I", what.prompt.tokens).tobytes()
        return cls(job, tokens, replace(what.prompt, tokens=[], text=""), what.options)

    def whole_prompt(self) -> Prompt:
        """The prompt with its tokens."""
        return replace(self.prompt, tokens=array("I", self.tokens).tolist())


class Cancel(_Record):
    """End the job at the next boundary; its `Done` still comes."""

    job: int


class Query(_Record):
    """Ask for the statistics."""

    number: int


class Shutdown(_Record):
    """End every job and the process."""


# From the engine process


class Hello(_Record):
    """The first word on the command socket, so that the server can write to it."""


class Loading(_Record):
    """Progress of a conversion, before anything is loaded."""

    stage: str
    done: int
    total: int


class Opened(_Record):
    """The artifact is there (a checkpoint has been converted) and is being loaded."""

    path: Path


class Ready(_Record):
    info: EngineInfo


class LoadFailed(_Record):
    """Loading failed with this class of `ninfer.errors` and this sentence; the process ends."""

    error: str
    sentence: str


class Failed(_Record):
    """The job ended with an error; nothing follows."""

    job: int
    error: str
    sentence: str


class Counters(_Record):
    """The answer to a `Query`."""

    number: int
    statistics: RuntimeStatistics


class EngineFailed(_Record):
    """No job can be served any more."""

    sentence: str


class Heartbeat(_Record):
    """The process lives."""


class _Started(_Record):
    event: Started


class _Progress(_Record):
    event: PromptProgress


class _Output(_Record):
    event: Output


class _Done(_Record):
    event: Done


_WRAPPERS: dict[type, Any] = {Started: _Started, PromptProgress: _Progress, Output: _Output, Done: _Done}


class Events(_Record):
    """The job's next events, in order."""

    job: int
    wrapped: list[_Started | _Progress | _Output | _Done]

    @classmethod
    def of(cls, job: int, events: list[Event]) -> Events:
        return cls(job, [_WRAPPERS[type(event)](event) for event in events])

    def unwrapped(self) -> list[Event]:
        return [item.event for item in self.wrapped]


Command = Submit | Cancel | Query | Shutdown
Report = Hello | Loading | Opened | Ready | LoadFailed | Events | Failed | Counters | EngineFailed | Heartbeat


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return os.fsencode(value)  # file names are bytes, and not always UTF-8
    raise NotImplementedError(f"{type(value).__name__} has no form on the wire")


def _typed(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(os.fsdecode(value))
    raise NotImplementedError(f"{kind.__name__} has no form on the wire")


encode = msgpack.Encoder(enc_hook=_plain).encode
"""Bytes of any record, from any thread."""
decode_setup = msgpack.Decoder(Setup, dec_hook=_typed).decode
decode_command = msgpack.Decoder(Command, dec_hook=_typed).decode
decode_report = msgpack.Decoder(Report, dec_hook=_typed).decode


def clean(text: str) -> str:
    """`text` without what no encoding holds: half a surrogate pair, or a file name's undecodable byte."""
    return text.encode("utf-8", "backslashreplace").decode()


def described(error: BaseException) -> tuple[str, str]:
    """Class and sentence of an error for the other side. Of what isn't ours only the class is told: its words
    might be a request's."""
    if isinstance(error, NInferError):
        return type(error).__name__, clean(str(error))
    return "EngineError", f"the engine process stumbled over a defect ({type(error).__name__}); see its log"


def restored(name: str, sentence: str) -> NInferError:
    """The error that `described` told."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, NInferError):
        return kind(sentence)
    return EngineError(sentence)
