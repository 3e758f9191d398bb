from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from ninfer.engine import Output
from ninfer.errors import QueueTimeoutError, UnavailableError
from ninfer.events import Channel, FinishReason
from ninfer.frontend.tokenizer import Tokenizer
from ninfer.serve.calls import (
    Begun,
    CallArguments,
    CallBegan,
    CallEnded,
    Finished,
    GenerationRequest,
    Progress,
    Protocol,
    Text,
    Tool,
    ToolChoice,
)
from ninfer.serve.errors import ApiError
from ninfer.serve.generation import Answer
from ninfer.serve.jobs import LinkState
from ninfer.serve.observer import Outcome
from ninfer.serve.options import SamplingOverrides
from ninfer.serve.server import Server
from tests.serve.fakes import (
    MODEL,
    FakeLink,
    Recorder,
    call_text,
    calls,
    logprob,
    make_server,
    nano_frontend,
    says,
    thinks,
)

pytestmark = pytest.mark.anyio

READ = Tool("read", {"type": "object", "properties": {"path": {"type": "string"}}})


def ask(**changes: Any) -> GenerationRequest:
    messages = changes.pop("messages", [{"role": "user", "content": "hi"}])
    protocol = changes.pop("protocol", Protocol.CHAT)
    return GenerationRequest(protocol, MODEL, messages, **changes)


async def read(answer: Answer) -> list[tuple[int, Any]]:
    try:
        return [item async for item in answer.events()]
    finally:
        answer.close()


async def idle(server: Server) -> None:
    await asyncio.wait_for(server.service.idle(), 2)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(2):
        while not condition():
            await asyncio.sleep(0.001)


# The events of an answer


async def test_an_answer_is_begun_progress_text_and_finished() -> None:
    seen = Recorder()
    server = make_server(FakeLink(says(thinks("Hm."), "Hello", " there.", reused=3)), seen)
    answer = await server.service.prepare(ask())
    assert answer.thinking
    assert answer.prompt_tokens == len(server.link.jobs[0].prompt.tokens)  # type: ignore[attr-defined]
    got: list[Any] = [event async for _, event in answer.events()]
    assert [type(e) for e in got] == [Begun, Progress, Text, Text, Text, Finished]
    assert got[0] == Begun(answer.prompt_tokens, 3)
    assert [(e.channel, e.text) for e in got if isinstance(e, Text)] == [
        ("reasoning", "Hm."), ("content", "Hello"), ("content", " there."),
    ]  # fmt: skip
    finished = got[-1]
    assert finished.reason is FinishReason.STOP_TOKEN
    assert (finished.usage.cached_tokens, finished.usage.reasoning_tokens) == (3, 1)
    assert finished.timings.prefill == 0.02
    assert finished.timings.ttft >= 0.021  # the engine's, and what came before it
    assert seen.told == [("started", 1), ("done", 1)]
    assert server.service.active == 1  # until the response is over
    answer.close()
    answer.close()
    await idle(server)
    assert server.service.active == 0


async def test_events_come_once() -> None:
    server = make_server()
    answer = await server.service.prepare(ask())
    await read(answer)
    with pytest.raises(RuntimeError):
        await read(answer)


async def test_several_answers_have_their_own_seeds_and_lifetimes() -> None:
    link = FakeLink(says("a"), says("b"), says("c"))
    server = make_server(link)
    answer = await server.service.prepare(ask(n=3, seed=2**64 - 2))
    assert server.service.active == 3
    assert [job.options.seed for job in link.jobs] == [2**64 - 2, 2**64 - 1, 0]
    got = await read(answer)
    texts = {index: event.text for index, event in got if isinstance(event, Text)}
    assert texts == {0: "a", 1: "b", 2: "c"}
    assert sorted(index for index, event in got if isinstance(event, Finished)) == [0, 1, 2]
    await idle(server)


