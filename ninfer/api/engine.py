"""A loaded model with its frontend: messages in, events out."""

import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import index
from pathlib import Path
from threading import Lock
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ninfer.api.device import describe_device
from ninfer.api.loading import load_model, opened
from ninfer.api.options import EngineOptions, GenerationOptions
from ninfer.artifact import Contents
from ninfer.engine import Event, Handle, Health, Marks, Output, Request, RuntimeStatistics
from ninfer.errors import OptionError
from ninfer.events import Channel
from ninfer.formats import KvFormat
from ninfer.frontend import Frontend, Prompt

if TYPE_CHECKING:
    from ninfer.engine import Core
    from ninfer.runtime import Plan, SamplingParams


@dataclass(frozen=True)
class EngineDescription:
    """What was loaded and what memory it took; sizes in bytes.

    `device` is `cpu` or such as `cuda:0`, `device_name` the GPU's model; `cuda_graph`: are rounds replayed as
    graphs? `load_seconds` contains the `upload_seconds` in which a GPU got its weights. `draft_tokens` a
    round by the model's MTP layer (0: no speculation), scored by the proposal head if `lm_head_draft`.
    """

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
    memory: str
    """The plan of all memory, as a table."""
    device_name: str = ""
    cuda_graph: bool = False
    upload_seconds: float = 0.0
    draft_tokens: int = 0
    lm_head_draft: bool = False

    @property
    def computes_on(self) -> str:
        """The device in words."""
        if self.device == "cpu":
            return f"cpu, {self.threads} thread{'s' * (self.threads != 1)}"
        return f"{self.device}, {self.device_name}" + (", without graphs" * (not self.cuda_graph))


class Generation:
    """One answer under way. Iterate for its events, in a thread (`for`) or a task (`async for`); they come
    once. Or call `text()`.

    `prompt`, `sampling` and `render_seconds` say what was resolved. `cancel()` may be called from any thread
    or a signal handler; the answer ends at the next boundary with its text so far. An answer that is dropped
    or closed unread is cancelled.
    """

    def __init__(
        self,
        handle: Handle,
        prompt: Prompt,
        sampling: "SamplingParams",
        render_seconds: float,
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.render_seconds = render_seconds
        self._handle = handle

    def cancel(self) -> None:
        """Ask the answer to end."""
        self._handle.cancel()

    def close(self) -> None:
        """Read no further; cancels the answer if it hasn't ended."""
        self._handle.close()

    @property
    def handle(self) -> Handle:
        """The engine's side, for a consumer that wants to be called instead of iterating."""
        return self._handle

    def text(self) -> str:
        """Wait for the end; the content, without the reasoning."""
        return "".join(e.text for e in self if isinstance(e, Output) and e.channel is not Channel.REASONING)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._handle)

    def __aiter__(self) -> AsyncIterator[Event]:
        return aiter(self._handle)


