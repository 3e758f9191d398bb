"""From a `GenerationRequest` to running jobs: limits, deadlines, rendering, and who is told.

`Service` is the only one who submits jobs. It counts *lifetimes*: an answer holds one from before its
preparation until its response is over and its job has ended, and there are as many as the engine may run and
queue.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from ninfer.api.options import GenerationOptions
from ninfer.errors import ContextLengthError, UnavailableError
from ninfer.frontend import Frontend, Prompt, SamplingPreset
from ninfer.serve import resolve
from ninfer.serve.answer import Answer
from ninfer.serve.calls import GenerationRequest
from ninfer.serve.constraints import constraint_for
from ninfer.serve.errors import ApiError, as_api_error, invalid, unavailable
from ninfer.serve.jobs import Job, Link, LinkState
from ninfer.serve.observer import Observer, RequestRecord
from ninfer.serve.options import ServeOptions
from ninfer.serve.system import fold_system, takes_system_anywhere
from ninfer.serve.toolcalls import callable_tools

__all__ = ["Answer", "Service"]

_log = logging.getLogger("ninfer.serve")
_RENDERERS = 4
_BRIEF_MESSAGES, _BRIEF_TEXT = 20, 2000
_T = TypeVar("_T")


@dataclass(frozen=True)
class Prepared:
    """A request with nothing left open: its prompt, a job's options for each answer, the sampling."""

    prompt: Prompt
    options: tuple[GenerationOptions, ...]
    sampling: SamplingPreset


