"""Drafts behind HTTP: every answer is the one that a server without them gives, and the log says what they
came to."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.e2e import prompts
from tests.serve.e2e.conftest import nano_options
from tests.serve.e2e.process import NANO, ServerProcess, wait_for

SPEC = ["--spec", "mtp", "--draft-tokens", "3", "--log-speculation-detail"]
Body = dict[str, Any]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """As `nano` is, but with drafts."""
    with ServerProcess(NANO, tmp_path_factory.mktemp("drafting"), *nano_options(), *SPEC) as server:
        yield server


def user(text: str, **members: Any) -> Body:
    sure = {"model": "ninfer-nano", "temperature": 0, "reasoning_effort": "none"}
    return {"messages": [{"role": "user", "content": text}], **sure, **members}


def form(model: Any) -> Body:
    schema = {"name": "form", "strict": True, "schema": model.model_json_schema()}
    return {"type": "json_schema", "json_schema": schema}


CASES: dict[str, Body] = {
    "sum": user(prompts.SUM),
    "story": user(prompts.STORY, max_tokens=60),
    "stop string": user(prompts.RECORDS, stop=["ok"], max_tokens=120),
    "stop inside a token": user(prompts.RECORDS, stop=["pt_tok"], max_tokens=40),
    "limit": user(prompts.RECORDS, max_tokens=31),
    "one token": user(prompts.STORY, max_tokens=1),
    "no token": user(prompts.STORY, max_tokens=0),
    "log-probabilities": user(prompts.RECORDS, logprobs=True, top_logprobs=4, max_tokens=40),
    "call": user(prompts.ORDER, tools=prompts.chat_tools(prompts.ORDER_TOOLS)),
    "two calls": user(prompts.TWO, tools=prompts.chat_tools(prompts.TWO_TOOLS)),
    "required call": user(
        prompts.SUM, tools=prompts.chat_tools(prompts.COMMAND_TOOLS), tool_choice="required", max_tokens=60
    ),
    "grammar": user("Order something.", response_format=form(prompts.Order), max_tokens=120),
    "sampled grammar": user(
        "Order something.", response_format=form(prompts.Order), max_tokens=120, temperature=1, seed=4
    ),
    "thinking": user(prompts.PARCEL, reasoning_effort="high", tools=prompts.chat_tools(prompts.PARCEL_TOOLS)),
    "thinking budget": user("Compute 79 + 325.", reasoning_effort="high", thinking_budget=7),
    "penalties": user(prompts.STORY, presence_penalty=1.5, frequency_penalty=0.3, max_tokens=60),
    "sampled": user(prompts.STORY, temperature=0.8, top_p=0.9, seed=11, max_tokens=60),
    "several": user(prompts.STORY, temperature=1, seed=5, n=3, max_tokens=24),
    "several greedy": user(prompts.STORY, n=2, max_tokens=24),
}  # fmt: skip


def asked(server: ServerProcess, body: Body) -> tuple[Any, Body]:
    """The choices and the usage, without how long it took."""
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    for choice in whole["choices"]:
        for call in choice["message"].get("tool_calls") or ():
            call.pop("id")
    usage = {name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return (whole["choices"], usage), whole


def streamed(server: ServerProcess, body: Body) -> dict[int, Body]:
    """By choice: texts, calls, log-probabilities and the reason of the end, put together from the chunks."""
    found: dict[int, Body] = {}
    with server.openai() as client:
        stream = client.chat.completions.create(
            stream=True, **{k: v for k, v in body.items() if k != "thinking_budget"},
            extra_body={k: v for k, v in body.items() if k == "thinking_budget"},
        )  # fmt: skip
        for chunk in stream:
            for choice in chunk.choices:
                one = found.setdefault(
                    choice.index, {"content": "", "reasoning": "", "calls": {}, "logprobs": [], "end": None}
                )
                delta = choice.delta
                one["content"] += delta.content or ""
                one["reasoning"] += (delta.model_extra or {}).get("reasoning_content") or ""
                for call in delta.tool_calls or ():
                    name, text = one["calls"].get(call.index, ("", ""))
                    assert call.function is not None
                    one["calls"][call.index] = (
                        name + (call.function.name or ""),
                        text + (call.function.arguments or ""),
                    )
                if choice.logprobs and choice.logprobs.content:
                    one["logprobs"] += [entry.model_dump() for entry in choice.logprobs.content]
                one["end"] = choice.finish_reason or one["end"]
    return found


LONG = {
    "two calls",
    "required call",
    "sampled grammar",
    "stop inside a token",
    "sum",
    "several greedy",
    "one token",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name in LONG)) for name in CASES]
)
def test_answers_are_those_without_drafts(drafting: ServerProcess, nano: ServerProcess, name: str) -> None:
    body = CASES[name]
    (wanted, _), (found, whole) = asked(nano, body), asked(drafting, body)
    assert found == wanted
    chunks = streamed(drafting, body)
    for choice in whole["choices"]:
        one, message = chunks[choice["index"]], choice["message"]
        assert one["content"] == (message["content"] or "")
        assert one["reasoning"] == (message.get("reasoning_content") or "")
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
        assert [*one["calls"].values()] == calls
        assert one["logprobs"] == ((choice.get("logprobs") or {}).get("content") or [])
        assert one["end"] == choice["finish_reason"]


def test_many_at_a_time(drafting: ServerProcess) -> None:
    names = ["sum", "story", "call", "log-probabilities", "sampled", "thinking budget", "limit"]
    alone = [asked(drafting, CASES[name])[0] for name in names]
    with ThreadPoolExecutor(4) as threads:
        together = [*threads.map(lambda name: asked(drafting, CASES[name])[0], names)]
    assert together == alone


def logged(server: ServerProcess, tokens: int) -> tuple[Body, Body]:
    """The timings of an answer of so many tokens, a number that nobody else asks for, and what the log says
    of its drafts."""
    _, whole = asked(server, user(prompts.RECORDS, max_tokens=tokens))
    assert whole["usage"]["completion_tokens"] == tokens

    def found() -> list[Body]:
        done = server.records()
        return [r["speculative"] for r in done if r["request"]["requested_output_tokens"] == tokens]

    return whole["timings"], wait_for(found)[-1]


def test_what_drafts_came_to(drafting: ServerProcess, nano: ServerProcess) -> None:
    timings, spec = logged(drafting, 37)
    assert (spec["backend"], spec["draft_window"]) == ("mtp", 3)
    assert spec["rounds"] + spec["fallback_steps"] + spec["accepted_tokens"] == 36
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (
        spec["drafted_tokens"],
        spec["accepted_tokens"],
    )
    assert sum(spec["accepted_per_position"]) == spec["accepted_tokens"] > 0
    histogram = spec["accepted_length_histogram"]
    assert len(histogram) == 4
    assert sum(histogram) == spec["rounds"]
    lengths = spec["accepted_lengths"]
    assert [lengths.count(str(length)) for length in range(4)] == histogram
    assert lengths.count("-") == spec["fallback_steps"]
    assert not spec["accepted_lengths_truncated"]
    [started] = drafting.records("server_start")
    assert started["engine"]["speculative_backend"] == "mtp"
    assert started["engine"]["speculative_draft_window"] == 3
    assert started["engine"]["proposal_head"] == "full"
    timings, spec = logged(nano, 37)
    assert "draft_n" not in timings
    assert (spec["backend"], spec["rounds"], spec["accepted_lengths"]) == ("none", 0, None)
    with drafting.http() as http:
        metrics = http.get("/metrics").text
    drafted, accepted = (
        float(next(line.split()[-1] for line in metrics.splitlines() if line.startswith(name)))
        for name in ("ninfer_drafted_tokens_total", "ninfer_accepted_tokens_total")
    )
    assert drafted > accepted > 0


def test_who_leaves_in_the_middle_leaves_nothing_behind(drafting: ServerProcess) -> None:
    body = {**CASES["story"], "stream": True, "max_tokens": 150}
    for lines in (1, 3, 9):
        with drafting.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number == lines:
                    break
    assert asked(drafting, CASES["story"])[0] == asked(drafting, CASES["story"])[0]


def test_a_conversation_goes_on_from_its_end(drafting: ServerProcess) -> None:
    body = user("Write a story about a miller named Ida.", max_tokens=60)
    _, first = asked(drafting, body)
    talk = [
        *body["messages"],
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "Go on."},
    ]
    _, second = asked(drafting, {**body, "messages": talk})
    known = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert known >= first["usage"]["prompt_tokens"] - 8
    _, again = asked(drafting, {**body, "messages": talk})
    assert again["choices"][0]["message"] == second["choices"][0]["message"]
    assert again["timings"]["draft_n_accepted"] == second["timings"]["draft_n_accepted"]


def test_other_protocols(drafting: ServerProcess, nano: ServerProcess) -> None:
    responses = {
        "model": "ninfer-nano", "input": prompts.STORY, "temperature": 0, "max_output_tokens": 50,
        "reasoning": {"effort": "none"},
    }  # fmt: skip
    messages = {
        "model": "ninfer-nano", "messages": [{"role": "user", "content": prompts.ORDER}], "temperature": 0,
        "max_tokens": 100, "tools": prompts.messages_tools(prompts.ORDER_TOOLS),
    }  # fmt: skip

    def said(server: ServerProcess) -> list[Any]:
        with server.http() as http:
            one, two = (
                http.post(path, json=body)
                for path, body in (("/v1/responses", responses), ("/v1/messages", messages))
            )
        assert (one.status_code, two.status_code) == (200, 200), (one.text, two.text)
        own = ("id", "signature")
        items = [{k: v for k, v in item.items() if k not in own} for item in one.json()["output"]]
        blocks = [{k: v for k, v in block.items() if k not in own} for block in two.json()["content"]]
        return [items, one.json()["usage"]["output_tokens"], blocks, two.json()["usage"]["output_tokens"]]

    assert said(drafting) == said(nano)


def test_the_console_tells(drafting: ServerProcess) -> None:
    asked(drafting, CASES["sum"])
    wait_for(lambda: "drafts accepted" in drafting.output())
