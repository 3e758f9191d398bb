"""The interactive chat on scripted input, once with a model."""

import builtins
import re
import sys

import pytest

from ninfer.cli.chat import Chat, read_message
from ninfer.cli.main import main
from ninfer.errors import CapacityError


def script(*lines: str | BaseException):
    feed = iter(lines)

    def read_line(_prompt: str) -> str:
        line = next(feed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    return read_line


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hello"], "hello"),
        (["a\\", "b\\", "c"], "a\nb\nc"),
        (['"""', "x", "", "y\\", '"""'], "x\n\ny\\"),
        ([""], ""),
    ],
)
def test_messages_of_one_and_several_lines(lines, message):
    assert read_message(script(*lines)) == message


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch):
    """Run a chat on scripted lines; returns the conversations that were answered."""

    def run(*lines: str | BaseException, fail: dict[int, BaseException] | None = None) -> list[list[tuple]]:
        seen: list[list[tuple]] = []

        def answer(messages, attempt) -> dict[str, str]:
            seen.append([(message["role"], message["content"]) for message in messages])
            if attempt:
                seen[-1].append(("attempt", attempt))
            if error := (fail or {}).get(len(seen)):
                raise error
            return {"role": "assistant", "content": f"answer {len(seen)}"}

        monkeypatch.setattr(builtins, "input", lambda prompt="": read_line(prompt))
        read_line = script(*lines)
        assert Chat(answer).run() == 0
        return seen

    return run


def test_history_grows_and_reset_forgets_it(talk):
    seen = talk("one", "", "two", "/reset", "three")
    assert seen == [
        [("user", "one")],
        [("user", "one"), ("assistant", "answer 1"), ("user", "two")],
        [("user", "three")],
    ]


def test_a_system_message_starts_anew_and_can_be_removed(talk):
    seen = talk("one", "/system Be brief.", "two", "/system", "three")
    assert seen[1:] == [[("system", "Be brief."), ("user", "two")], [("user", "three")]]


def test_regenerate_answers_the_last_message_again_with_another_seed(talk):
    seen = talk("one", "/regenerate", "/regenerate", "two", "/regenerate")
    assert seen[1:3] == [[("user", "one"), ("attempt", 1)], [("user", "one"), ("attempt", 2)]]
    assert seen[3] == [("user", "one"), ("assistant", "answer 3"), ("user", "two")]
    assert seen[4] == [*seen[3], ("attempt", 1)]
    assert talk("/regenerate") == []


def test_ctrl_c_at_the_prompt_does_not_leave(talk):
    assert talk(KeyboardInterrupt(), "one") == [[("user", "one")]]


def test_exit_and_unknown_commands(talk, capsys):
    assert talk("/nope", "/help", "/exit", "never") == []
    err = capsys.readouterr().err
    assert "Unknown command /nope" in err
    assert "/regenerate" in err


@pytest.mark.parametrize(
    ("error", "words"),
    [(CapacityError("the context is full"), "error: the context is full"), (KeyboardInterrupt(), "")],
)
def test_without_an_answer_the_conversation_stays_as_it_was(talk, capsys, error, words):
    """A refused message, a second Ctrl-C: the program goes on, also after /regenerate."""
    seen = talk("one", "two", "/regenerate", "three", fail={2: error, 3: error})
    assert seen[2] == [("user", "one"), ("attempt", 1)]
    assert seen[3] == [("user", "one"), ("assistant", "answer 1"), ("user", "three")]
    err = capsys.readouterr().err
    assert words in err
    assert "The conversation stays as it was; /reset starts a new one." in err


def test_prompts_stay_off_a_redirected_answer(talk, capsys):
    talk("one")
    out, err = capsys.readouterr()
    assert out == ""
    assert "> " in err


def test_a_full_context_is_said_and_does_not_end_the_chat(tiny, monkeypatch, capsys):
    message = "word " * 20
    assert main([str(tiny), "--prompt", message, "--no-thinking", "--max-new", "1"]) == 0
    [tokens] = re.findall(r"prompt tokens +(\d+)", capsys.readouterr().err)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    read_line = script(message, "more", "/reset", "Hi")
    monkeypatch.setattr(builtins, "input", lambda prompt="": read_line(prompt))
    assert main([str(tiny), "--no-thinking", "--max-context", tokens]) == 0
    full, _, rest = capsys.readouterr().err.partition("error: the prompt has")
    assert f"context {tokens} of {tokens}, context-capacity]" in full
    assert f"The context of {tokens} tokens is full; /reset starts a new conversation" in full
    assert "The conversation stays as it was; /reset starts a new one." in rest
    assert re.search(r"A new conversation\.\n> \[\d+ tokens, .* of \d+, [a-z-]+\]", rest)


def test_a_second_turn_tells_what_it_reused(tiny, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    read_line = script("Hi", "More", "/regenerate")
    monkeypatch.setattr(builtins, "input", lambda prompt="": read_line(prompt))
    assert main([str(tiny), "--no-thinking", "--max-new", "4", "--threads", "1"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.endswith("output-limit]")]
    assert len(lines) == 3
    assert "reused" not in lines[0]
    assert all(re.search(r" tok/s, reused [1-9]\d*, context ", line) for line in lines[1:])
