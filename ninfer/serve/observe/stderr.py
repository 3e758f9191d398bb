"""Lines on stderr: time and severity before, no stranger's text within, and a passing line on terminals."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Self

from ninfer.errors import OptionError
from ninfer.serve.observe.text import duration, groups, printable

TRACE = 5
LEVELS = {
    "trace": TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "off": logging.CRITICAL + 10,
}
_ERASE = "\r\x1b[K"


def configure(level: str = "info") -> None:
    """Make the process log in our form from `level` on (a key of LEVELS); may be called again.

    Run uvicorn with `log_config=None, access_log=False`: its errors then come through here.
    """
    if level not in LEVELS:
        raise OptionError(f"--log-level must be one of {', '.join(LEVELS)}, not {level!r:.80}")
    logging.addLevelName(TRACE, "TRACE")
    root = logging.getLogger()
    if HANDLER not in root.handlers:
        root.addHandler(HANDLER)
    HANDLER.setLevel(LEVELS[level])
    logging.getLogger("ninfer").setLevel(LEVELS[level])
    root.setLevel(max(LEVELS[level], logging.WARNING))
    # Its warnings are about what clients send: one that asks for a WebSocket first gets two each time.
    verbose = LEVELS[level] <= logging.DEBUG
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING if verbose else logging.ERROR)
    logging.getLogger("uvicorn.access").disabled = True


class Formatter(logging.Formatter):
    """`2026-05-04 10:11:12.345  INFO  message`, local time.

    Of other libraries' messages only the first line is kept, and of exceptions their kinds and places: what
    else they say may quote a request.
    """

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if not record.name.startswith("ninfer"):
            message = f"{record.name}: {message.strip().partition(chr(10))[0]}"
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        head = f"{when}.{int(record.msecs):03d}  {record.levelname}  {printable(message)}"
        error = record.exc_info[1] if record.exc_info else None
        return head if error is None else "\n".join([head, *places(error)])


def places(error: BaseException) -> list[str]:
    """Kinds of an exception and its causes, and where they were raised, without their messages."""
    lines, seen = [], set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        lines.append(f"  {type(current).__qualname__}")
        trace = current.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            module = frame.f_globals.get("__name__", "?")
            lines.append(f"    at {module}.{frame.f_code.co_qualname}:{trace.tb_lineno}")
            trace = trace.tb_next
        if current.__cause__ is not None:
            pending.append(current.__cause__)
        elif not current.__suppress_context__:
            pending.append(current.__context__)
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
    return lines


class StderrHandler(logging.Handler):
    """Writes lines to whatever `sys.stderr` is; `show` puts a passing line below them on a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(Formatter())
        self._shown = ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # a wrong argument in a log call must not end a request
            line = f"{record.levelname}  a log message could not be written"
        with self._guard:
            self._put((_ERASE if self._shown else "") + line + "\n" + self._shown)

    def show(self, line: str) -> None:
        """Replace the passing line; an empty one ends it. Nothing where stderr is no terminal."""
        if not _terminal():
            return
        with self._guard:
            self._put(_ERASE + line)
            self._shown = line

    def _put(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (AttributeError, OSError, ValueError):
            pass  # stderr is closed or gone; there is nowhere to say so

    _guard = Lock()


HANDLER = StderrHandler()
"""The process's only one, so that two servers in one process (as in tests) don't log twice."""


def _terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


class Progress:
    """While the block runs: the time since its beginning, five times a second on a terminal, else every ten
    seconds as a line of the log."""

    def __init__(
        self, name: str, logger: logging.Logger, *, refresh: float = 0.2, lines: float = 10.0
    ) -> None:
        self._name, self._logger = name, logger
        self._refresh, self._lines = refresh, lines
        self._detail = ""
        self._ended = Event()
        self._thread = Thread(target=self._work, name="progress", daemon=True)

    def update(self, stage: str, done: int = 0, total: int = 0) -> None:
        """What is being done, and how much of it."""
        self._detail = f"{stage} {100 * done / total:.0f}%" if total else stage

    def __enter__(self) -> Self:
        self._begin = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        if not self._logger.isEnabledFor(logging.INFO):
            return
        if _terminal():
            self._repeat(self._refresh, HANDLER.show)
            HANDLER.show("")
        else:
            self._repeat(self._lines, self._logger.info)

    def _repeat(self, seconds: float, say: Callable[[str], None]) -> None:
        while not self._ended.wait(seconds):
            say(groups(self._name, self._detail, duration(time.monotonic() - self._begin)))
