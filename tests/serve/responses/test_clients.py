"""Every recorded request of a released client gets a valid answer."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ninfer.serve.responses.request import read_create
from ninfer.serve.responses.store import Store
from tests.serve.fakes import FakeLink, make_server, says, thinks
from tests.serve.responses.support import check_response, checked_events, client, recorded

pytestmark = pytest.mark.anyio

RECORDED = dict(recorded("codex", "openai-python", "opencode"))
MODELS = ("gpt-5.5", "gpt-5.6-luna")


def read(name: str) -> Any:
    return read_create(RECORDED[name]["body"], Store(1, 1)).generation


def test_there_are_recorded_requests() -> None:
    assert len(RECORDED) >= 22


@pytest.mark.parametrize("name", RECORDED)
async def test_a_recorded_request_is_answered(name: str) -> None:
    request = RECORDED[name]
    link = FakeLink(says(thinks("Let me see."), "done."), max_context=100_000)
    server = make_server(link, model_id="stub-model", model_aliases=MODELS)
    asked = copy.deepcopy(request["body"])
    chained = asked.get("previous_response_id")
    async with client(server) as http:
        answer = await http.post("/responses", json=asked, headers=_headers(request))
        if chained:
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "response_not_found"
            first = (await http.post("/responses", json={"model": "stub-model", "input": "hi"})).json()
            asked["previous_response_id"] = first["id"]
            answer = await http.post("/responses", json=asked)
    assert answer.status_code == 200, answer.text
    if asked.get("stream"):
        response = checked_events(answer.content)[-1]["response"]
    else:
        response = check_response(answer.json())
    assert response["status"] == "completed"
    assert response["model"] == asked["model"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    sealed = "encrypted_content" in response["output"][0]
    assert sealed is ("reasoning.encrypted_content" in asked.get("include", ()))


def _headers(request: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value in request["headers"].items() if name != "accept-encoding"}


def test_codex_sees_its_functions_and_no_hosted_tool() -> None:
    tools = [tool.name for tool in read("codex normal 1").tools]
    assert tools[:4] == ["exec_command", "write_stdin", "request_user_input", "view_image"]
    assert "multi_agent_v1__spawn_agent" in tools
    assert "web_search" not in tools
    assert "apply_patch" in [tool.name for tool in read("codex gpt55 1").tools]
    assert "tool_search" in [tool.name for tool in read("codex gpt55 1").tools]


def test_codex_in_code_mode_declares_its_tools_in_the_input() -> None:
    generation = read("codex codemode 2")
    assert [(tool.name, tool.listed) for tool in generation.tools] == [
        ("exec", True), ("wait", True), ("request_user_input", True),
    ]  # fmt: skip
    assert generation.preserve_thinking is True
    assert not generation.parallel_calls
    *_, call, result = generation.messages
    assert call["tool_calls"][0]["function"]["name"] == "exec"
    assert list(call["tool_calls"][0]["function"]["arguments"]) == ["input"]
    assert result["content"].endswith(".\n..\n")


def test_codex_history() -> None:
    *_, call, result = read("codex m-badargs 1").messages
    assert call["tool_calls"][0]["function"]["arguments"] == {"arguments": '{"cmd": "ls -a'}
    assert result["role"] == "tool"
    *_, image = read("codex image 1").messages
    assert image["content"] == "[image omitted: this model has no vision]"
    *_, call, first, second = read("codex parallel 1").messages
    assert [c["id"] for c in call["tool_calls"]] == [first["tool_call_id"], second["tool_call_id"]]


def test_a_turn_begins_with_the_one_before() -> None:
    """What Codex sends after a call repeats the request before it, so that the prefix can be reused."""
    first, second = read("codex normal 1"), read("codex normal 2")
    assert second.messages[: len(first.messages)] == first.messages
    assert second.tools == first.tools
    assert [m["role"] for m in first.messages] == ["system", "user", "user"]
    assert [m["role"] for m in second.messages[len(first.messages) :]] == ["assistant", "tool"]


def test_schemas_are_enforced() -> None:
    assert read("codex schema 1").response_format.schema["required"] == ["title"]
    assert read("openai-python sdk 15").response_format.schema["required"] == ["title", "count"]
