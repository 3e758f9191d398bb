"""Bodies of requests, member by member."""

import json

import pytest

from ninfer.serve.calls import JsonFormat, ToolChoice
from ninfer.serve.errors import ApiError, anthropic_body
from ninfer.serve.messages.request import read_request
from tests.serve.messages.conftest import (
    RECORDED,
    TERMS,
    assistant,
    body,
    read,
    recording,
    result,
    text,
    tool,
    use,
    user,
)


@pytest.mark.parametrize("line", RECORDED)
def test_recorded_requests_are_read(line):
    counting = "count_tokens" in line["path"]
    if line["body"].get("thread"):
        with pytest.raises(ApiError) as caught:
            read_request(line["body"], TERMS)
        said = anthropic_body(caught.value, "req_1")["error"]
        assert said["details"] == {"error_code": "thread_unsupported_request"}
        return
    wanted = read_request(line["body"], TERMS, counting=counting).generation
    assert wanted.model == line["body"]["model"]
    assert wanted.stream == line["body"].get("stream", False)
    names = [tool["name"] for tool in line["body"].get("tools", ()) if not tool.get("defer_loading")]
    assert [tool.name for tool in wanted.tools if tool.listed] == names


def test_claude_codes_request():
    wanted = read_request(recording("claude-code", "bash", 1), TERMS)
    generation = wanted.generation
    assert wanted.omit_thinking
    assert generation.thinking is True
    assert generation.thinking_budget is None
    assert generation.effort == "high"
    assert generation.max_output == 32000
    assert generation.preserve_thinking is True  # it asks to clear nothing
    assert generation.tool_choice == ToolChoice()
    assert generation.parallel_calls
    roles = [message["role"] for message in generation.messages]
    assert roles == ["system", "user", "system"]
    assert generation.messages[0]["content"] == "[text, 62 characters][text, 6792 characters]"


def test_sampling_and_stops():
    generation = read("hi", temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["END", "\n"]).generation
    assert (generation.temperature, generation.top_p, generation.top_k) == (0.5, 0.9, 7)
    assert generation.stop == ("END", "\n")
    assert not generation.stop_reasoning
    plain = read("hi").generation
    assert (plain.temperature, plain.top_p, plain.top_k, plain.stop) == (None, None, None, ())


def test_max_tokens_may_be_left_out_or_be_larger_than_anything():
    assert read("hi", max_tokens=None).generation.max_output is None
    assert read("hi", max_tokens=10**30).generation.max_output == 2**32 - 1


@pytest.mark.parametrize(
    ("sent", "thinking", "budget", "omitted"),
    [
        (None, None, None, False),
        ({"type": "disabled"}, False, None, False),
        ({"type": "adaptive"}, True, None, False),
        ({"type": "adaptive", "display": "omitted"}, True, None, True),
        ({"type": "adaptive", "display": "updates"}, True, None, False),
        ({"type": "enabled", "budget_tokens": 1024, "display": "summarized"}, True, 1024, False),
        ({"type": "enabled", "budget_tokens": 31999}, True, 32000 - 4096 - 25, False),
        ({"type": "enabled", "budget_tokens": 32000}, True, 32000 - 4096 - 25, False),
        ({"type": "enabled", "budget_tokens": 10**9}, True, 32000 - 4096 - 25, False),
    ],
)
def test_thinking(sent, thinking, budget, omitted):
    wanted = read("hi", max_tokens=32000, thinking=sent)
    assert (wanted.generation.thinking, wanted.generation.thinking_budget) == (thinking, budget)
    assert wanted.omit_thinking is omitted


@pytest.mark.parametrize("max_tokens", [1, 2, 25, 33, 34, 64, 1024, 1025, None])
def test_a_thinking_budget_always_leaves_room_or_is_none(max_tokens):
    thinking = {"type": "enabled", "budget_tokens": 9000}
    budget = read("hi", max_tokens=max_tokens, thinking=thinking).generation.thinking_budget
    if budget is not None:
        assert 1 <= budget <= 9000
        assert budget + TERMS.closer_tokens + 1 <= (max_tokens or TERMS.default_max_tokens)
    else:
        assert max_tokens is not None
        assert max_tokens < 34


def test_effort_and_thinking_switched_off():
    off = {"type": "disabled"}
    assert read("hi", output_config={"effort": "low"}).generation.effort == "low"
    assert read("hi", output_config={"effort": "max"}, thinking=off).generation.effort is None
    assert read("hi", output_config={"effort": "none"}, thinking=off).generation.effort == "none"


def test_output_format_is_enforced():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    wanted = {"type": "json_schema", "schema": schema}
    assert read("hi", output_config={"format": wanted}).generation.response_format == JsonFormat(schema)
    assert read("hi", output_format=wanted).generation.response_format == JsonFormat(schema)
    assert read("hi", output_config={"format": wanted}, counting=True).generation.response_format is None