async def test_more_answers_than_the_engine_runs_at_once_are_refused() -> None:
    server = make_server(max_concurrency=2)
    with pytest.raises(ApiError, match="at most 2") as refused:
        await server.service.prepare(ask(n=3))
    assert (refused.value.status, refused.value.param) == (400, "n")
    assert server.service.active == 0


async def test_calls_come_piece_by_piece() -> None:
    text = call_text("read", path="/tmp/a b")
    pieces = [calls(text[i : i + 7]) for i in range(0, len(text), 7)]
    seen = Recorder()
    server = make_server(FakeLink(says("I read.", *pieces)), seen)
    got = [e for _, e in await read(await server.service.prepare(ask(tools=(READ,))))]
    assert [e for e in got if isinstance(e, CallBegan)] == [CallBegan(0, "read")]
    arguments = [e.json for e in got if isinstance(e, CallArguments)]
    assert len(arguments) > 2
    ended = next(e for e in got if isinstance(e, CallEnded))
    assert "".join(arguments) == ended.arguments == '{"path":"/tmp/a b"}'
    assert got[-1].calls == 1
    outcome = seen.facts[-1]
    assert isinstance(outcome, Outcome)
    assert outcome.calls[0].structured_calls == 1


async def test_text_of_a_call_that_may_not_be_made_is_content() -> None:
    text = call_text("read", path="a")
    for changes in ({"tools": (READ,), "tool_choice": ToolChoice("none")}, {}):
        link = FakeLink(says(text) if not changes else says(calls(text)))
        server = make_server(link)
        got = [e for _, e in await read(await server.service.prepare(ask(**changes)))]
        assert "".join(e.text for e in got if isinstance(e, Text)) == text
        assert not link.jobs[0].prompt.declares_tools
        assert ("read" in link.jobs[0].prompt.text) == bool(changes)


async def test_only_the_chosen_tools_are_calls() -> None:
    other = Tool("other")
    link = FakeLink(says(calls(call_text("other"))))
    server = make_server(link)
    choice = ToolChoice("auto", ("read",))
    got = [
        e for _, e in await read(await server.service.prepare(ask(tools=(READ, other), tool_choice=choice)))
    ]
    assert not any(isinstance(e, CallBegan) for e in got)
    assert link.jobs[0].prompt.declares_tools
    assert "other" in link.jobs[0].prompt.text  # the prompt stays the same, whatever is chosen


async def test_a_tool_that_is_not_listed_may_be_called() -> None:
    link = FakeLink(says(calls(call_text("late"))))
    server = make_server(link)
    got = [e for _, e in await read(await server.service.prepare(ask(tools=(Tool("late", listed=False),))))]
    assert CallBegan(0, "late") in got
    assert "late" not in link.jobs[0].prompt.text


async def test_log_probabilities_come_as_bytes_with_the_text_of_their_tokens() -> None:
    frontend = nano_frontend()
    first, second = frontend.encode("Hi")[0], frontend.encode(" <")[0]
    link = FakeLink(
        says(
            Output(Channel.CONTENT, "Hi", (logprob(first, -0.5, (first, -0.5), (second, -2.0)),)),
            Output(Channel.CONTENT, " ", (logprob(second, -1.0),)),  # held back: a call may follow
        )
    )
    for tools in ((), (READ,)):
        server = make_server(link)
        answer = await server.service.prepare(ask(tools=tools, logprobs=2))
        assert link.jobs[-1].options.logprobs == 2
        texts = [e for _, e in await read(answer) if isinstance(e, Text)]
        assert [t.text for t in texts] == ["Hi", " "]
        (token,) = texts[0].logprobs
        assert token.token_bytes == frontend.token_bytes(first)
        assert [a.logprob for a in token.top] == [-0.5, -2.0]
        assert [t.logprob for t in texts[1].logprobs] == [-1.0]


async def test_texts_carry_timings_if_asked() -> None:
    server = make_server(FakeLink(says("a", "b", reused=2)))
    answer = await server.service.prepare(ask(), snapshots=True)
    texts = [e for _, e in await read(answer) if isinstance(e, Text)]
    assert [t.timings.generated_tokens for t in texts if t.timings] == [1, 2]
    assert texts[1].timings is not None
    assert (texts[1].timings.cached_tokens, texts[1].timings.decode) == (2, 0.01)
    plain = await read(await server.service.prepare(ask()))
    assert all(e.timings is None for _, e in plain if isinstance(e, Text))


