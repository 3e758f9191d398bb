"""Console lines as they are meant to be read, with their severities."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from ninfer.api.options import EngineOptions
from ninfer.engine import RuntimeStatistics, Speculation
from ninfer.errors import OptionError
from ninfer.events import FinishReason
from ninfer.serve.calls import Protocol
from ninfer.serve.errors import ApiError, from_ninfer, invalid
from ninfer.serve.observe.console import Console
from ninfer.serve.observe.interval import interval_record
from ninfer.serve.observe.stderr import HANDLER, LEVELS, Progress, configure
from ninfer.serve.observe.text import duration, label, printable, rate, size, unquoted
from ninfer.serve.observer import CallReport
from tests.serve.observe.made import THOUGHT, info, options, outcome, record, statistics

Said = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    """(severity, message) of the lines of one call of a console's method."""
    caplog.set_level(logging.DEBUG)

    def say(use: Callable[[Console], None], **changes: Any) -> list[tuple[str, str]]:
        caplog.clear()
        use(Console(options(**changes)))
        return [(r.levelname, r.getMessage()) for r in caplog.records]

    return say


def test_the_life_of_a_server(said: Said) -> None:
    assert said(lambda c: c.starting()) == [("INFO", "starting engine | nano.ninfer")]
    assert said(lambda c: c.ready(info())) == [
        ("INFO", "engine ready | ninfer-nano | 2.34 s | weights 11.0 MiB | cpu, 2 threads"),
        (
            "INFO",
            "capacity | KV 8,192 tokens, int8, explicit | pages 128/128 | runtime 145.0 MiB | free 3.9 GiB",
        ),
        ("INFO", "context cache | 4 active + 6 cached device states"),
    ]
    plain = info(slots=0, snapshots=0, threads=1, memory_available=None)
    auto = EngineOptions(kv_capacity="auto", prefix_reuse=False)
    assert said(lambda c: c.ready(plain), engine=auto) == [
        ("INFO", "engine ready | ninfer-nano | 2.34 s | weights 11.0 MiB | cpu, 1 thread"),
        ("INFO", "capacity | KV 8,192 tokens, int8, auto | pages 128/128 | runtime 135.0 MiB"),
        ("INFO", "context cache | root only"),
    ]
    assert said(lambda c: c.ready(plain))[-1] == ("INFO", "context cache | any token")
    assert said(lambda c: c.warmed_up(0.2)) == [("DEBUG", "warm-up | 200 ms")]
    assert said(lambda c: c.warmed_up(0.25)) == [("INFO", "warm-up | 250 ms")]
    assert said(lambda c: c.unloaded(300)) == [
        ("INFO", "engine unloaded | idle for 5m 00s | the next request loads it")
    ]
    reason = f"the engine process ended unexpectedly ({'x' * 40}); start the server again"
    assert said(lambda c: c.engine_failed(reason)) == [("CRITICAL", f"engine failed | {reason}")]
    assert said(lambda c: c.draining(1)) == [("INFO", "stopping | 1 request to finish")]
    assert said(lambda c: c.stopped()) == [("INFO", "server stopped")]


def test_listening(said: Said) -> None:
    assert said(lambda c: c.listening("127.0.0.1", 8080, "nano")) == [
        ("INFO", "listening on http://127.0.0.1:8080 | model nano | auth disabled"),
    ]
    assert said(lambda c: c.listening("::1", 1, "nano"), api_key="sk-hush") == [
        ("INFO", "listening on http://[::1]:1 | model nano | auth bearer")
    ]


def test_an_open_server_without_a_key_is_warned_about(said: Said) -> None:
    warning = (
        "WARNING",
        "anybody who reaches 0.0.0.0 can use this server | set --api-key or --host 127.0.0.1",
    )
    assert warning in said(lambda c: c.listening("0.0.0.0", 8080, "nano"))
    assert warning not in said(lambda c: c.listening("0.0.0.0", 8080, "nano"), api_key="k")
    for loopback in ("127.0.0.1", "127.8.0.1", "localhost", "::1"):
        assert len(said(lambda c, host=loopback: c.listening(host, 8080, "nano"))) == 1


