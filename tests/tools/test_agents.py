"""tools/agents without npm, agents and server: the script, the forced session, the relay, what is judged."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.api.loading import load_frontend, opened
from ninfer.artifact import Artifact
from ninfer.events import Channel, FinishReason
from ninfer.frontend import Frontend
from tools.agents import script
from tools.agents.check import judge, judge_http, judge_log, read_events
from tools.agents.clients import CLIENTS, Client, Heard
from tools.agents.forced import scripted_session
from tools.agents.longer import longer
from tools.agents.relay import Exchange, Relay

NANO = Path(__file__).parents[2] / "models/ninfer-nano.ninfer"
SHELL = {
    "type": "function",
    "function": {
        "name": "run_shell_command",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string"},
                "is_background": {"type": "boolean"},
                "description": {"type": "string"},
            },
            "required": ["command", "is_background"],
        },
    },
}
OTHER = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "run_shell_command", "arguments": {"command": "ls"}},
        }
    ],
}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "List the files."}]
RESULT = {"role": "tool", "content": "notes.txt\nword-1a2b\nword-3c\npassword-4", "tool_call_id": "call_1"}
CALL = (
    "<tool_call>\n<function=run_shell_command>\n<parameter=command>\nls -1; cat notes.txt\n</parameter>\n"
    "<parameter=is_background>\nfalse\n</parameter>\n</function>\n</tool_call>"
)


@pytest.fixture(scope="module")
def frontend() -> Frontend:
    with opened(NANO, None, None) as artifact:
        return load_frontend(artifact)


def said(frontend: Frontend, messages: list[dict[str, Any]], **options: Any) -> tuple[str, str]:
    """Reasoning and the rest of the answer that a forced session allows, its masks followed."""
    prompt = frontend.render(messages, **options)
    session = scripted_session(frontend, prompt, frontend.session(prompt))
    assert session.constrained
    texts = dict.fromkeys(Channel, "")
    masks = np.zeros((1, -(-frontend.public_tokens // 32)), np.int32)
    while session.finish is None:
        masks[:] = -1
        assert session.fill_masks((), masks) == 1
        allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
        assert len(allowed) == 1
        for delta in session.accept((int(allowed[0]),)).deltas:
            texts[delta.channel] += delta.text
    assert session.finish is FinishReason.STOP_TOKEN
    return texts[Channel.REASONING], "".join(t for c, t in texts.items() if c is not Channel.REASONING)


def test_script_calls_the_shell_when_asked(frontend: Frontend) -> None:
    reasoning, rest = said(frontend, ASKED, tools=[OTHER, SHELL], thinking=True)
    assert reasoning.strip() == script.THOUGHT
    assert rest == CALL


def test_script_writes_code_where_only_code_is_taken(frontend: Frontend) -> None:
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    tool = {"type": "function", "function": {"name": "exec", "parameters": parameters}}
    _, rest = said(frontend, ASKED, tools=[tool])
    code = 'const r = await tools.exec_command({cmd: "ls -1; cat notes.txt"}); text(r.output);'
    assert rest == CALL.partition("<parameter")[0].replace("run_shell_command", "exec") + (
        f"<parameter=input>\n{code}\n</parameter>\n</function>\n</tool_call>"
    )


def test_script_says_the_words_after_the_result(frontend: Frontend) -> None:
    reasoning, rest = said(frontend, [*ASKED, CALLED, RESULT], tools=[SHELL], thinking=False)
    assert not reasoning
    assert rest == "done. It says word-1a2b, word-3c."


def test_script_calls_again_in_the_next_turn(frontend: Frontend) -> None:
    turn = [*ASKED, CALLED, RESULT, {"role": "assistant", "content": "done."}]
    _, rest = said(frontend, [*turn, {"role": "user", "content": "And now?"}], tools=[SHELL])
    assert rest == CALL
    _, rest = said(frontend, [*turn, {"role": "user", "content": "And now?"}, CALLED, RESULT], tools=[SHELL])
    assert rest == "done. It says word-1a2b, word-3c."


@pytest.mark.parametrize("tools", [None, [OTHER]])
def test_script_without_a_shell_is_a_title(frontend: Frontend, tools: list[Any] | None) -> None:
    assert said(frontend, ASKED, tools=tools)[1] == script.WITHOUT_TOOLS


def test_forced_session_masks_drafts_that_follow_the_script(frontend: Frontend) -> None:
    prompt = frontend.render(ASKED, thinking=False)
    session = scripted_session(frontend, prompt, frontend.session(prompt))
    tokens = frontend.encode(script.WITHOUT_TOOLS)
    masks = np.zeros((3, -(-frontend.public_tokens // 32)), np.int32)
    assert session.fill_masks(tokens[:2], masks) == 3
    assert session.fill_masks((tokens[0], tokens[0]), masks) == 2
    assert session.fill_masks((tokens[1], tokens[1]), masks) == 1
    assert masks.view(np.uint32)[0, tokens[0] // 32] == 1 << tokens[0] % 32


def test_forced_session_goes_on_behind_a_forced_closer(frontend: Frontend) -> None:
    prompt = frontend.render(ASKED, thinking=True)
    session = scripted_session(frontend, prompt, frontend.session(prompt, thinking_budget=1))
    masks = np.zeros((1, -(-frontend.public_tokens // 32)), np.int32)
    session.accept(frontend.encode(script.THOUGHT)[:1])
    session.commit_closer()
    assert session.fill_masks((), masks) == 1
    first = frontend.encode(script.WITHOUT_TOOLS)[0]
    assert masks.view(np.uint32)[0, first // 32] == 1 << first % 32


def test_longer_changes_nothing_but_the_positions(tmp_path: Path) -> None:
    copy = longer(NANO, 65536, tmp_path)
    assert longer(NANO, 65536, tmp_path) == copy
    with Artifact.open(NANO) as before, Artifact.open(copy) as after:
        assert after.components["text"].config["max_position_embeddings"] == 65536
        changed = {**after.components["text"].config, "max_position_embeddings": 16384}
        assert changed == before.components["text"].config
        assert after.components["mtp"] == before.components["mtp"]
        assert list(after.objects) == list(before.objects)
        name = list(before.objects)[-1]
        assert np.array_equal(after.object_bytes(name), before.object_bytes(name))


def test_relay_keeps_what_it_passes_on(tmp_path: Path) -> None:
    asked = b"POST /v1/messages HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"
    answered = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                assert connection.recv(100) == asked
                connection.sendall(answered)

        thread = threading.Thread(target=serve)
        thread.start()
        relay = Relay(server.getsockname()[1])
        with socket.create_connection(("127.0.0.1", relay.port)) as client:
            client.sendall(asked)
            assert client.makefile("rb").read() == answered
        thread.join()
        relay.close()
    assert relay.exchanges[0].answers() == [("POST /v1/messages", 429)]
    relay.save(tmp_path)
    assert (tmp_path / "000-received").read_bytes() == answered
    (check,) = judge_http(relay.exchanges)
    assert not check.passed
    assert "429" in check.found


def test_relay_reads_every_message_of_a_connection() -> None:
    sent = (
        b'POST /a HTTP/1.1\r\nContent-Length: 12\r\n\r\n{"a": "b\r\n"}'
        b"HEAD /b HTTP/1.1\r\n\r\n"
        b"POST /c HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        b"GET /d HTTP/1.1\r\n\r\n"
    )
    received = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"1C\r\nHTTP/1.1 999 in the data\r\n\r\n\r\n0\r\n\r\n"
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 20\r\n\r\n"
        b"HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\n{}"
    )
    exchange = Exchange(bytearray(sent), bytearray(received))
    assert exchange.answers() == [("POST /a", 200), ("HEAD /b", 404), ("POST /c", 201), ("GET /d", 0)]
    (check,) = judge_http([exchange])
    assert not check.passed
    assert check.found == "HEAD /b -> 404; GET /d -> no answer"
    assert not judge_http([])[0].passed


EVENTS = {
    "claude-code": """
{"type":"system","subtype":"init"}
{"type":"assistant","message":{"content":[{"type":"tool_use","id":"t","name":"Bash","input":{}}]}}
{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"t","content":"word-1","is_error":false}]}}
{"type":"result","subtype":"success","is_error":false,"result":"done. word-1"}""",
    "codex": """
{"type":"thread.started","thread_id":"t"}
{"type":"item.completed","item":{"type":"error","message":"Model metadata not found."}}
{"type":"item.completed","item":{"type":"command_execution","aggregated_output":"word-1","exit_code":0}}
{"type":"item.completed","item":{"type":"agent_message","text":"done. word-1"}}
{"type":"turn.completed","usage":{}}""",
    "opencode": """