# Lifetimes, deadlines and the engine's state


async def test_a_full_server_answers_429_with_retry_after() -> None:
    seen = Recorder()
    server = make_server(FakeLink(says(asyncio.Event())), seen, max_concurrency=1, max_pending=1)
    answers = [await server.service.prepare(ask()) for _ in range(2)]
    with pytest.raises(ApiError) as refused:
        await server.service.prepare(ask())
    error = refused.value
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "server_overloaded")
    assert error.headers["Retry-After"] == "1"
    assert seen.told == [("started", 1), ("started", 2), ("rejected", 3)]
    answers[0].close()
    await until(lambda: server.service.active == 1)
    (await server.service.prepare(ask())).close()
    answers[1].close()
    await idle(server)


async def test_the_deadline_covers_preparation_and_queue() -> None:
    link = FakeLink()
    server = make_server(link, pending_timeout=5.0)
    (await server.service.prepare(ask())).close()
    timeout = link.jobs[0].options.timeout
    assert timeout is not None
    assert 4.0 < timeout < 5.0


async def test_preparation_that_takes_too_long_is_refused() -> None:
    seen = Recorder()
    server = make_server(None, seen, pending_timeout=0.05)
    slow = "some word " * 200_000
    with pytest.raises(ApiError) as refused:
        await server.service.prepare(ask(messages=[{"role": "user", "content": slow}]))
    assert (refused.value.status, refused.value.code) == (503, "request_queue_timeout")
    assert seen.told == [("rejected", 1)]
    assert server.service.active == 0


async def test_a_queue_timeout_of_the_engine_comes_as_an_error() -> None:
    seen = Recorder()
    server = make_server(FakeLink([QueueTimeoutError("waited 5 s")]), seen)
    with pytest.raises(ApiError) as failed:
        await read(await server.service.prepare(ask()))
    assert failed.value.code == "request_queue_timeout"
    assert seen.told == [("started", 1), ("failed", 1)]
    await idle(server)


@pytest.mark.parametrize("script", [[], [ValueError("secret")], [UnavailableError("gone")]])
async def test_an_engine_that_breaks_off_is_an_error(script: list[Any]) -> None:
    seen = Recorder()
    server = make_server(FakeLink(says("a"), script), seen)
    with pytest.raises(ApiError) as failed:
        await read(await server.service.prepare(ask(n=2)))
    assert failed.value.status in (500, 503)
    assert "secret" not in failed.value.message
    assert seen.told == [("started", 1), ("failed", 1)]
    await idle(server)


@pytest.mark.parametrize(
    ("state", "words", "retry"),
    [
        (LinkState.STARTING, "being loaded", True),
        (LinkState.FAILED, "failed", False),
        (LinkState.STOPPED, "shutting down", False),
    ],
)
async def test_an_engine_that_is_not_there_is_503(state: LinkState, words: str, retry: bool) -> None:
    seen = Recorder()
    server = make_server(FakeLink(state=state), seen)
    with pytest.raises(ApiError, match=words) as refused:
        await server.service.prepare(ask())
    assert refused.value.status == 503
    assert ("Retry-After" in refused.value.headers) == retry
    assert seen.told == [("rejected", 1)]


async def test_draining_refuses_what_comes_and_ends_what_runs() -> None:
    go = asyncio.Event()
    server = make_server(FakeLink(says(go, "late")))
    answer = await server.service.prepare(ask())
    server.service.draining = True
    with pytest.raises(ApiError, match="shutting down"):
        await server.service.prepare(ask())
    go.set()
    assert [e.text for _, e in await read(answer) if isinstance(e, Text)] == ["late"]
    await idle(server)


