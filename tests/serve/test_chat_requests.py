"""Bodies of Chat Completions: what they mean, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer.serve.calls import JsonFormat, ToolChoice
from ninfer.serve.chat.request import ChatRequest, read_request
from ninfer.serve.errors import ApiError
from tests.serve.fakes import MODEL, nano_frontend

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"b": 1, "a": 2}'}}


def tool(name: str, **members: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **members}}


def read(*messages: Any, **fields: Any) -> ChatRequest:
    return read_request({"messages": list(messages) or [USER], **fields}, MODEL)


def refused(*messages: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as found:
        read(*messages, **fields)
    assert found.value.status == 400
    assert found.value.message.endswith(".")
    return found.value


def rendered(*messages: Any) -> list[int]:
    return list(nano_frontend().render(read(*messages).generation.messages).tokens)


# Messages


def test_equal_contents_make_equal_prompts() -> None:
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "List the files."},
        {"role": "assistant", "content": "", "reasoning_content": "I must.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
    ]
    parts = [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "List the ", "prompt_cache_breakpoint": {"mode": "explicit"}},
                {"type": "text", "text": "files.", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "assistant", "content": None, "reasoning": "I must.", "tool_calls": [CALL], "refusal": None},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": "a.txt"}],
            "name": "read",
        },
    ]
    assert rendered(*plain) == rendered(*parts)


def test_what_the_sdk_sends_back() -> None:
    call = {**CALL, "index": 0, "function": {**CALL["function"], "parsed_arguments": None}}
    sent = {
        "role": "assistant", "content": "", "refusal": None, "annotations": None, "audio": None,
        "function_call": None, "parsed": None, "tool_calls": [call],
    }  # fmt: skip
    (_, message) = read(USER, sent).generation.messages
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "read", "arguments": {"b": 1, "a": 2}}, "id": "c1"}
        ],
    }
    assert list(message["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]  # in the client's order


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("", {}), ("  ", {}), (None, {}), ("{}", {}), ({"a": 1}, {"a": 1}),
        ('{"a": ', {"arguments": '{"a": '}), ("[1]", {"arguments": "[1]"}), ("5", {"arguments": "5"}),
    ],
)  # fmt: skip
def test_arguments_that_a_model_once_wrote(arguments: Any, meant: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": arguments}}
    (_, message) = read(USER, {"role": "assistant", "tool_calls": [call]}).generation.messages
    assert message["tool_calls"][0]["function"]["arguments"] == meant
    nano_frontend().render([USER, message])


def test_old_and_custom_calls() -> None:
    custom = {"id": "c2", "type": "custom", "custom": {"name": "patch", "input": "x"}}
    assistant = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "old", "arguments": "{}"},
        "tool_calls": [custom],
    }
    got = read(USER, assistant, {"role": "function", "name": "old", "content": "r"}).generation.messages
    calls = [call["function"] for call in got[1]["tool_calls"]]
    assert calls == [{"name": "old", "arguments": {}}, {"name": "patch", "arguments": {"input": "x"}}]
    assert got[2] == {"role": "tool", "content": "r"}
    nano_frontend().render(got)


def test_refusals_and_empty_turns_of_the_assistant() -> None:
    got = read(
        USER,
        {"role": "assistant", "content": "No", "refusal": ", sorry."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": []},
        USER,
    ).generation.messages
    assert [m["content"] for m in got[1:6]] == ["No, sorry.", "No.", "", "", ""]
    assert all("tool_calls" not in m for m in got)
    nano_frontend().render(got)


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([{"content": "a"}], "messages[0].role", None),
        ([{"role": "robot", "content": "a"}], "messages[0].role", None),
        ([{"role": ["user"], "content": "a"}], "messages[0].role", None),
        ([USER, 5], "messages[1]", None),
        ([{"role": "user"}], "messages[0].content", None),
        ([{"role": "user", "content": None}], "messages[0].content", None),
        ([{"role": "user", "content": 5}], "messages[0].content", None),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", None),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]", None),
        (
            [USER, USER, {"role": "user", "content": [{"type": "input_audio"}]}],
            "messages[2].content[0].type",
            "modality_not_supported",
        ),
        (
            [{"role": "user", "content": [{"type": ["text"]}]}],
            "messages[0].content[0].type",
            "modality_not_supported",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
            "messages[0].content[0].type",
            "vision_disabled",
        ),
        (
            [USER, {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url"}]}],
            "messages[1].content[0].type",
            "vision_disabled",
        ),
        (
            [{"role": "system", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].type",
            "modality_not_supported",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": 1}]}],
            "messages[0].content[0].prompt_cache_breakpoint",
            "invalid_cache_breakpoint",
        ),
        ([{"role": "user", "content": "a", "name": "Bob"}], "messages[0].name", "message_name_not_supported"),
        ([{"role": "user", "content": "a", "reasoning_content": "b"}], "messages[0].reasoning_content", None),
        (
            [USER, {"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "c"}],
            "messages[1].reasoning",
            None,
        ),
        ([USER, {"role": "assistant", "audio": {"id": "x"}}], "messages[1].audio", "modality_not_supported"),
        ([USER, {"role": "tool", "content": "a"}], "messages[1].tool_call_id", None),
        ([USER, {"role": "function", "content": "a"}], "messages[1].name", None),
        ([USER, {"role": "assistant", "tool_calls": {}}], "messages[1].tool_calls", None),
        (
            [USER, {"role": "assistant", "tool_calls": [{"type": "function"}]}],
            "messages[1].tool_calls[0].name",
            None,
        ),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": 5}}]}],
            "messages[1].tool_calls[0].function.arguments",
            None,
        ),
        (
            [USER, {"role": "assistant", "tool_calls": [{"type": "spell"}]}],
            "messages[1].tool_calls[0].type",
            None,
        ),
    ],
)
def test_messages_that_are_refused(messages: list[Any], param: str, code: str | None) -> None:
    error = refused(*messages)
    assert (error.param, error.code) == (param, code)


def test_no_messages() -> None:
    for value in ([], None, "hi", {}):
        with pytest.raises(ApiError) as found:
            read_request({"messages": value}, MODEL)
        assert found.value.param == "messages"


# Tools


def test_tools_and_how_they_are_declared() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}, "required": ["z"]}
    use = read(tools=[tool("read", description="d", parameters=schema, strict=True), tool("list")]).use
    first, second = use.tools
    assert (first.name, first.description, first.strict) == ("read", "d", True)
    assert list(first.parameters["properties"]) == ["z", "a"]
    assert second.parameters == {"type": "object", "properties": {}}
    assert not second.strict


def test_tools_of_other_types_are_left_out() -> None:
    use = read(tools=[{"type": "web_search"}, {"type": "namespace", "tools": []}, tool("read")]).use
    assert [t.name for t in use.tools] == ["read"]
    assert read(tools=[{"type": "web_search"}], tool_choice="auto").use.tools == ()
    assert refused(tools=[{"type": "web_search"}], tool_choice="required").param == "tool_choice"


def test_a_tool_that_comes_twice_counts_once() -> None:
    use = read(tools=[tool("read", description="1"), tool("read", description="2")]).use
    assert [t.description for t in use.tools] == ["1"]


@pytest.mark.parametrize("name", ["mcp.server.tool", "Read file", "a/b:c", "été", "x" * 128])
def test_names_that_clients_use(name: str) -> None:
    assert read(tools=[tool(name)]).use.tools[0].name == name


@pytest.mark.parametrize("name", ["", " a", "a ", "a>b", "<a", "a\nb", 'a"', "x" * 129, 5, None])
def test_names_that_a_call_can_not_spell(name: Any) -> None:
    assert refused(tools=[tool("ok"), tool(name)]).param == "tools[1].function.name"


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "b"}}, ToolChoice("required", ("b",))),
        ({"type": "function", "name": "b"}, ToolChoice("required", ("b",))),
        ({"type": "custom", "custom": {"name": "c"}}, ToolChoice("required", ("c",))),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
                {"type": "function", "function": {"name": "b"}}, {"type": "function", "name": "a"}]}},
            ToolChoice("auto", ("a", "b")),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]},
            ToolChoice("required", ("b",)),
        ),
    ],
)  # fmt: skip
def test_tool_choices(choice: Any, meant: ToolChoice) -> None:
    tools = [tool("a"), tool("b"), {"type": "custom", "custom": {"name": "c"}}]
    chat = read(tools=tools, tool_choice=choice)
    assert chat.generation.tool_choice == meant
    assert chat.use.custom == {"c"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": 5}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": 5}]}, "tools[0].function"),
        ({"tools": [tool("a", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool("a", description=5)]}, "tools[0].function.description"),
        ({"tools": [tool("a", strict=1)]}, "tools[0].function.strict"),
        ({"tools": [tool("a")], "tool_choice": "b"}, "tool_choice"),
        ({"tools": [tool("a")], "tool_choice": 5}, "tool_choice"),
        ({"tools": [tool("a")], "tool_choice": {"type": "spell"}}, "tool_choice.type"),
        (
            {"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}},
            "tool_choice.function.name",
        ),
        (
            {"tools": [tool("a")], "tool_choice": {"type": "allowed_tools", "mode": "any", "tools": []}},
            "tool_choice.mode",
        ),
        (
            {"tools": [tool("a")], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
            "tool_choice",
        ),
        (
            {
                "tools": [tool("a")],
                "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "b"}]},
            },
            "tool_choice.tools[0].name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool("a")], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{"name": ""}]}, "functions[0].name"),
        ({"functions": [{"name": "a"}], "function_call": {"name": "b"}}, "function_call"),
        ({"functions": [{"name": "a"}], "function_call": "b"}, "function_call"),
    ],
)
def test_tools_that_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


# Everything else


def test_fields_and_what_they_become() -> None:
    chat = read(
        stream=True, stream_options={"include_usage": True, "include_obfuscation": False},
        max_completion_tokens=5, max_tokens=9, temperature=0, top_p=1, top_k=20, min_p=0.5, seed=-3,
        presence_penalty=-2, frequency_penalty=2.0, stop="x", n=2, logprobs=True, top_logprobs=20,
        enable_thinking=False, preserve_thinking=True, thinking_budget=7, parallel_tool_calls=False,
        timings_per_token=True, return_progress=True, chat_template_kwargs={"k": 1},
    )  # fmt: skip
    g = chat.generation
    assert (g.max_output, g.temperature, g.top_p, g.top_k, g.min_p, g.seed) == (5, 0, 1, 20, 0.5, -3)
    assert (g.presence_penalty, g.frequency_penalty, g.stop, g.n, g.logprobs) == (-2, 2, ("x",), 2, 20)
    assert (g.thinking, g.preserve_thinking, g.thinking_budget, g.parallel_calls) == (False, True, 7, False)
    assert (g.template_kwargs, g.stream) == ({"k": 1}, True)
    assert (chat.include_usage, chat.timings, chat.progress) == (True, True, True)


def test_null_is_absent() -> None:
    names = (
        "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n",
        "stream", "stream_options", "logprobs", "top_logprobs", "reasoning_effort", "enable_thinking",
        "chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call",
        "response_format", "logit_bias", "modalities", "audio", "prediction", "metadata", "service_tier",
        "store", "verbosity", "web_search_options", "user", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prompt_cache_options", "repetition_penalty", "mm_processor_kwargs",
        "grammar", "guided_json", "timings_per_token", "return_progress", "moderation",
    )  # fmt: skip
    assert read(**dict.fromkeys(names)) == read()


def test_neutral_and_unknown_fields_are_ignored() -> None:
    assert (
        read(
            logit_bias={"5": 0}, logprobs=False, audio={"voice": "x"}, prediction={}, metadata={"a": 1},
            service_tier="flex", modalities=["text"], repetition_penalty=1.0, mm_processor_kwargs={"a": None},
            grammar="", store=False, verbosity="medium", function_call="auto", functions=[],
            response_format={"type": "text"}, user="u", safety_identifier="s", prompt_cache_key="k" * 64,
            prompt_cache_retention="24h", prompt_cache_options={"mode": "implicit", "ttl": "30m"},
            reasoning_effort="default", whatever={"a": [1]},
        )
        == read()
    )  # fmt: skip
    # Timings and progress are a stream's.
    assert read(timings_per_token=True, return_progress=True) == read()


def test_efforts() -> None:
    assert read(reasoning_effort="low").generation.effort == "low"
    assert read(reasoning_effort="auto").generation.effort is None


def test_response_formats() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert read(response_format={"type": "json_object"}).generation.response_format == JsonFormat()
    form = {"type": "json_schema", "json_schema": {"name": "Out", "schema": schema, "strict": True}}
    got = read(response_format=form).generation.response_format
    assert got is not None
    assert got == JsonFormat(schema)
    assert list(got.schema["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"max_tokens": -1}, "max_tokens", None),
        ({"max_tokens": 1.5}, "max_tokens", None),
        ({"max_completion_tokens": True}, "max_completion_tokens", None),
        ({"temperature": 2.1}, "temperature", None),
        ({"temperature": "1"}, "temperature", None),
        ({"temperature": True}, "temperature", None),
        ({"top_p": -0.1}, "top_p", None),
        ({"top_k": 21}, "top_k", None),
        ({"min_p": 2}, "min_p", None),
        ({"presence_penalty": 3}, "presence_penalty", None),
        ({"frequency_penalty": -3}, "frequency_penalty", None),
        ({"seed": 1 << 64}, "seed", None),
        ({"seed": 1e30}, "seed", None),
        ({"stop": ""}, "stop", None),
        ({"stop": ["a", ""]}, "stop", None),
        ({"stop": ["a"] * 5}, "stop", None),
        ({"stop": {"a": 1}}, "stop", None),
        ({"n": 0}, "n", None),
        ({"n": "2"}, "n", None),
        ({"stream": "yes"}, "stream", None),
        ({"stream_options": []}, "stream_options", None),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", None),
        ({"logprobs": 1}, "logprobs", None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"reasoning_effort": 5}, "reasoning_effort", None),
        ({"enable_thinking": "no"}, "enable_thinking", None),
        ({"thinking_budget": 0}, "thinking_budget", None),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", None),
        ({"response_format": {"type": "xml"}}, "response_format.type", "response_format_not_supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", None),
        ({"response_format": "json"}, "response_format", None),
        ({"logit_bias": {"5": 1}}, "logit_bias", "logit_bias_not_supported"),
        ({"logit_bias": [1]}, "logit_bias", None),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "repetition_penalty_not_supported"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "mm_processor_kwargs_not_supported"),
        ({"modalities": ["text", "audio"]}, "modalities", "modality_not_supported"),
        ({"web_search_options": {}}, "web_search_options", "web_search_not_supported"),
        ({"verbosity": "low"}, "verbosity", "verbosity_not_supported"),
        ({"store": True}, "store", "store_not_supported"),
        ({"guided_json": {}}, "guided_json", "constrained_decoding_not_supported"),
        ({"grammar": "root ::= x"}, "grammar", "constrained_decoding_not_supported"),
        ({"user": 5}, "user", None),
        ({"safety_identifier": "s" * 65}, "safety_identifier", None),
        ({"prompt_cache_key": "k" * 65}, "prompt_cache_key", None),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention", None),
        ({"prompt_cache_options": {"mode": "x"}}, "prompt_cache_options.mode", None),
        ({"prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options.ttl", None),
    ],
)  # fmt: skip
def test_fields_that_are_refused(fields: dict[str, Any], param: str, code: str | None) -> None:
    error = refused(**fields)
    assert (error.param, error.code) == (param, code)
