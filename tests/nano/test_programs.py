"""The `ninfer` command line on the shipped model: what a newcomer sees first."""

import io
import json
import sys
from pathlib import Path

import pytest

from bench.tasks.task import Reply
from ninfer.cli.main import main

from .asking import NANO, held_out


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    code = main([str(NANO), "--threads", "1", "--greedy", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_demo_answers_a_sum(capsys: pytest.CaptureFixture[str]) -> None:
    """The thoughts and the report go to stderr."""
    code, out, err = run(capsys, "--prompt", "What is 47 + 38?", "--max-new", 200)
    assert (code, out) == (0, "85\n")
    assert "ones: 7+8=15, carry 1, so 5\ntens: 4+3+1=8, so 85" in err
    assert "stop-token" in err


def test_a_conversation_with_tools_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    task = held_out("tool_result", 0)
    file = tmp_path / "messages.json"
    file.write_text(json.dumps({"messages": task.messages, "tools": task.tools}))
    code, out, _ = run(capsys, "--messages", file, "--no-thinking", "--log-level", "error")
    assert code == 0
    assert task.check(Reply(out))


def test_a_question_from_a_pipe_with_quantized_kv(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = held_out("kv512", 2)
    [message] = task.messages
    piped = io.TextIOWrapper(io.BytesIO(message["content"].encode()), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", piped)
    code, out, _ = run(capsys, "--no-thinking", "--kv-dtype", "int8", "--log-level", "error")
    assert (code, out) == (0, task.answer["content"] + "\n")


def test_a_stop_string(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--prompt", "What is 47 + 38?", "--no-thinking", "--stop", "5")
    assert (code, out) == (0, "8\n")
    assert "stop-string" in err