def test_a_request_begins(said: Said) -> None:
    assert said(lambda c: c.started(record())) == [
        ("INFO", "req#7 started | openai-chat stream | 1 message | max output 32,000 | thinking off")
    ]
    asked = record(
        12,
        protocol=Protocol.MESSAGES,
        stream=False,
        messages=[{}, {}],
        n=2,
        thinking=True,
        effort="high",
        thinking_budget=2048,
    )
    assert said(lambda c: c.started(asked)) == [
        (
            "INFO",
            "req#12 started | anthropic non-stream | 2 messages | 2 answers | max output 32,000 | "
            "thinking on (effort high, budget 2,048)",
        )
    ]
    thinks = record(protocol=Protocol.RESPONSES, thinking=True)
    assert said(lambda c: c.started(thinks))[0][1].endswith("openai-responses stream | 1 message | max "
                                                            "output 32,000 | thinking on")  # fmt: skip


def test_a_request_is_done(said: Said) -> None:
    assert said(lambda c: c.done(record(), outcome())) == [
        (
            "INFO",
            "req#7 done | openai-chat | stop token | prompt 100 | output 41 | "
            "cache 64 (64.0%, private_endpoint) | TTFT 60 ms | total 460 ms | "
            "prefill 1,000 tok/s | decode 100.0 tok/s",
        )
    ]
    slow = statistics(
        queue_seconds=1.5,
        reused_tokens=0,
        reuse_path="root",
        speculation=Speculation(3, rounds=30, drafted=90, accepted=60),
        reasoning_tokens=12,
    )
    assert said(lambda c: c.done(record(), outcome(slow, calls=2))) == [
        (
            "INFO",
            "req#7 done | openai-chat | tool calls 2 | prompt 100 | output 41 | cache 0 (0.0%, root) | "
            "TTFT 60 ms | total 460 ms | queue 1.50 s | prefill 2,778 tok/s | decode 100.0 tok/s | "
            "drafts accepted 60/90 (66.7%) | thinking 12",
        )
    ]
    budgeted = record(thinking=True, thinking_budget=32)
    assert said(lambda c: c.done(budgeted, outcome(THOUGHT)))[0][1].endswith(" | thinking 32/32")
    gone = statistics(
        finish_reason=FinishReason.CANCELLED,
        generated_tokens=0,
        first_token_seconds=None,
        prefill_seconds=0.0,
        decode_seconds=0.0,
    )
    assert said(lambda c: c.done(record(), outcome(gone))) == [
        (
            "INFO",
            "req#7 done | openai-chat | cancelled | prompt 100 | output 0 | "
            "cache 64 (64.0%, private_endpoint) | TTFT - | total 460 ms | prefill - | decode -",
        )
    ]


def test_rates_are_those_of_the_longest_answer(said: Said) -> None:
    longer = statistics(reused_tokens=90, prefill_seconds=0.1, decode_seconds=4.0, total_seconds=5.0)
    [(_, line)] = said(lambda c: c.done(record(n=2), outcome(statistics(), longer)))
    assert line.endswith("output 82 | cache 64 (64.0%, private_endpoint) | TTFT 60 ms | total 5.01 s | "
                         "prefill 100.0 tok/s | decode 10.0 tok/s")  # fmt: skip


def test_markup_that_stays_text_is_a_warning(said: Said) -> None:
    report = CallReport(marker_seen=True, fallback="undeclared_tool")
    first, _ = said(lambda c: c.done(record(), outcome(report=report)))
    assert first == ("WARNING", "req#7 tool markup kept as text | undeclared_tool")


GONE = ApiError(499, "gone", type="request_cancelled", code="client_disconnected")
FULL = ApiError(429, "full", type="rate_limit_error", code="server_overloaded")
LATE = ApiError(503, "late", type="server_error", code="request_queue_timeout")
DEAD = ApiError(503, "dead", type="server_error", code="service_unavailable")
FETCH = ApiError(502, "fetch", type="server_error", code="media_fetch_failed")
DEFECT = ApiError(500, "defect", type="internal_error", code="internal_error")


@pytest.mark.parametrize(
    ("error", "severity", "words"),
    [
        (invalid("Bad.", "messages[0].role"), "INFO", "rejected during prepare | openai-chat stream | "
         "400 invalid_request_error | messages[0].role"),
        (invalid("Bad.", "top_k", "too_large"), "INFO", "rejected during prepare | openai-chat stream | "
         "400 too_large | top_k"),
        (GONE, "INFO", "cancelled during prepare | openai-chat stream | 499 client_disconnected"),
        (FULL, "WARNING", "failed during prepare | openai-chat stream | 429 server_overloaded"),
        (LATE, "WARNING", "failed during prepare | openai-chat stream | 503 request_queue_timeout"),
        (DEAD, "WARNING", "failed during prepare | openai-chat stream | 503 service_unavailable"),
        (FETCH, "WARNING", "failed during prepare | openai-chat stream | 502 media_fetch_failed"),
        (DEFECT, "ERROR", "failed during prepare | openai-chat stream | 500 internal_error"),
    ],
)  # fmt: skip
def test_severity_of_what_goes_wrong(said: Said, error: ApiError, severity: str, words: str) -> None:
    assert said(lambda c: c.rejected(record(), error)) == [(severity, f"req#7 {words}")]
    after = words.replace(" during prepare", "").replace("rejected", "failed")
    assert said(lambda c: c.failed(record(), error)) == [(severity, f"req#7 {after}")]