class Service:
    """Turns requests into answers. Lives in the server's event loop; one per server."""

    def __init__(
        self, frontend: Frontend, link: Link, options: ServeOptions, observers: Iterable[Observer] = ()
    ) -> None:
        self.frontend, self.link, self.options = frontend, link, options
        self.draining = False
        """Set when the server is to stop: what comes from now on is refused, what runs may end."""
        self._observers = list(observers)
        self._capacity = options.engine.max_concurrency + options.engine.max_pending
        self._taken = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._requests = 0
        self._closer = len(frontend.thinking_closer)
        self._folds_system = not takes_system_anywhere(frontend)
        self._pool = ThreadPoolExecutor(_RENDERERS, thread_name_prefix="ninfer-render")

    @property
    def active(self) -> int:
        """Lifetimes taken."""
        return self._taken

    def check(self) -> None:
        """Raises `ApiError` 503 if no request can be served. That an unloaded engine has to be loaded again
        is no reason."""
        state = self.link.state
        if self.draining or state is LinkState.STOPPED:
            raise unavailable("The server is shutting down.")
        if state is LinkState.FAILED:
            raise unavailable("The engine has failed; restart the server.")

    async def idle(self) -> None:
        """Wait until no answer lives."""
        await self._idle.wait()

    def observe(self, *observers: Observer) -> None:
        """Tell these too."""
        self._observers += observers

    def close(self) -> None:
        """End the threads that render; nothing can be prepared any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, request: GenerationRequest, *, snapshots: bool = False) -> Answer:
        """Check, render and queue a request. Raises `ApiError` for everything that an HTTP status says.

        `snapshots`: each text carries the timings so far. Whoever gets the answer must `close` it, whatever
        happens.
        """
        arrival = perf_counter()
        self._requests += 1
        from_client = request.max_output is not None
        record = RequestRecord(
            self._requests,
            request,
            self.options.default_max_tokens if request.max_output is None else request.max_output,
            from_client,
        )
        taken = 0
        try:
            self.check()
            taken = self._take(request.n)
            if _brief(request):
                prepared = self._prepared(record)
            else:
                prepared = await self._in_time(partial(self._prepared, record), self._remaining(arrival))
            record.prepare_seconds = perf_counter() - arrival
            remaining = self._remaining(arrival)
            if remaining is not None and remaining <= 0:
                raise _too_late(self.options.engine.pending_timeout)
        except BaseException as error:
            self.release(taken)
            refused = resolve.for_protocol(as_api_error(error), request.protocol)
            self.tell("rejected", record, refused)
            if isinstance(error, Exception):
                raise refused from error
            raise
        jobs = [Job(prepared.prompt, replace(o, timeout=remaining)) for o in prepared.options]
        answer = Answer(self, record, jobs, prepared.sampling, arrival, snapshots=snapshots)
        # An engine that has to be loaded again may take longer than a client waits for its headers.
        await answer.begin(at_once=self.link.state is LinkState.READY)
        return answer

    async def count(self, request: GenerationRequest) -> int:
        """How many tokens the request's prompt has. Raises `ApiError`."""
        return len((await self.render(request)).tokens)

    async def render(self, request: GenerationRequest) -> Prompt:
        """The request's prompt; takes no lifetime. Raises `ApiError`."""
        try:
            return await self._in_time(partial(self._rendered, request), self.options.engine.pending_timeout)
        except Exception as error:
            raise resolve.for_protocol(as_api_error(error), request.protocol) from error

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Run what would hold up the event loop, tokenizing above all, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def release(self, lifetimes: int) -> None:
        """Give lifetimes back."""
        self._taken -= lifetimes
        if not self._taken:
            self._idle.set()

    def tell(self, event: str, *facts: Any) -> None:
        """Tell every observer; one that fails doesn't harm the request."""
        for observer in self._observers:
            try:
                getattr(observer, event)(*facts)
            except Exception as error:
                _log.error("an observer failed in %s: %s", event, type(error).__name__)

    def _take(self, count: int) -> int:
        concurrency = self.options.engine.max_concurrency
        if count > concurrency:
            raise ApiError(
                400,
                f"n is {count}, but this server runs at most {concurrency} answers at a time; ask for fewer "
                f"or start it with a larger --max-concurrency.",
                param="n",
                code="n_not_supported",
            )
        if self._taken + count > self._capacity:
            raise ApiError(
                429,
                f"The server is busy: {self._taken} of {self._capacity} requests are running or waiting; "
                f"try again later.",
                type="rate_limit_error",
                code="server_overloaded",
                headers={"Retry-After": "1"},
            )
        self._taken += count
        self._idle.clear()
        return count

    def _remaining(self, arrival: float) -> float | None:
        limit = self.options.engine.pending_timeout
        return None if limit is None else arrival + limit - perf_counter()

    async def _in_time(self, work: Callable[[], _T], seconds: float | None) -> _T:
        try:
            async with asyncio.timeout(seconds):
                return await self.in_thread(work)
        except TimeoutError:
            raise _too_late(self.options.engine.pending_timeout) from None

    def _rendered(self, request: GenerationRequest) -> Prompt:
        template = resolve.template_options(request, self.options)
        listed = [tool.declared() for tool in request.tools if tool.listed]
        messages = fold_system(request.messages) if self._folds_system else request.messages
        context = self._context()
        if context is not None:
            resolve.check_context(request.protocol, len(messages), context)  # each is a token at least
        try:
            prompt = self.frontend.render(
                messages,
                tools=listed or None,
                thinking=template.thinking,
                reasoning_effort=template.effort,
                preserve_thinking=template.preserve_thinking,
                continue_final_message=request.continue_final,
                template_kwargs=template.kwargs,
                most_tokens=context,
            )
        except ContextLengthError as error:
            resolve.check_context(request.protocol, error.tokens, context or 0)
            raise
        # What may be called decides whether calls are looked for, not what the prompt lists.
        return replace(prompt, declares_tools=bool(callable_tools(request)))

    def _context(self) -> int | None:
        """The longest prompt, in tokens; None before the engine has been loaded for the first time."""
        try:
            return self.link.info.max_context
        except UnavailableError:
            return None

    def _prepared(self, record: RequestRecord) -> Prepared:
        request, flags = record.request, self.options.sampling
        begin = perf_counter()
        prompt = self._rendered(request)
        record.tokenize_seconds = perf_counter() - begin
        record.prompt, record.thinking = prompt.tokens, prompt.starts_in_thinking
        if not prompt.tokens:
            raise invalid("The rendered prompt is empty; give a message with text.", "messages")
        context = self.link.info.max_context
        resolve.check_context(request.protocol, len(prompt.tokens), context)
        budget = resolve.thinking_budget(
            request,
            self.options,
            thinking=prompt.starts_in_thinking,
            output=min(record.max_output, context - len(prompt.tokens) + 1),
            closer=self._closer,
        )
        preset = self.frontend.preset(thinking=prompt.starts_in_thinking)
        sampling = resolve.sampling(request, flags, preset)
        options = GenerationOptions(
            max_new=record.max_output,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=_seed(request, flags.seed),
            thinking_budget=budget,
            stop=request.stop,
            reasoning_stop=request.stop if request.stop_reasoning else (),
            prefix_reuse=self.options.engine.prefix_reuse,
            grammar=constraint_for(request),
            single_call=not request.parallel_calls and prompt.declares_tools,
            logprobs=request.logprobs,
        )
        record.options = options
        each = tuple(replace(options, seed=(options.seed + i) % 2**64) for i in range(request.n))
        return Prepared(prompt, each, sampling)


def _brief(request: GenerationRequest) -> bool:
    """Is it rendered sooner than a thread would begin to?"""
    if request.tools or request.response_format is not None or len(request.messages) > _BRIEF_MESSAGES:
        return False
    texts = [m["content"] for m in request.messages if isinstance(m.get("content"), str)]
    return len(texts) == len(request.messages) and sum(map(len, texts)) <= _BRIEF_TEXT


def _too_late(limit: float | None) -> ApiError:
    return ApiError(
        503,
        f"The request waited longer than {limit:g} seconds for its turn; try again later."
        if limit is not None
        else "The request waited too long for its turn; try again later.",
        type="server_error",
        code="request_queue_timeout",
    )


def _seed(request: GenerationRequest, flag: int | None) -> int:
    for seed in (request.seed, flag):
        if seed is not None:
            return seed % 2**64
    return secrets.randbits(64)
