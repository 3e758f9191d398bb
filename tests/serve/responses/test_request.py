"""Bodies to requests."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.serve.calls import JsonFormat, Protocol, ToolChoice
from ninfer.serve.errors import ApiError
from ninfer.serve.responses.request import Create, read_count, read_create
from ninfer.serve.responses.response import begun
from ninfer.serve.responses.store import Record, Store
from ninfer.serve.responses.truncation import candidates
from tests.serve.responses.support import WEATHER, check_response, user

SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}}


def read(kept: Store | None = None, /, **body: Any) -> Create:
    return read_create({"model": "m", "input": "hi", **body}, kept or Store(9, 10**6))


def refused(**body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**body)
    return caught.value


def test_a_bare_request_leaves_everything_open() -> None:
    asked = read()
    generation = asked.generation
    assert generation.protocol is Protocol.RESPONSES
    assert (generation.model, generation.stream, generation.messages) == ("m", False, [user()])
    for name in ("max_output", "temperature", "top_p", "effort", "thinking", "preserve_thinking", "logprobs"):
        assert getattr(generation, name) is None
    assert (asked.store, asked.encrypted, asked.shrink) == (True, False, False)


def test_every_field_arrives() -> None:
    asked = read(
        instructions="Be short.", tools=[WEATHER], tool_choice="required", parallel_tool_calls=False,
        max_output_tokens=7, temperature=0, top_p=0.5, stream=True, store=False, top_logprobs=3,
        include=["reasoning.encrypted_content", "message.output_text.logprobs", "web_search_call.results"],
        reasoning={"effort": "high", "summary": "auto"}, truncation="auto", preserve_thinking=True,
        chat_template_kwargs={"x": 1, "enable_thinking": None}, metadata={"a": "b"}, user="u",
        text={"format": {"type": "json_schema", "name": "o", "strict": True, "schema": SCHEMA},
              "verbosity": "low"},
        service_tier="priority", prompt_cache_key="k", safety_identifier="s", client_metadata={"x": [1]},
        prompt_cache_retention="24h", prompt_cache_options={"mode": "implicit", "ttl": "30m"},
        background=False, max_tool_calls=3, stream_options={"include_obfuscation": False},
        prompt=None, context_management=[],
    )  # fmt: skip
    generation = asked.generation
    assert generation.messages[0] == {"role": "system", "content": "Be short."}
    assert [tool.name for tool in generation.tools] == ["weather"]
    assert generation.tool_choice == ToolChoice("required")
    assert not generation.parallel_calls
    assert (generation.max_output, generation.temperature, generation.top_p) == (7, 0.0, 0.5)
    assert (generation.logprobs, generation.effort, generation.preserve_thinking) == (3, "high", True)
    assert generation.response_format == JsonFormat(SCHEMA)
    assert generation.template_kwargs == {"x": 1, "enable_thinking": None}
    assert (generation.stream, asked.store, asked.encrypted, asked.shrink) == (True, False, True, True)
    response = check_response(begun(asked, 0.0, 0.5))
    assert response["reasoning"] == {"effort": "high", "summary": None}
    assert response["text"]["verbosity"] == "low"
    assert response["metadata"] == {"a": "b"}
    assert (response["tools"], response["tool_choice"]) == ([WEATHER], "required")
    assert (response["max_tool_calls"], response["top_logprobs"], response["truncation"]) == (3, 3, "auto")


def test_the_response_object_has_its_members_in_order() -> None:
    response = check_response(begun(read(), 0.7, 0.9))
    assert list(response) == [
        "id", "object", "created_at", "completed_at", "status", "background", "error", "incomplete_details",
        "instructions", "max_output_tokens", "max_tool_calls", "metadata", "model", "output",
        "parallel_tool_calls", "previous_response_id", "reasoning", "service_tier", "store", "temperature",
        "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "usage",
    ]  # fmt: skip
    assert response["id"].startswith("resp_")
    assert len(response["id"]) == 37
    assert (response["text"], response["tool_choice"]) == ({"format": {"type": "text"}}, "auto")
    assert (response["service_tier"], response["background"], response["store"]) == ("default", False, True)
    assert response["reasoning"] == {"effort": None, "summary": None}


def test_formats() -> None:
    assert read(text={"format": {"type": "text"}}).generation.response_format is None
    assert read(text={"verbosity": "high"}).generation.response_format is None
    assert read(text={"format": {"type": "json_object"}}).generation.response_format == JsonFormat()


def test_log_probabilities() -> None:
    assert read(include=["message.output_text.logprobs"]).generation.logprobs == 0
    assert read(top_logprobs=0).generation.logprobs is None
    assert read(top_logprobs=20).generation.logprobs == 20


def test_reasoning_options() -> None:
    for effort, expected in (("none", "none"), ("default", None), ("auto", None), ("adaptive", "adaptive")):
        assert read(reasoning={"effort": effort}).generation.effort == expected
    for context, expected in (("all_turns", True), ("current_turn", False), ("auto", None)):
        assert read(reasoning={"context": context}).generation.preserve_thinking is expected
    explicit = read(reasoning={"context": "all_turns"}, chat_template_kwargs={"preserve_thinking": False})
    assert explicit.generation.preserve_thinking is False
    assert explicit.generation.template_kwargs == {}


def test_a_chain_begins_with_its_parents_history_and_keeps_its_reasoning_option() -> None:
    store = Store(9, 10**6)
    first = read(store, preserve_thinking=True, instructions="Only now.")
    said = {"id": "msg_a", "type": "message", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "annotations": [], "text": "yes"}]}  # fmt: skip
    response = {**begun(first, 1, 1), "output": [said]}
    store.put(Record(response, first.items, (*first.history, said), True))
    second = read(store, input="more", previous_response_id=response["id"])
    assert second.generation.messages == [user(), {"role": "assistant", "content": "yes"}, user("more")]
    assert second.generation.preserve_thinking is True
    assert second.echo["previous_response_id"] == response["id"]
    assert len(second.items) == 1
    assert len(second.history) == 3
    assert (
        read(store, previous_response_id=response["id"], preserve_thinking=False).generation.preserve_thinking
        is False
    )
    # The parent has a user query already.
    assert (
        read(store, input=None, previous_response_id=response["id"]).generation.messages[-1]["role"]
        == "assistant"
    )
    # An item may be named instead of sent, but stands in a history once.
    named = read(store, input=[user(), {"type": "item_reference", "id": "msg_a"}, user("more")])
    assert named.generation.messages == second.generation.messages
    twice = [{"id": "msg_a"}, user("more")]
    with pytest.raises(ApiError, match="history of previous_response_id"):
        read(store, input=twice, previous_response_id=response["id"])


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"seed": 1}, "seed", "unknown_parameter"),
        ({"stop": "x"}, "stop", "unknown_parameter"),
        ({"model": None}, "model", None),
        ({"model": ""}, "model", None),
        ({"model": ["m"]}, "model", None),
        ({"background": True}, "background", "background_not_supported"),
        ({"conversation": "c"}, "conversation", "conversations_not_supported"),
        ({"prompt": {"id": "p"}}, "prompt", "prompt_templates_not_supported"),
        ({"moderation": {"model": "x"}}, "moderation", "moderation_not_supported"),
        ({"context_management": [{"type": "compaction"}]}, "context_management",
         "context_management_not_supported"),
        ({"include": ["x"]}, "include", "include_not_supported"),
        ({"include": "x"}, "include", None),
        ({"include": [{}]}, "include", "include_not_supported"),
        ({"service_tier": "slow"}, "service_tier", "service_tier_not_supported"),
        ({"truncation": "middle"}, "truncation", "truncation_not_supported"),
        ({"top_logprobs": 21}, "top_logprobs", None),
        ({"temperature": 2.5}, "temperature", None),
        ({"temperature": True}, "temperature", None),
        ({"top_p": "1"}, "top_p", None),
        ({"max_output_tokens": -1}, "max_output_tokens", None),
        ({"max_output_tokens": 1.5}, "max_output_tokens", None),
        ({"max_output_tokens": 1e30}, "max_output_tokens", None),
        ({"stream": 1}, "stream", None),
        ({"store": "no"}, "store", None),
        ({"stream_options": {"x": True}}, "stream_options.x", "unknown_parameter"),
        ({"stream_options": {"include_obfuscation": 1}}, "stream_options.include_obfuscation", None),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata", None),
        ({"metadata": {"k" * 65: "x"}}, "metadata", None),
        ({"metadata": {"k": "x" * 513}}, "metadata.k", None),
        ({"metadata": {"k": None}}, "metadata.k", None),
        ({"metadata": {"k": 1}}, "metadata.k", None),
        ({"client_metadata": "x"}, "client_metadata", None),
        ({"prompt_cache_key": "x" * 65}, "prompt_cache_key", None),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention", None),
        ({"prompt_cache_options": {"mode": "x"}}, "prompt_cache_options.mode", None),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", None),
        ({"reasoning": {"x": 1}}, "reasoning.x", "unknown_parameter"),
        ({"reasoning": {"context": "x"}}, "reasoning.context", "reasoning_option_not_supported"),
        ({"reasoning": []}, "reasoning", None),
        ({"text": {"format": {"name": "o"}}}, "text.format.type", None),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "structured_outputs_not_supported"),
        ({"text": {"format": {"type": "json_schema", "name": "o"}}}, "text.format.schema", None),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format.name", None),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", None),
        ({"text": {"x": 1}}, "text.x", "unknown_parameter"),
        ({"instructions": ["x"]}, "instructions", None),
        ({"previous_response_id": 3}, "previous_response_id", None),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "response_not_found"),
        ({"tool_choice": "required"}, "tool_choice", None),
        ({"preserve_thinking": True, "chat_template_kwargs": {"preserve_thinking": False}},
         "preserve_thinking", "conflicting_template_option"),
        ({"chat_template_kwargs": {"preserve_thinking": 1}}, "chat_template_kwargs.preserve_thinking", None),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(body: dict[str, Any], param: str, code: str | None) -> None:
    error = refused(**body)
    assert error.status == (404 if code == "response_not_found" else 400)
    assert (error.param, error.code) == (param, code)
    assert error.type == "invalid_request_error"


def test_what_could_not_be_written_again_is_refused() -> None:
    deep: Any = {}
    for _ in range(300):
        deep = {"a": deep}
    with pytest.raises(ApiError, match="nested too deeply"):
        read(tools=[{**WEATHER, "parameters": deep}])


def test_counting_takes_its_own_fields() -> None:
    store = Store(1, 1)
    asked = read_count({"model": "m", "input": "hi", "tools": [WEATHER], "text": {"verbosity": "low"}}, store)
    assert asked.generation.messages == [user()]
    for body, code in (
        ({"input": "hi", "temperature": 1}, "unknown_parameter"),
        ({"input": "hi", "personality": "friendly"}, "personality_not_supported"),
    ):
        with pytest.raises(ApiError) as caught:
            read_count({"model": "m", **body}, store)
        assert caught.value.code == code


def test_shorter_histories_keep_the_beginning_and_whole_turns() -> None:
    raw = [{"role": "system", "content": "S"}, *(item for n in range(3) for item in (
        user(f"q{n}"), {"role": "assistant", "content": f"a{n}"}))]  # fmt: skip
    history = read(input=raw).history
    cuts = [[item["content"][0]["text"] for item in cut] for cut in candidates(history)]
    assert cuts == [["S", "q1", "a1", "q2", "a2"], ["S", "q2", "a2"]]