def test_the_messages_api_s_own_status_is_told(said: Said) -> None:
    asked = record(protocol=Protocol.MESSAGES, stream=False)
    assert said(lambda c: c.rejected(asked, FULL)) == [
        ("WARNING", "req#7 failed during prepare | anthropic non-stream | 529 server_overloaded")
    ]


class ClientDisconnect(Exception):
    """As Starlette calls it."""


@pytest.mark.parametrize(
    ("error", "severity", "name"),
    [
        (BrokenPipeError("x"), "INFO", "BrokenPipeError"),
        (ClientDisconnect(), "INFO", "ClientDisconnect"),
        (asyncio.CancelledError(), "INFO", "CancelledError"),
        (GONE, "INFO", "499 client_disconnected"),
        (DEAD, "WARNING", "503 service_unavailable"),
        (ValueError("my secret"), "ERROR", "ValueError"),
        (DEFECT, "ERROR", "500 internal_error"),
    ],
)
def test_a_response_that_fails(said: Said, error: BaseException, severity: str, name: str) -> None:
    assert said(lambda c: c.response_failed(record(), "stream", error)) == [
        (severity, f"req#7 response failed during stream | {name}")
    ]


def test_throughput(said: Said) -> None:
    now = RuntimeStatistics(
        prefill_tokens=12_345, decode_tokens=500, rounds=250, row_rounds=500, running=3, prefilling=1,
        decode_ready=2, waiting=2, decode_device_seconds=1.9, program_submit=0.1, engine_boundary=0.1,
    )  # fmt: skip
    interval = interval_record(RuntimeStatistics(), now, 5.0, 130, None)
    assert said(lambda c: c.throughput(interval)) == [
        (
            "INFO",
            "throughput | 5.0s | prefill 2,469 tok/s | decode 100.0 tok/s | "
            "running 3 (prefill 1, decode-ready 2) | waiting 2 | batch 2.0 | host 9.5% (200 ms)",
        )
    ]
    quiet = interval_record(RuntimeStatistics(), RuntimeStatistics(waiting=1), 5.0, 130, None)
    assert said(lambda c: c.throughput(quiet)) == [
        (
            "INFO",
            "throughput | 5.0s | prefill - | decode - | running 0 (prefill 0, decode-ready 0) | waiting 1 | "
            "host 0.0% (0 µs)",
        )
    ]


# The form of lines.


def test_service_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info")
    Console(options()).stopped()
    line = capsys.readouterr().err
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.\d{3}  INFO  server stopped\n", line)
    assert found, line
    said_at = time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M:%S"))
    assert abs(time.time() - said_at) < 60  # local time


