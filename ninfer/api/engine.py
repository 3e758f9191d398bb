"""A loaded model with its frontend: messages in, events out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ninfer.api.options import EngineOptions, GenerationOptions
from ninfer.artifact import Artifact, TensorObject
from ninfer.convert import ensure_artifact
from ninfer.engine import Event, Output, OutputSession, Request, run
from ninfer.errors import EngineError, ModelError, OptionError
from ninfer.events import Channel
from ninfer.frontend import Frontend, Prompt

if TYPE_CHECKING:
    from ninfer.runtime import Program, SamplingParams

_DEFAULT_CONTEXT = 2048
_TEXT_ROLES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class EngineDescription:
    """What was loaded and what memory it took; sizes in bytes."""

    name: str
    architecture: str
    device: str
    threads: int
    max_context: int
    kv_dtype: str
    kv_tokens: int
    kv_bytes: int
    weight_bytes: int
    load_seconds: float


class Generation:
    """One answer under way: iterate for its events, which come once, or call `text()`.

    `prompt`, `sampling` and `render_seconds` say what was resolved. `cancel()` may be called from any thread
    or a signal handler; the answer ends at the next boundary with its text so far.
    """

    def __init__(
        self,
        prompt: Prompt,
        sampling: "SamplingParams",
        render_seconds: float,
        start: Callable[[Callable[[], bool]], Iterator[Event]],
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.render_seconds = render_seconds
        self._cancelled = False
        self._events = start(lambda: self._cancelled)

    def cancel(self) -> None:
        """Ask the answer to end."""
        self._cancelled = True

    def text(self) -> str:
        """Run to the end; the content, without the reasoning."""
        return "".join(e.text for e in self if isinstance(e, Output) and e.channel is Channel.CONTENT)

    def __iter__(self) -> Iterator[Event]:
        return self._events


class Engine:
    """One model, one answer at a time, on the CPU. Use as a context manager, or call `close`.

    A new request continues from what it shares with the previous one, so a conversation computes only its
    new part. Safe to use from several threads: they wait for each other, one event at a time.
    """

    def __init__(
        self, artifact: Artifact, frontend: Frontend, program: "Program", description: EngineDescription
    ) -> None:
        """Use `load`."""
        self._artifact = artifact
        self._program: Program | None = program
        self._running: Iterator[Event] | None = None
        self._lock = Lock()
        self.frontend = frontend
        self.description = description

    @classmethod
    def load(
        cls,
        path: str | Path,
        options: EngineOptions | None = None,
        *,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Self:
        """Load a `.ninfer` artifact; a Hugging Face folder or a GGUF file is converted once into the cache.

        `progress(stage, done, total)` is called while converting. Raises `NInferError` subclasses with one
        sentence for anything wrong with the file, the options or the memory.
        """
        begin = perf_counter()
        options = options or EngineOptions()
        artifact = Artifact.open(ensure_artifact(Path(path), options.cache_dir, progress))
        try:
            return cls._load(artifact, options, begin)
        except BaseException:
            artifact.close()
            raise

    @classmethod
    def _load(cls, artifact: Artifact, options: EngineOptions, begin: float) -> Self:
        with ThreadPoolExecutor(1) as pool:
            # The tokenizer is built while PyTorch and the kernels are imported.
            pending = pool.submit(_frontend, artifact, options.chat_template)
            import torch

            from ninfer import models
            from ninfer.ops.cpu import machine_threads
            from ninfer.runtime import Program

            frontend = pending.result()
        threads = options.threads or machine_threads()
        torch.set_num_threads(threads)
        model = models.load(artifact, public_tokens=frontend.public_tokens)
        context = options.max_context
        if context is None:
            context = min(_DEFAULT_CONTEXT, model.max_position_embeddings)
        program = Program(model, context, options.prefill_chunk)
        plan = program.plan
        description = EngineDescription(
            name=str(artifact.metadata.get("name") or Path(artifact.path).stem),
            architecture=frontend.architecture,
            device="cpu",
            threads=threads,
            max_context=plan.max_context,
            kv_dtype="bf16",
            kv_tokens=plan.pages * 64,
            kv_bytes=plan.pages * plan.page_bytes,
            weight_bytes=sum(
                item.bytes for item in artifact.objects.values() if isinstance(item, TensorObject)
            ),
            load_seconds=perf_counter() - begin,
        )
        return cls(artifact, frontend, program, description)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: GenerationOptions | None = None,
        *,
        tools: Sequence[Any] | None = None,
    ) -> Generation:
        """Answer a conversation (`role`, `content` and the other members of the messages file).

        Errors of messages and options are raised here, those of capacity at the first event. Only one answer
        is under way at a time: the first event of another ends this one, which then raises EngineError.
        """
        options = options or GenerationOptions()
        begin = perf_counter()
        prompt = self.frontend.render(
            messages, tools=tools, thinking=options.thinking, reasoning_effort=options.reasoning_effort
        )
        if not prompt.tokens:
            raise OptionError("the rendered prompt is empty; give a message with text")
        sampling = options.sampling(self.frontend.preset(thinking=prompt.starts_in_thinking))
        session = self.frontend.session(
            prompt,
            stop=options.stop,
            reasoning_stop=options.reasoning_stop,
            stop_token_ids=options.stop_token_ids,
            raw=options.raw,
            thinking_budget=options.thinking_budget,
        )
        request = Request(
            prompt=tuple(prompt.tokens),
            sampling=sampling,
            max_output=options.max_new,
            thinking_budget=options.thinking_budget if prompt.starts_in_thinking else None,
        )
        return Generation(
            prompt,
            sampling,
            perf_counter() - begin,
            lambda cancelled: self._run(request, session, cancelled),
        )

    def _run(
        self, request: Request, session: OutputSession, cancelled: Callable[[], bool]
    ) -> Iterator[Event]:
        """The events of a request; the lock is held while one is made."""
        with self._lock:
            if self._program is None:
                raise EngineError("the engine is closed; load the model again")
            events = self._running = run(self._program, request, session, cancelled)
        while True:
            with self._lock:
                if self._running is not events:
                    raise EngineError("this answer ended early: another one was begun, or the engine closed")
                event = next(events, None)
            if event is None:
                return
            yield event

    def close(self) -> None:
        """End the answer under way and release the model's memory. May be called more than once."""
        with self._lock:
            self._running = self._program = None
            self._artifact.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _frontend(artifact: Artifact, chat_template: str | None) -> Frontend:
    config = artifact.components["text"].config
    architectures, rows = config.get("architectures"), config.get("vocab_size")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(rows, int):
        raise ModelError(
            f"the text config of {artifact.path} needs one of 'architectures' and an integer 'vocab_size'"
        )
    return Frontend.from_resources(
        {role: artifact.resource("text", role) for role in _TEXT_ROLES},
        architecture=str(architectures[0]),
        vocab_rows=rows,
        chat_template=chat_template,
    )