class Engine:
    """A model on a GPU or the CPU, answering up to `max_concurrency` requests at a time; the others wait in
    order.

    Use as a context manager, or call `close`. A request continues from what it shares with earlier ones, so a
    conversation computes only its new part. All methods may be called from any thread.
    """

    def __init__(
        self, artifact: Contents, frontend: Frontend, core: "Core", description: EngineDescription
    ) -> None:
        """Use `load`."""
        self._artifact = artifact
        self._core = core
        self._lock = Lock()
        # An engine that is dropped, or still open when Python ends, stops its worker.
        self._finalizer = weakref.finalize(self, core.stop)
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

        `progress(stage, done, total)` is called while converting, and with bytes while weights go to a GPU.
        Raises `NInferError` subclasses with one sentence for anything wrong with the file, the options or the
        memory.
        """
        begin = perf_counter()
        options = options or EngineOptions()
        with opened(path, options.cache_dir, progress) as artifact:
            return cls._load(artifact, options, begin, progress)

    @classmethod
    def _load(
        cls,
        artifact: Contents,
        options: EngineOptions,
        begin: float,
        progress: Callable[[str, int, int], None] | None,
    ) -> Self:
        loaded = load_model(
            artifact,
            options.threads,
            options.chat_template,
            device=options.device,
            predictor=options.spec is not None,
            proposal=options.lm_head_draft,
            progress=progress,
        )
        frontend, model = loaded.frontend, loaded.model
        from ninfer.engine import Core, Policy
        from ninfer.runtime import Limits, Program, plan_model

        context = options.max_context
        if context is None:
            context = min(options.default_context, model.max_position_embeddings)
        headroom = None if options.headroom_mib is None else options.headroom_mib << 20
        on_gpu = model.device.type == "cuda"
        plan = plan_model(
            model,
            Limits(
                max_context=context,
                prefill_chunk=options.prefill_chunk,
                max_concurrency=options.max_concurrency,
                kv_capacity=options.kv_capacity,
                state_slots=options.state_slots if options.prefix_reuse else 0,
                headroom=headroom,
                width=1 + options.draft_tokens,
                span=max(1, len(frontend.thinking_closer)),
            ),
            kv_format=KvFormat(options.kv_dtype),
            weight_bytes=loaded.weight_bytes,
            graphs=options.cuda_graph,
        )
        policy = Policy(
            max_pending=options.max_pending,
            pending_timeout=options.pending_timeout,
            reuse=options.prefix_reuse,
            turn_anchors=options.turn_anchors,
        )
        program = Program(model, plan, graphs=options.cuda_graph)
        if options.warm_up or on_gpu:
            # In a thread of its own: the OpenMP runtime keeps a team for each thread that computed, and while
            # there are more of them than processors it lets idle ones sleep at once, so that prefill takes
            # twice as long. The team ends with its thread.
            with ThreadPoolExecutor(1) as pool:
                pool.submit(program.warm_up).result()
        core = Core(
            program.run,
            plan,
            public_tokens=model.public_tokens,
            policy=policy,
            record=program.ingress,
        )
        description = EngineDescription(
            name=loaded.name,
            architecture=frontend.architecture,
            device=str(model.device),
            threads=loaded.threads,
            max_context=plan.max_context,
            kv_dtype=options.kv_dtype,
            kv_tokens=plan.pages * 64,
            kv_bytes=plan.kv_bytes,
            weight_bytes=loaded.weight_bytes,
            load_seconds=perf_counter() - begin,
            memory=str(plan),
            device_name=describe_device(model.device),
            cuda_graph=on_gpu and options.cuda_graph,
            upload_seconds=loaded.upload_seconds if on_gpu else 0.0,
            draft_tokens=options.draft_tokens,
            lm_head_draft=options.lm_head_draft,
        )
        return cls(artifact, frontend, core, description)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: GenerationOptions | None = None,
        *,
        tools: Sequence[Any] | None = None,
    ) -> Generation:
        """Answer a conversation (`role`, `content` and the other members of the messages file).

        Raises what `generate` raises, and `FrontendError` for messages or options that break a rule.
        """
        options = options or GenerationOptions()
        begin = perf_counter()
        prompt = self.frontend.render(
            messages, tools=tools, thinking=options.thinking, reasoning_effort=options.reasoning_effort
        )
        if not prompt.tokens:
            raise OptionError("the rendered prompt is empty; give a message with text")
        return self._submit(prompt, options, begin)

    def generate(
        self, prompt: Prompt | Sequence[int], options: GenerationOptions | None = None
    ) -> Generation:
        """Continue a rendered prompt (`frontend.render`) or token ids (`frontend.encode`).

        The request is queued at once. Raises `ContextLengthError` for a prompt that is too long,
        `ThinkingBudgetError`, `OptionError`, `OverloadedError` when too many requests wait, and
        `UnavailableError` once the engine is closed or has failed; the events may end with
        `QueueTimeoutError` or `UnavailableError`.
        """
        begin = perf_counter()
        if not isinstance(prompt, Prompt):
            prompt = Prompt(_token_ids(prompt), "", starts_in_thinking=False)
        return self._submit(prompt, options or GenerationOptions(), begin)

    def _submit(self, prompt: Prompt, options: GenerationOptions, begin: float) -> Generation:
        sampling = options.sampling(self.frontend.preset(thinking=prompt.starts_in_thinking))
        session = self.frontend.session(
            prompt,
            stop=options.stop,
            reasoning_stop=options.reasoning_stop,
            stop_token_ids=options.stop_token_ids,
            ignore_model_stops=options.ignore_model_stops,
            raw=options.raw,
            thinking_budget=options.thinking_budget,
            grammar=options.grammar,
            single_call=options.single_call,
        )
        request = Request(
            prompt=tuple(prompt.tokens),
            sampling=sampling,
            max_output=options.max_new,
            thinking_budget=options.thinking_budget if prompt.starts_in_thinking else None,
            marks=Marks(prompt.boundaries, prompt.preamble, prompt.opener),
            reuse=options.prefix_reuse,
            logprobs=options.logprobs,
        )
        seconds = perf_counter() - begin
        handle = self._core.submit(request, session, timeout=options.timeout)
        handle.owner = self
        return Generation(handle, prompt, sampling, seconds)

    @property
    def artifact(self) -> Contents:
        """What was loaded; open until `close`."""
        return self._artifact

    @property
    def plan(self) -> "Plan":
        """The sizes of all memory."""
        return self._core.plan

    def statistics(self) -> RuntimeStatistics:
        """What the engine has done since its start, and how things stand."""
        return self._core.statistics()

    def health(self) -> Health:
        """Can requests be served, and if not, why?"""
        return self._core.health()

    def close(self) -> None:
        """End all answers and release the model's memory. May be called more than once."""
        with self._lock:
            self._finalizer()
            self._artifact.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _token_ids(prompt: Sequence[int]) -> list[int]:
    try:
        return [*map(index, prompt)]
    except TypeError:
        raise OptionError(
            "a prompt is a sequence of token ids or comes from frontend.render; frontend.encode gives the "
            "ids of a text, and chat takes messages"
        ) from None