async def test_an_unloaded_engine_is_loaded_again_outside_the_deadline() -> None:
    link = FakeLink(state=LinkState.UNLOADED, reload_seconds=0.3)
    server = make_server(link, pending_timeout=0.2)
    first, second = await server.service.prepare(ask()), await server.service.prepare(ask())
    assert not link.jobs  # the response may begin before the engine does
    for answer in (first, second):
        assert (await read(answer))[-1][1].reason is FinishReason.STOP_TOKEN
    assert link.jobs[0].options.timeout is not None
    assert link.jobs[0].options.timeout > 0.1
    await idle(server)


async def test_a_request_left_while_the_engine_loads_is_not_submitted() -> None:
    seen = Recorder()
    link = FakeLink(state=LinkState.UNLOADED, reload_seconds=30.0)
    server = make_server(link, seen)
    answer = await server.service.prepare(ask())
    await asyncio.sleep(0.01)
    answer.close()
    await idle(server)
    assert not link.jobs
    assert seen.told == [("started", 1), ("failed", 1)]
    assert seen.facts[-1].status == 499


# Whoever goes away


async def test_closing_cancels_the_job_and_reports_its_end() -> None:
    seen = Recorder()
    link = FakeLink(says("a", asyncio.Event(), "b"))
    server = make_server(link, seen)
    answer = await server.service.prepare(ask())
    async for _, event in answer.events():
        if isinstance(event, Text):
            break
    answer.close()
    await idle(server)
    assert link.streams[0].cancelled
    assert seen.told == [("started", 1), ("done", 1)]
    (finished,) = seen.facts[-1].finished
    assert finished.reason is FinishReason.CANCELLED
    assert finished.usage.completion_tokens == 1


async def test_closing_before_anything_was_read() -> None:
    seen = Recorder()
    link = FakeLink(says(asyncio.Event(), "b"))
    server = make_server(link, seen)
    for _ in range(2):
        (await server.service.prepare(ask(n=2))).close()
        await idle(server)
    assert all(stream.cancelled and stream.closed for stream in link.streams)
    assert seen.told == [("started", 1), ("done", 1), ("started", 2), ("done", 2)]


async def test_an_answer_that_nobody_reads_is_made_and_reported_all_the_same() -> None:
    seen = Recorder()
    server = make_server(FakeLink(says("a", "b")), seen)
    answer = await server.service.prepare(ask())
    await until(lambda: len(seen.told) == 2)
    assert server.service.active == 1
    answer.close()
    await idle(server)


async def test_cancelled_preparation_gives_everything_back() -> None:
    seen = Recorder()
    server = make_server(None, seen)
    slow = "other word " * 200_000
    task = asyncio.create_task(server.service.prepare(ask(messages=[{"role": "user", "content": slow}])))
    await until(lambda: server.service.active)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.service.active == 0
    assert seen.told == [("rejected", 1)]
    assert seen.facts[0].code == "client_disconnected"


async def test_cancelled_submission_gives_everything_back() -> None:
    class Stuck(FakeLink):
        async def submit(self, job: Any) -> Any:
            if self.jobs:
                await asyncio.sleep(30)
            return await super().submit(job)

    seen = Recorder()
    link = Stuck(says(asyncio.Event()))
    server = make_server(link, seen)
    task = asyncio.create_task(server.service.prepare(ask(n=2)))
    await until(lambda: link.jobs)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(server)
    assert link.streams[0].closed
    assert seen.told == [("started", 1), ("failed", 1)]


async def test_refused_submission_is_an_error_with_a_status() -> None:
    class Refusing(FakeLink):
        async def submit(self, job: Any) -> Any:
            raise UnavailableError("the engine has failed")

    seen = Recorder()
    server = make_server(Refusing(), seen)
    with pytest.raises(ApiError) as failed:
        await server.service.prepare(ask())
    assert (failed.value.status, failed.value.code) == (503, "service_unavailable")
    assert seen.told == [("started", 1), ("failed", 1)]
    await idle(server)


