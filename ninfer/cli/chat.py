"""The interactive chat: history, multi-line input, /commands; Ctrl-C stops an answer, not the program."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from ninfer.errors import NInferError

HELP = """\
/reset         forget the conversation (the system message stays)
/system TEXT   set the system message and start anew; without TEXT, remove it
/regenerate    drop the last answer and answer again
/help          this list
/exit          leave (also Ctrl-D)
End a line with \\ to continue it on the next one; \"\"\" alone on a line opens and closes a block of lines.
Ctrl-C stops an answer; at the prompt it clears the input."""

Answer = Callable[[list[dict[str, Any]]], str]


class Chat:
    """A conversation on a terminal. `answer(messages)` streams one reply and returns its text."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._system: str | None = None
        self._turns: list[dict[str, Any]] = []

    def run(self) -> int:
        """Read and answer until the input ends; returns the exit code."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        print("Type a message; /help lists the commands, Ctrl-D leaves.", file=sys.stderr)
        while True:
            try:
                text = read_message(_read_line)
            except KeyboardInterrupt:
                print(file=sys.stderr)
                continue
            except EOFError:
                print(file=sys.stderr)
                return 0
            if text.startswith("/") and "\n" not in text:
                if not self._command(text):
                    return 0
            elif text.strip():
                self._turns.append({"role": "user", "content": text})
                self._reply()

    def _command(self, text: str) -> bool:
        """Carry out a /command; returns False to leave."""
        name, _, argument = text.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self._turns.clear()
        elif name == "/system":
            self._system = argument.strip() or None
            self._turns.clear()
        elif name == "/regenerate":
            while self._turns and self._turns[-1]["role"] == "assistant":
                self._turns.pop()
            if self._turns:
                self._reply()
            else:
                print("There is nothing to answer yet.", file=sys.stderr)
        elif name == "/help":
            print(HELP, file=sys.stderr)
        else:
            print(f"Unknown command {name}; /help lists the commands.", file=sys.stderr)
        return True

    def _reply(self) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        try:
            reply = self._answer([*system, *self._turns])
        except NInferError as error:
            print(f"error: {error}", file=sys.stderr)
            print("The last message was not kept; /reset starts a new conversation.", file=sys.stderr)
            self._turns.pop()
            return
        self._turns.append({"role": "assistant", "content": reply})


def read_message(read_line: Callable[[str], str]) -> str:
    """Read one message: a line, lines joined by a trailing backslash, or a block between lines of \"\"\"."""
    line = read_line("> ")
    lines: list[str] = []
    if line.strip() == '"""':
        while (line := read_line(". ")).strip() != '"""':
            lines.append(line)
        return "\n".join(lines)
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = read_line(". ")
    return "\n".join([*lines, line])


def _read_line(prompt: str) -> str:
    return input(prompt)
