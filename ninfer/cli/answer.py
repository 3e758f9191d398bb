"""Loading with progress on stderr, and streaming one answer with its report."""

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ninfer.api import Channel, Done, Engine, EngineOptions, Generation, GenerationOptions, Output
from ninfer.cli.progress import conversion_progress
from ninfer.cli.report import write_report


def load(model: Path, options: EngineOptions, quiet: bool) -> Engine:
    """Load an engine; the one conversion of a folder or GGUF file shows its progress."""
    with conversion_progress(quiet) as progress:
        engine = Engine.load(model, options, progress=progress)
    if not quiet:
        d = engine.description
        print(
            f"{d.name}: {d.architecture} on {d.device} ({d.threads} threads), weights "
            f"{d.weight_bytes / 2**20:.0f} MiB, context {d.max_context}, loaded in {d.load_seconds:.2f} s",
            file=sys.stderr,
        )
    return engine


class Answerer:
    """Streams answers of one engine: content to stdout, reasoning and the report to stderr."""

    def __init__(
        self, engine: Engine, options: GenerationOptions, *, print_token_ids: bool, quiet: bool
    ) -> None:
        self._engine = engine
        self._options = options
        self._print_token_ids = print_token_ids
        self._quiet = quiet

    def answer(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> str:
        """Stream one answer and return its content; Ctrl-C ends it with the text so far."""
        generation = self._engine.chat(messages, self._options, tools=tools)
        content: list[str] = []
        channel = Channel.CONTENT
        with _interrupt_cancels(generation):
            for event in generation:
                if isinstance(event, Output):
                    if channel is Channel.REASONING and event.channel is Channel.CONTENT:
                        print(file=sys.stderr, flush=True)
                    channel = event.channel
                    if channel is Channel.CONTENT:
                        content.append(event.text)
                    stream = sys.stdout if channel is Channel.CONTENT else sys.stderr
                    stream.write(event.text)
                    stream.flush()
                elif isinstance(event, Done):
                    self._finish(generation, event, "".join(content), channel)
        return "".join(content)

    def _finish(self, generation: Generation, done: Done, content: str, channel: Channel) -> None:
        if channel is Channel.REASONING:
            print(file=sys.stderr)
        if not content.endswith("\n"):
            print(flush=True)
        if not self._quiet:
            write_report(
                sys.stderr,
                done.statistics,
                generation.sampling,
                self._engine.description,
                generation.render_seconds,
                self._print_token_ids,
            )
        elif self._print_token_ids:
            print(*done.statistics.token_ids, file=sys.stderr)


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