A remark that is no JSON
{"type":"tool_use","part":{"type":"tool","tool":"bash","state":{"status":"completed","output":"word-1"}}}
{"type":"text","part":{"type":"text","text":"done. word-1"}}
{"type":"step_finish","part":{"reason":"stop"}}""",
}
FAILED = {
    "claude-code": '{"type":"result","subtype":"error_during_execution","is_error":true,"result":null}',
    "codex": '{"type":"turn.failed","error":{"message":"stream disconnected"}}',
    "opencode": '{"type":"error","error":{"name":"APIError"}}',
}


@pytest.mark.parametrize(
    "client", [client for client in CLIENTS if client.name in EVENTS], ids=lambda c: c.name
)
def test_events_are_understood(client: Client) -> None:
    heard = client.hear(read_events(EVENTS[client.name]))
    assert heard == Heard(["word-1"], "done. word-1", [])
    assert all(check.passed for check in judge("turn 1", "word-1", 0, heard))
    failed = judge("turn 1", "word-1", 1, client.hear(read_events(FAILED[client.name])))
    assert not any(check.passed for check in failed)


@pytest.mark.parametrize(
    ("code", "heard", "passed"),
    [
        (0, Heard(["word-0"], "done. word-1"), [True, False, True]),
        (0, Heard(["word-1"], "done. word-0"), [True, True, False]),
        (0, Heard(["word-1"], "done. word-1", ["an error"]), [False, True, True]),
        (None, Heard(["word-1"], "done. word-1"), [False, True, True]),
    ],
)
def test_each_fault_of_a_turn_is_seen(code: int | None, heard: Heard, passed: list[bool]) -> None:
    assert [check.passed for check in judge("turn 1", "word-1", code, heard)] == passed


def done(
    prompt: int, cached: int, *, tools: int = 9, calls: int = 0, fallback: str = "none"
) -> dict[str, Any]:
    return {
        "event": "request_done",
        "request": {"tool_count": tools},
        "result": {
            "prompt_tokens": prompt,
            "prefix_cache_hit_tokens": cached,
            "tool_call_count": calls,
            "tool_call_parse": {"fallback_reason": fallback},
        },
    }


SESSION = [
    done(800, 0, tools=0),
    done(10_000, 0, calls=1),
    done(10_100, 9_900),
    done(10_200, 10_000, calls=1),
    done(10_300, 10_100),
]


@pytest.mark.parametrize(
    ("records", "passed"),
    [
        (SESSION, [True, True, True]),
        ([*SESSION, {"event": "request_rejected"}], [False, True, True]),
        ([done(10_000, 0), *SESSION[2:]], [True, False, True]),
        ([*SESSION, done(10, 0, tools=2, fallback="undeclared_tool")], [True, False, True]),
        ([*SESSION[:-1], done(10_300, 64)], [True, True, False]),
        (SESSION[:-1], [True, True, False]),
        ([], [False, False, False]),
    ],
)
def test_each_fault_in_the_log_is_seen(records: list[dict[str, Any]], passed: list[bool]) -> None:
    assert [check.passed for check in judge_log(records, 0.95)] == passed