def test_tools_keep_their_order_and_members():
    schema = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
    tools = [tool("B", input_schema=schema, strict=True), tool("A", type="custom")]
    generation = read("hi", tools=tools).generation
    assert [tool.name for tool in generation.tools] == ["B", "A"]
    assert generation.tools[0].strict
    assert not generation.tools[1].strict
    assert json.dumps(generation.tools[0].declared()["function"]["parameters"]) == json.dumps(schema)


def test_tools_of_anthropics_servers_and_unknown_kinds_are_not_offered():
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "browser_toolset_20260801"},
        tool("Bash"),
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        tool("Sandboxed", allowed_callers=["code_execution_20260120"]),
    ]
    assert [tool.name for tool in read("hi", tools=tools, container="c").generation.tools] == ["Bash"]


@pytest.mark.parametrize(
    ("sent", "choice", "parallel"),
    [
        (None, ToolChoice(), True),
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(), False),
        ({"type": "none"}, ToolChoice("none"), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required"), False),
        ({"type": "tool", "name": "Bash"}, ToolChoice("required", ("Bash",)), True),
        ({"type": "tool", "name": "web_search"}, ToolChoice(), True),
    ],
)
def test_tool_choice(sent, choice, parallel):
    tools = [tool("Bash"), {"type": "web_search_20250305", "name": "web_search"}]
    generation = read("hi", tools=tools, tool_choice=sent).generation
    assert (generation.tool_choice, generation.parallel_calls) == (choice, parallel)


def test_a_deferred_tool_is_unknown_until_a_result_refers_to_it():
    tools = [tool("Search"), tool("Fetch", defer_loading=True), tool("Other", defer_loading=True)]
    found = result("t1", [{"type": "tool_reference", "tool_name": "Fetch"}])
    talk = ["find one", assistant(use("t1", "Search")), user(found)]
    assert [t.name for t in read("hi", tools=tools).generation.tools] == ["Search"]
    generation = read(*talk, tools=tools).generation
    assert [(t.name, t.listed) for t in generation.tools] == [("Search", True), ("Fetch", False)]
    shown = generation.messages[-1]["content"]
    definition = json.dumps(generation.tools[1].declared())
    assert definition in shown.splitlines()
    assert "Other" not in shown


def test_a_reference_to_nothing_does_not_end_the_turn():
    found = result("t1", [{"type": "tool_reference", "tool_name": "Gone"}, text(" and more")])
    generation = read("x", assistant(use("t1")), user(found), tools=[tool()]).generation
    assert generation.messages[-1]["content"] == "The function Gone is not available. and more"


def test_deferred_tools_are_listed_where_only_anthropics_servers_could_find_them():
    tools = [tool("Fetch", defer_loading=True), {"type": "tool_search_tool_bm25", "name": "find"}]
    assert [(t.name, t.listed) for t in read("hi", tools=tools).generation.tools] == [("Fetch", True)]


def test_a_chosen_deferred_tool_is_listed():
    tools = [tool("A"), tool("Fetch", defer_loading=True)]
    generation = read("hi", tools=tools, tool_choice={"type": "tool", "name": "Fetch"}).generation
    assert [(t.name, t.listed) for t in generation.tools] == [("A", True), ("Fetch", True)]


def test_what_other_servers_need_is_ignored():
    ignored = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "mcp_servers": [{"type": "url"}],
        "betas": ["x"],
        "something": {"new": 1},
        "thread": None,
    }
    assert read("hi", **ignored).generation == read("hi").generation


def test_preserve_thinking():
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert read("hi", context_management=keep).generation.preserve_thinking is True
    assert read("hi", context_management=keep, preserve_thinking=False).generation.preserve_thinking is False
    kwargs = {"preserve_thinking": False}
    chosen = read("hi", context_management=keep, chat_template_kwargs=kwargs).generation
    assert chosen.preserve_thinking is None
    assert chosen.template_kwargs == kwargs
    fewer = {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]}
    assert read("hi", context_management=fewer).generation.preserve_thinking is None


MARK = {"type": "ephemeral"}


def test_cache_marks_change_nothing():
    marked = read(
        user(text("hi", cache_control=MARK)),
        system=[text("s", cache_control={"type": "ephemeral", "ttl": "1h", "scope": "x"})],
        tools=[tool(cache_control=MARK)],
        cache_control={"type": "ephemeral", "ttl": "5m"},
    )
    assert marked == read("hi", system="s", tools=[tool()])


def test_marks_that_do_not_count():
    billing = text("x-anthropic-billing-header: cc_version=1;", cache_control=MARK)
    calls = [{**use(f"t{i}"), "cache_control": MARK} for i in range(6)]
    results = [result(f"t{i}") for i in range(6)]
    system = [billing, *(text(str(i), cache_control=MARK) for i in range(2))]
    read("x", assistant(*calls), user(*results, text("go", cache_control=MARK)), system=system)