async def test_an_observer_that_fails_harms_nobody() -> None:
    class Broken(Recorder):
        def started(self, record: Any) -> None:
            raise OSError("disk full")

    seen = Recorder()
    server = make_server(None, Broken(), seen)
    await read(await server.service.prepare(ask()))
    assert seen.told == [("started", 1), ("done", 1)]


# What a request leaves open


async def options_of(request: GenerationRequest, **server_options: Any) -> Any:
    link = FakeLink()
    server = make_server(link, **server_options)
    (await server.service.prepare(request)).close()
    await idle(server)
    return link.jobs[0]


async def test_sampling_is_preset_then_flags_then_request_then_greedy() -> None:
    preset = nano_frontend().preset(thinking=True)
    flags = SamplingOverrides(top_p=0.5, min_p=0.1, seed=7)
    job = await options_of(ask(min_p=0.2), sampling=flags)
    chosen = job.options
    assert (chosen.temperature, chosen.top_k) == (preset.temperature, preset.top_k)
    assert (chosen.top_p, chosen.min_p, chosen.seed) == (0.5, 0.2, 7)
    greedy = await options_of(ask(temperature=1.5, seed=-1), sampling=SamplingOverrides(greedy=True))
    assert (greedy.options.temperature, greedy.options.seed) == (0.0, 2**64 - 1)
    answering = await options_of(ask(thinking=False))
    assert answering.options.presence_penalty == nano_frontend().preset(thinking=False).presence_penalty


async def test_seeds_are_random_unless_given() -> None:
    first, second = await options_of(ask()), await options_of(ask())
    assert first.options.seed != second.options.seed


