"""Loading with progress on stderr, and streaming one answer with its report."""

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ninfer.api import (
    Channel,
    Done,
    Engine,
    EngineDescription,
    EngineOptions,
    Generation,
    GenerationOptions,
    Output,
    Statistics,
)
from ninfer.cli.progress import conversion_progress
from ninfer.cli.report import write_line, write_report


def load(model: Path, options: EngineOptions, quiet: bool) -> Engine:
    """Load an engine; the one conversion of a folder or GGUF file shows its progress."""
    with conversion_progress(quiet) as progress:
        engine = Engine.load(model, options, progress=progress)
    if not quiet:
        d = engine.description
        print(
            f"{d.name}: {d.architecture} on {d.computes_on}; weights {d.weight_bytes / 2**20:.0f} MiB, "
            f"context {d.max_context}, loaded in {d.load_seconds:.2f} s{_upload(d)}\n"
            f"{d.memory}",
            file=sys.stderr,
        )
    return engine


def _upload(description: EngineDescription) -> str:
    """How fast a GPU got its weights."""
    seconds = description.upload_seconds
    return f" (weights {description.weight_bytes / seconds / 1e9:.1f} GB/s)" if seconds else ""


class Answerer:
    """Streams answers of one engine: content to stdout, reasoning and the report to stderr.

    In a `chat` the report is one line.
    """

    def __init__(
        self, engine: Engine, options: GenerationOptions, *, print_token_ids: bool, quiet: bool, chat: bool
    ) -> None:
        self._engine = engine
        self._options = options
        self._print_token_ids = print_token_ids
        self._quiet = quiet
        self._chat = chat

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        attempt: int = 0,
        *,
        tools: Sequence[Any] | None = None,
    ) -> dict[str, str]:
        """Stream one answer and return it as a message; Ctrl-C ends it with the text so far.

        Every `attempt` at the same messages has its own seed.
        """
        options = replace(self._options, seed=(self._options.seed + attempt) % 2**64)
        generation = self._engine.chat(messages, options, tools=tools)
        texts = {Channel.CONTENT: "", Channel.REASONING: ""}
        channel = Channel.CONTENT
        with _interrupt_cancels(generation):
            for event in generation:
                if isinstance(event, Output):
                    # A tool call is shown, and kept in the history, as the text that it is.
                    new = Channel.CONTENT if event.channel is Channel.TOOL else event.channel
                    if channel is Channel.REASONING and new is Channel.CONTENT:
                        print(file=sys.stderr, flush=True)
                    channel = new
                    texts[channel] += event.text
                    stream = sys.stdout if channel is Channel.CONTENT else sys.stderr
                    stream.write(event.text)
                    stream.flush()
                elif isinstance(event, Done):
                    if channel is Channel.REASONING:
                        print(file=sys.stderr)
                    if not texts[Channel.CONTENT].endswith("\n"):
                        print(flush=True)
                    self._report(generation, event.statistics)
        message = {"role": "assistant", "content": texts[Channel.CONTENT]}
        if texts[Channel.REASONING]:
            message["reasoning_content"] = texts[Channel.REASONING]
        return message

    def _report(self, generation: Generation, statistics: Statistics) -> None:
        description = self._engine.description
        if self._print_token_ids and (self._quiet or self._chat):
            print(*statistics.token_ids, file=sys.stderr)
        if self._chat:
            write_line(sys.stderr, statistics, description, self._quiet)
        elif not self._quiet:
            write_report(
                sys.stderr,
                statistics,
                generation.sampling,
                description,
                generation.render_seconds,
                self._engine.statistics().decode_host_share,
                self._print_token_ids,
            )


@contextlib.contextmanager
def _interrupt_cancels(generation: Generation) -> Iterator[None]:
    """Inside, the first Ctrl-C cancels the answer; a second one interrupts the program as usual."""

    def handle(_signal: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, previous)
        generation.cancel()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