@pytest.mark.parametrize(
    ("members", "words", "code"),
    [
        ({"model": ""}, "model must not be empty", None),
        ({"model": 3}, "model must be a string, not 3", None),
        ({"messages": []}, "messages must be a non-empty array", None),
        ({"messages": None}, "messages must be a non-empty array", None),
        ({"messages": ["hi"]}, r"messages\[0\] must be an object", None),
        ({"messages": [{"role": "tool", "content": "x"}]}, "user, assistant or system, not 'tool'", None),
        ({"messages": [{"role": "user"}]}, "content must be a string or an array of blocks, not null", None),
        ({"messages": [user({"text": "x"})]}, r"content\[0\].type must be a string", None),
        ({"messages": [user(text(3))]}, r"content\[0\].text must be a string, not 3", None),
        ({"messages": [user(use("t"))]}, "tool_use, which only assistant messages", None),
        ({"max_tokens": 0}, "max_tokens is 0", "cache_prewarm_not_supported"),
        ({"max_tokens": -1}, "max_tokens must be a whole number of at least 0, not -1", None),
        ({"max_tokens": 1.5}, "max_tokens .*, not 1.5", None),
        ({"max_tokens": True}, "max_tokens .*, not true", None),
        ({"temperature": 1.5}, "temperature must be a number between 0 and 1, not 1.5", None),
        ({"temperature": 10**400}, "temperature must be a number between 0 and 1, not 1000", None),
        ({"top_p": "1"}, "top_p must be a number .* not '1'", None),
        ({"top_k": 21}, "top_k must be a whole number between 0 and 20, not 21", None),
        ({"stream": "yes"}, "stream must be true or false, not 'yes'", None),
        ({"stop_sequences": ["a", ""]}, "an array of non-empty strings", None),
        ({"stop_sequences": "a"}, "stop_sequences must be an array", None),
        ({"system": [{"type": "text"}]}, r"system\[0\].text must be a string, not null", None),
        ({"tools": {}}, "tools must be an array, not an object", None),
        ({"tools": [{"name": "x"}]}, r"tools\[0\].input_schema is missing", None),
        ({"tools": [tool(""), tool("b")]}, r"tools\[0\].name must have 1 to 128", "invalid_tool_name"),
        ({"tools": [tool("a>b")]}, r"tools\[0\].name must", "invalid_tool_name"),
        ({"tools": [tool("x" * 129)]}, r"tools\[0\].name must", "invalid_tool_name"),
        ({"tools": [tool("a"), tool("a")]}, "'a' a second time", "duplicate_tool_name"),
        ({"tools": [tool(strict="no")]}, r"tools\[0\].strict must be true or false", None),
        ({"tool_choice": {"type": "any"}}, "there is no tool to call", None),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [tool()]}, "'x', which is no tool", None),
        ({"tool_choice": {"type": "maybe"}}, "auto, any, tool, none, not 'maybe'", None),
        ({"thinking": {"type": "enabled"}}, "budget_tokens is missing", None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "at least 1024, not 1023", None),
        ({"thinking": {"type": "hard"}}, "thinking.type is none that this server knows", None),
        ({"thinking": {"type": "disabled", "display": "omitted"}}, "no meaning without thinking", None),
        (
            {"thinking": {"type": "adaptive", "display": 1}},
            "thinking.display must be a string, not 1",
            None,
        ),
        ({"output_config": {"format": {"type": "xml"}}}, "must be one of json_schema, not 'xml'", None),
        ({"output_config": {"format": {"type": "json_schema"}}}, "format.schema is missing", None),
        ({"output_config": {"effort": 3}}, "output_config.effort must be a string", None),
        ({"thread": {"type": "create"}}, "keeps no conversations", "thread_unsupported_request"),
        ({"cache_control": {"type": "forever"}}, "must be ephemeral", "invalid_cache_control"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "must be 5m or 1h", "invalid_cache_control"),
        (
            {
                "messages": [user(text("x", cache_control={"type": "ephemeral", "ttl": "1h"}))],
                "cache_control": MARK,
            },
            "asks for 5m, the last block for 1h",
            "conflicting_cache_ttl",
        ),
        (
            {"messages": [user(*(text("x", cache_control=MARK) for _ in range(5)))]},
            "marks 5 places",
            "too_many_cache_breakpoints",
        ),
        (
            {
                "messages": [user(*(text("x", cache_control=MARK) for _ in range(4)), text("y"))],
                "cache_control": MARK,
            },
            "marks 5 places",
            "too_many_cache_breakpoints",
        ),
        (
            {
                "messages": [
                    user(text("x")),
                    assistant({"type": "thinking", "thinking": "t", "cache_control": MARK}, text("y")),
                    user(text("z")),
                ]
            },
            "can't mark a block of thinking",
            "invalid_cache_control",
        ),
    ],
)
def test_what_is_refused(members, words, code):
    with pytest.raises(ApiError, match=words) as caught:
        read_request({**body("hi"), **members}, TERMS)
    assert caught.value.status == 400
    assert caught.value.code == code
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_a_body_that_is_no_object(value):
    with pytest.raises(ApiError, match="The request body must be an object"):
        read_request(value, TERMS)