@pytest.mark.parametrize(
    ("request_changes", "flag", "thinks_first"),
    [
        ({}, None, True),
        ({}, False, False),
        ({"thinking": True}, False, True),
        ({"effort": "high"}, False, True),
        ({"effort": "none"}, True, False),
        ({"template_kwargs": {"enable_thinking": False}}, True, False),
        ({"template_kwargs": {"reasoning_effort": "none"}}, None, False),
        ({"thinking": False, "effort": "none"}, None, False),
        ({"thinking": False, "template_kwargs": {"enable_thinking": False}}, None, False),
    ],
)
async def test_thinking_is_the_request_s_then_the_server_s_then_the_template_s(
    request_changes: dict[str, Any], flag: bool | None, thinks_first: bool
) -> None:
    job = await options_of(ask(**request_changes), thinking=flag)
    assert job.prompt.starts_in_thinking is thinks_first


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"thinking": False, "effort": "high"}, "conflicting_template_option"),
        ({"thinking": True, "effort": "none"}, "conflicting_template_option"),
        ({"thinking": True, "template_kwargs": {"enable_thinking": False}}, "conflicting_template_option"),
        ({"template_kwargs": {"enable_thinking": "yes"}}, None),
        ({"effort": "extreme"}, None),
        ({"template_kwargs": {"messages": []}}, "invalid_prompt"),
    ],
)
async def test_contradictory_thinking_is_refused(changes: dict[str, Any], code: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        await make_server().service.prepare(ask(**changes))
    assert (refused.value.status, refused.value.code) == (400, code)


async def test_fields_are_named_as_the_client_s_api_names_them() -> None:
    for protocol, param in (
        (Protocol.CHAT, "reasoning_effort"),
        (Protocol.RESPONSES, "reasoning.effort"),
        (Protocol.MESSAGES, "output_config.effort"),
    ):
        with pytest.raises(ApiError) as refused:
            await make_server().service.prepare(ask(protocol=protocol, effort="extreme"))
        assert refused.value.param == param


async def test_the_default_thinking_budget_applies_to_prompts_that_start_in_thinking() -> None:
    assert (await options_of(ask(), default_thinking_budget=50)).options.thinking_budget == 50
    assert (await options_of(ask(thinking_budget=9), default_thinking_budget=50)).options.thinking_budget == 9
    silent = await options_of(ask(thinking=False, thinking_budget=9), default_thinking_budget=50)
    assert silent.options.thinking_budget is None
    # It gives way to what the request may output; a request's own budget does not.
    closer = len(nano_frontend().thinking_closer)
    tight = await options_of(ask(max_output=60), default_thinking_budget=50)
    assert tight.options.thinking_budget == 60 - closer - 1
    with pytest.raises(ApiError) as refused:
        await make_server().service.prepare(ask(max_output=60, thinking_budget=50))
    assert refused.value.code == "thinking_budget_capacity_insufficient"
    assert (await options_of(ask(max_output=60, thinking_budget=60))).options.thinking_budget == 60


async def test_output_limits() -> None:
    assert (await options_of(ask())).options.max_new == 8192
    assert (await options_of(ask(), default_max_tokens=5)).options.max_new == 5
    assert (await options_of(ask(max_output=0))).options.max_new == 0


async def test_stop_strings_end_reasoning_only_where_the_api_says_so() -> None:
    job = await options_of(ask(stop=("x",)))
    assert (job.options.stop, job.options.reasoning_stop) == (("x",), ("x",))
    job = await options_of(ask(stop=("x",), stop_reasoning=False))
    assert (job.options.stop, job.options.reasoning_stop) == (("x",), ())


async def test_one_call_at_a_time() -> None:
    assert (await options_of(ask(tools=(READ,), parallel_calls=False))).options.single_call
    assert not (await options_of(ask(tools=(READ,)))).options.single_call
    assert not (await options_of(ask(parallel_calls=False))).options.single_call


async def test_a_prompt_longer_than_the_context_is_refused_in_the_api_s_words() -> None:
    link = FakeLink(max_context=10)
    server = make_server(link)
    tokens = await server.service.count(ask())
    assert tokens > 10
    with pytest.raises(ApiError) as refused:
        await server.service.prepare(ask())
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.extra == {"prompt_tokens": tokens, "max_context": 10}
    with pytest.raises(ApiError) as refused:
        await server.service.prepare(ask(protocol=Protocol.MESSAGES))
    assert refused.value.message == f"prompt is too long: {tokens} tokens > 10 maximum"
    assert server.service.active == 0


@pytest.mark.parametrize(
    "messages", [[{"role": "user", "content": "word " * (1 << 20)}], [{"role": "user", "content": ""}] * 3000]
)
async def test_what_is_far_too_long_is_refused_before_it_is_encoded(
    messages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where tokens are counted: encoding 100 MB takes minutes and gigabytes."""

    def encode(*_: Any) -> Any:
        raise AssertionError("encoded as a whole")

    server = make_server(FakeLink(max_context=2048))
    monkeypatch.setattr(Tokenizer, "encode_marked", encode)
    for protocol, words in ((Protocol.CHAT, "has "), (Protocol.MESSAGES, "prompt is too long: ")):
        for use in (server.service.prepare, server.service.count):
            with pytest.raises(ApiError, match=words) as refused:
                await use(ask(messages=messages, protocol=protocol))
            assert refused.value.status == 400
    assert server.service.active == 0


async def test_counting_takes_no_lifetime_and_tells_nobody() -> None:
    seen = Recorder()
    server = make_server(FakeLink(says(asyncio.Event())), seen, max_concurrency=1, max_pending=0)
    answer = await server.service.prepare(ask())
    counts = await asyncio.gather(*(server.service.count(ask()) for _ in range(24)))
    assert set(counts) == {answer.prompt_tokens}
    assert seen.told == [("started", 1)]
    answer.close()
    await idle(server)


async def test_rendering_does_not_hold_up_the_loop() -> None:
    server = make_server()
    begin = last = asyncio.get_running_loop().time()
    longest = 0.0
    task = asyncio.create_task(
        server.service.count(ask(messages=[{"role": "user", "content": "Some words here. " * 60_000}]))
    )
    while not task.done():
        await asyncio.sleep(0)
        now = asyncio.get_running_loop().time()
        longest, last = max(longest, now - last), now
    assert await task > 60_000
    assert longest < (last - begin) / 2
