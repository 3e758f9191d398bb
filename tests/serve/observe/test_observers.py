"""All of them together: their life, their independence, and that nobody's text gets out."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ninfer.engine import RuntimeStatistics
from ninfer.errors import ContextLengthError, FrontendError, OptionError, UnavailableError
from ninfer.frontend import Frontend
from ninfer.serve.calls import Protocol, Tool
from ninfer.serve.errors import ApiError, from_ninfer, invalid
from ninfer.serve.observe import build, configure
from ninfer.serve.observer import CallReport
from tests.serve.observe import schema
from tests.serve.observe.made import FakeLink, info, options, outcome, record, statistics


def test_a_server_s_life(tmp_path: Path, qwen: Frontend, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "log.jsonl"
    link = FakeLink(RuntimeStatistics(), RuntimeStatistics(prefill_tokens=100, rounds=40))

    async def live() -> None:
        observers = build(options(request_log=path, prefill_miss_dump=tmp_path / "dumps"), qwen)
        observers.start(link, info())
        await asyncio.sleep(0.01)
        observers.started(record(1))
        observers.done(record(1), outcome())
        observers.rejected(record(2), invalid("x"))
        observers.started(record(3))
        observers.failed(record(3), ApiError(503, "x"))
        observers.response_failed(record(3), "stream", ValueError())
        await observers.close()
        await observers.close()

    asyncio.run(live())
    events = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    for line in events:
        schema.check(line)
    assert [line["event"] for line in events] == [
        "server_start", "request_start", "request_done", "request_rejected", "request_start", "request_error",
        "throughput",
    ]  # fmt: skip
    said = [r.getMessage().split(" | ")[0] for r in caplog.records]
    assert said == [
        "engine ready", "capacity", "context cache", "req#1 started", "req#1 done",
        "req#2 rejected during prepare", "req#3 started", "req#3 failed",
        "req#3 response failed during stream",
    ]  # fmt: skip


def test_with_everything_off_there_are_no_files_and_no_tasks(tmp_path: Path, qwen: Frontend) -> None:
    async def live() -> None:
        observers = build(options(stats_interval=0.0), qwen)
        observers.start(FakeLink(), info())
        assert asyncio.all_tasks() == {asyncio.current_task()}
        observers.started(record())
        observers.done(record(), outcome())
        await observers.close()

    asyncio.run(live())
    asyncio.run(build(options(), qwen).close())  # without a start
    assert list(tmp_path.iterdir()) == []


def test_observers_load_no_torch() -> None:
    code = "import sys, ninfer.serve.observe; sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_cannot_be_written_is_refused_when_built(tmp_path: Path, qwen: Frontend) -> None:
    with pytest.raises(OptionError, match="request log"):
        build(options(request_log=tmp_path / "no" / "log"), qwen)
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="dump"):
        build(options(prefill_miss_dump=tmp_path / "file"), qwen)


def test_a_defect_in_one_harms_neither_the_request_nor_the_others(
    qwen: Frontend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    observers = build(options(), qwen)

    def broken(*_: Any) -> None:
        raise ValueError("my secret")

    for event in ("started", "done", "failed", "rejected", "response_failed"):
        monkeypatch.setattr(observers.console, event, broken)
    observers.started(record())
    observers.done(record(), outcome())
    observers.failed(record(), ApiError(503, "x"))
    observers.rejected(record(), invalid("x"))
    observers.response_failed(record(), "stream", ValueError())
    assert [r.getMessage() for r in caplog.records] == ["an event could not be logged"] * 5
    assert b'outcome="completed",protocol="openai_chat_completions"} 1.0' in asyncio.run(
        observers.metrics.scrape()
    )


# No text of clients, no text of models, no key.

SECRET = "Zebra7Quartz"
_WORDS = st.text(st.characters(codec="utf-8"), max_size=12)
_SECRET_TEXT = st.builds(lambda a, b: f"{a}{SECRET}{b}", _WORDS, _WORDS)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """A request whose texts all hold the secret."""
    role = st.sampled_from(["system", "user", "assistant", "tool"])
    text = _SECRET_TEXT
    content = text | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": text}), max_size=2)
    message = st.fixed_dictionaries(
        {"role": role, "content": content}, optional={"reasoning_content": text, "tool_call_id": text}
    )
    return {
        "protocol": draw(st.sampled_from(Protocol)),
        "messages": draw(st.lists(message, min_size=1, max_size=3)),
        "tools": (Tool("lookup", {"description": draw(text)}, draw(text)),),
        "stop": (draw(text),),
        "thinking": draw(st.booleans()),
        "template_kwargs": {"note": draw(text)},
    }


@st.composite
def mishaps(draw: st.DrawFn) -> ApiError:
    """Errors as the rooms raise them: values that a client sent stand in quotes, as `repr` writes them, or
    the error is a defect that says anything."""
    text = draw(_SECRET_TEXT)
    quoted = f"{text!r:.{draw(st.integers(20, 200))}}"
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return invalid(f"messages[0].role must be one of user, system; it can't be {quoted}.", "messages")
    if kind == 1:
        return from_ninfer(FrontendError(f"The template refused this ({quoted}); that isn't possible."))
    if kind == 2:
        return from_ninfer(ContextLengthError("The prompt has 9 tokens, the context 8."))
    if kind == 3:
        error = from_ninfer(UnavailableError("the engine has failed"))
        error.__cause__ = ValueError(text)
        return error
    error = ApiError(500, text, type="internal_error", code="internal_error")
    error.__cause__ = KeyError(text)
    return error


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=requests(), error=mishaps(), answer=_SECRET_TEXT, key=_SECRET_TEXT)
def test_no_text_leaks(
    asked: dict[str, Any],
    error: ApiError,
    answer: str,
    key: str,
    qwen: Frontend,
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure("trace")
    tokens = qwen.encode(SECRET)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        flags = options(
            request_log=path,
            api_key=key,
            argv=("m", "--api-key", key, f"--api-key={key}"),
            speculation_detail_max_steps=8,
        )

        async def live() -> bytes:
            observers = build(flags, qwen)
            observers.start(FakeLink(RuntimeStatistics(), RuntimeError(answer)), info())
            observers.console.listening("127.0.0.1", 1, "nano")
            told = record(1, qwen.encode(answer), **asked)
            observers.started(told)
            done = statistics(token_ids=tuple(tokens), stop_string=answer)
            report = CallReport(marker_seen=True, fallback="malformed_structure")
            observers.done(told, outcome(done, report=report))
            observers.failed(told, error)
            observers.rejected(told, error)
            for mishap in (error, ValueError(answer), OSError(5, answer), FrontendError(answer)):
                observers.response_failed(told, "stream", mishap)
            scraped = await observers.metrics.scrape()
            await observers.close()
            return scraped

        scraped = asyncio.run(live())
        logged = path.read_text()
    said = capsys.readouterr().err
    assert said.count("req#1") == 9
    assert logged.count("\n") == 5
    for text in (scraped.decode(), logged, said):
        assert SECRET not in text
        assert str(tokens)[1:-1] not in text
        assert orjson.dumps(tokens).decode()[1:-1] not in text
