"""The interactive chat on scripted input."""

import builtins

import pytest

from ninfer.cli.chat import Chat, read_message
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

    def run(*lines: str | BaseException, fail: int | None = None) -> list[list[tuple[str, str]]]:
        seen: list[list[tuple[str, str]]] = []

        def answer(messages) -> str:
            seen.append([(message["role"], message["content"]) for message in messages])
            if fail == len(seen):
                raise CapacityError("the context is full")
            return f"answer {len(seen)}"

        monkeypatch.setattr(builtins, "input", script(*lines))
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


def test_regenerate_answers_the_last_message_again(talk):
    assert talk("one", "/regenerate")[1] == [("user", "one")]
    assert talk("/regenerate") == []


def test_ctrl_c_at_the_prompt_does_not_leave(talk):
    assert talk(KeyboardInterrupt(), "one") == [[("user", "one")]]


def test_exit_and_unknown_commands(talk, capsys):
    assert talk("/nope", "/help", "/exit", "never") == []
    err = capsys.readouterr().err
    assert "Unknown command /nope" in err
    assert "/regenerate" in err


def test_a_refused_message_is_not_kept(talk, capsys):
    seen = talk("one", "two", "three", fail=2)
    assert seen[2] == [("user", "one"), ("assistant", "answer 1"), ("user", "three")]
    assert "error: the context is full" in capsys.readouterr().err
