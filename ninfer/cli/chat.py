"""The interactive chat: history, multi-line input, /commands; Ctrl-C stops an answer, not the program."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from ninfer.cli.common import printable
from ninfer.errors import NInferError

HELP = """\
/reset         forget the conversation (the system message stays)
/system TEXT   set the system message and start anew; without TEXT, remove it
/regenerate    drop the last answer and answer again
/help          this list
/exit          leave (also Ctrl-D)
End a line with \\ to continue it on the next one; \"\"\" alone on a line opens and closes a block of lines.
Ctrl-C stops an answer, twice drops it; at the prompt it clears the input."""

Answer = Callable[[list[dict[str, Any]], int], dict[str, Any]]


class Chat:
    """A conversation on a terminal.

    `answer(messages, attempt)` streams one reply and returns it as a message; `attempt` counts the replies to
    the same messages.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._system: str | None = None
        self._turns: list[dict[str, Any]] = []
        self._attempt = 0

    def run(self) -> int:
        """Read and answer until the input ends; returns the exit code."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        print("Type a message; /help lists the commands, Ctrl-D leaves.", file=sys.stderr)
        while True:
            try:
                if not self._take(read_message(_read_line)):
                    return 0
            except KeyboardInterrupt:
                print(file=sys.stderr)
            except EOFError:
                print(file=sys.stderr)
                return 0

    def _take(self, text: str) -> bool:
        """Carry out a /command or answer a message; returns False to leave."""
        if text.startswith("/") and "\n" not in text:
            return self._command(text)
        if text.strip():
            self._attempt = 0
            self._reply([*self._turns, {"role": "user", "content": text}])
        return True

    def _command(self, text: str) -> bool:
        name, _, argument = text.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self._turns.clear()
            print("A new conversation.", file=sys.stderr)
        elif name == "/system":
            self._system = argument.strip() or None
            self._turns.clear()
            state = "this system message" if self._system else "no system message"
            print(f"A new conversation with {state}.", file=sys.stderr)
        elif name == "/regenerate":
            if self._turns:
                self._attempt += 1
                self._reply(self._turns[:-1])
            else:
                print("There is nothing to answer yet.", file=sys.stderr)
        elif name == "/help":
            print(HELP, file=sys.stderr)
        else:
            print(f"Unknown command {name}; /help lists the commands.", file=sys.stderr)
        return True

    def _reply(self, turns: list[dict[str, Any]]) -> None:
        """Answer the user's turn that stands last; without an answer the conversation stays as it was."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        try:
            self._turns = [*turns, self._answer([*system, *turns], self._attempt)]
        except (NInferError, KeyboardInterrupt) as error:
            print(f"error: {printable(str(error))}" if str(error) else "", file=sys.stderr)
            print("The conversation stays as it was; /reset starts a new one.", file=sys.stderr)


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
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    return input()