@pytest.mark.parametrize("level", list(LEVELS))
def test_levels(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure(level)
    configure(level)  # once more changes nothing
    for number in (5, 10, 20, 30, 40, 50):
        logging.getLogger("ninfer.serve").log(number, "x")
    lines = capsys.readouterr().err.splitlines()
    names = ["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    expected = [] if level == "off" else names[names.index(level.upper()) :]
    assert [line.split("  ")[1] for line in lines] == expected


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(OptionError, match="--log-level must be one of trace, debug"):
        configure("loud")


def test_other_libraries_warn_in_our_form_and_say_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info")
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.access").error("GET /v1?key=secret")
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: ValueError('secret')")
    logging.getLogger("uvicorn.error").warning("Unsupported upgrade request.")
    logging.getLogger("uvicorn.error").error("Exception in ASGI application\nValueError: secret")
    logging.getLogger("fastapi").warning("something old")
    lines = [line.split("  ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "ERROR  asyncio: Task exception was never retrieved",
        "ERROR  uvicorn.error: Exception in ASGI application",
        "WARNING  fastapi: something old",
    ]
    configure("debug")
    logging.getLogger("uvicorn.error").warning("Unsupported upgrade request.")
    assert "WARNING  uvicorn.error: Unsupported upgrade request." in capsys.readouterr().err


def _fail(secret: str) -> None:
    try:
        raise KeyError(secret)
    except KeyError as error:
        raise ExceptionGroup(secret, [ValueError(secret), from_ninfer(OptionError(secret))]) from error


def test_an_exception_is_its_kinds_and_places(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info")
    try:
        _fail("secret")
    except ExceptionGroup as error:
        Console(options()).response_failed(record(), "render", error)
    text = capsys.readouterr().err
    assert "secret" not in text
    assert [line.strip() for line in text.splitlines()[1:] if not line.startswith("    ")] == [
        "ExceptionGroup", "ApiError", "ValueError", "KeyError",
    ]  # fmt: skip
    assert re.search(rf"at {__name__}\._fail:\d+", text)


def test_a_closed_or_missing_stderr_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    configure("info")
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr("sys.stderr", stream)
        Console(options()).stopped()
        with Progress("loading", logging.getLogger("ninfer.serve"), refresh=0.001, lines=0.001):
            time.sleep(0.02)


def test_strangers_cannot_forge_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info")
    evil = "x\n2026-01-01 00:00:00.000  INFO  all is well\x1b[2J\u202e"
    console = Console(options())
    console.listening("127.0.0.1", 1, evil)
    console.rejected(record(), invalid("x", evil, evil))
    text = capsys.readouterr().err
    assert len(text.splitlines()) == 2
    assert "\x1b" not in text
    assert "\u202e" not in text


# The passing line.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    configure("info")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    logger = logging.getLogger("ninfer.serve")
    with Progress("loading weights", logger, refresh=0.002) as progress:
        progress.update("converting", 1, 4)
        _wait_for(lambda: "converting 25%" in terminal.getvalue())
        logger.info("engine ready")
        seen = len(terminal.getvalue())
        _wait_for(lambda: len(terminal.getvalue()) > seen)
    text = terminal.getvalue()
    shown, rest = text.split("engine ready\n", 1)
    assert re.search(r"\r\x1b\[Kloading weights \| converting 25% \| \d+\.?\d* (µs|ms|s)", shown)
    # A line of the log replaces the passing one, which comes again below it and is gone at the end.
    assert re.search(r"\r\x1b\[K\d{4}-[^\n]*  INFO  $", shown)
    assert rest.startswith("loading weights | converting 25% | ")
    assert text.endswith("\r\x1b[K")
    assert text.count("\n") == 1


def test_progress_elsewhere_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info")
    logger = logging.getLogger("ninfer.serve")
    with Progress("loading weights", logger, lines=0.001):
        time.sleep(0.05)
    with Progress("nothing to say yet", logger):
        pass
    configure("warning")
    with Progress("too quiet", logger, lines=0.001):
        time.sleep(0.02)
    text = capsys.readouterr().err
    assert re.fullmatch(r"([\d-]{10} [\d:.]{12}  INFO  loading weights \| [\d.]+ (µs|ms|s)\n)+", text), text


def test_no_handler_is_left_twice() -> None:
    configure("info")
    configure("debug")
    assert logging.getLogger().handlers.count(HANDLER) == 1


def _wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


# Numbers and words.


def test_numbers_are_written_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536, 5 << 20, 3 << 29, 1 << 40, 1 << 50)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 MiB", "1.5 GiB", "1.0 TiB", "1024.0 TiB",
    ]  # fmt: skip
    seconds = (0, 4e-5, 0.00099949, 0.0009996, 0.0032, 0.00996, 0.31, 0.9994, 0.9996, 4.206, 59.99, 59.996)
    assert [duration(s) for s in seconds] == [
        "0 µs", "40 µs", "999 µs", "1.0 ms", "3.2 ms", "10 ms", "310 ms", "999 ms", "1.00 s", "4.21 s",
        "59.99 s", "1m 00s",
    ]  # fmt: skip
    assert [duration(s) for s in (125, 3599.4, 3600, 90_061)] == ["2m 05s", "59m 59s", "1h 00m", "25h 01m"]
    assert [rate(*x) for x in ((0, 1), (1, 0), (87.06, 1), (999.94, 1), (999.96, 1), (12_345.6, 1))] == [
        "-", "-", "87.1 tok/s", "999.9 tok/s", "1,000 tok/s", "12,346 tok/s",
    ]  # fmt: skip


def test_words_of_strangers() -> None:
    assert label("a" * 81) == "a" * 80 + "…"
    assert printable("Ünïcode is fine\t\n") == "Ünïcode is fine\\t\\n"
    assert unquoted("""role 'a\\'b' and "c'd" or `e`, but it isn't 'open""") == (
        """role '…' and "…" or `…`, but it isn't '…'"""
    )
    assert len(unquoted("x" * 5000)) == 401
