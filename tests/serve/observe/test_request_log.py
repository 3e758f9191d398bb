"""Every line follows the schema; the log survives what disks do."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.api.options import EngineOptions
from ninfer.engine import RuntimeStatistics, Statistics
from ninfer.errors import OptionError
from ninfer.events import FinishReason
from ninfer.frontend import Frontend
from ninfer.serve.calls import Protocol, ToolChoice
from ninfer.serve.errors import ApiError, invalid
from ninfer.serve.observe.interval import interval_record
from ninfer.serve.observe.records import ngram_overlap
from ninfer.serve.observe.request_log import RequestLog
from ninfer.serve.observe.startup import Gpu, redacted
from ninfer.serve.observer import CallReport, Outcome
from ninfer.serve.options import SamplingOverrides
from tests.serve.observe import schema
from tests.serve.observe.made import THOUGHT, TOOLS, info, options, outcome, record, statistics

Use = Callable[[RequestLog], None]


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def written(tmp_path: Path, qwen: Frontend) -> Callable[..., list[dict[str, Any]]]:
    """What a log writes when it is used so; every line is held against the schema."""

    def write(use: Use, **changes: Any) -> list[dict[str, Any]]:
        path = tmp_path / "log.jsonl"
        log = RequestLog(path, options(request_log=path, **changes), qwen)
        use(log)
        log.close()
        found = lines(path)
        for line in found:
            schema.check(line)
        return found

    return write


def test_every_event_follows_the_schema(written: Callable[..., list[dict[str, Any]]]) -> None:
    def use(log: RequestLog) -> None:
        log.server_start(info(), Gpu())
        log.started(record())
        log.rejected(record(8), invalid("no", "messages"))
        log.failed(record(9), ApiError(503, "late", code="request_queue_timeout"))
        log.done(record(), outcome())
        log.throughput(interval_record(RuntimeStatistics(), RuntimeStatistics(), 5.0, 130, None))

    found = written(use)
    assert [line["event"] for line in found] == list(schema.EVENTS)
    assert {line["server_instance_id"] for line in found} == {found[0]["server_instance_id"]}
    assert found[0]["server_instance_id"].startswith(f"serve-{os.getpid()}-")


def test_server_start_says_what_was_loaded(written: Callable[..., list[dict[str, Any]]]) -> None:
    engine = EngineOptions(
        max_context=8192, max_concurrency=2, kv_capacity="auto", headroom_mib=512, kv_dtype="int8"
    )
    changes = {
        "engine": engine,
        "api_key": "sk-hush",
        "argv": ("nano.ninfer", "--api-key", "sk-hush", "--port", "8080"),
        "sampling": SamplingOverrides(temperature=0.5, seed=3),
        "stats_interval": 2.5,
    }
    gpu = Gpu("NVIDIA H200", "GPU-1", 1 << 37, 9, 0, "13.0")
    [line] = written(lambda log: log.server_start(info(device="cuda:1", kv_dtype="fp8"), gpu), **changes)
    assert line["argv"] == ["nano.ninfer", "--api-key", "<redacted>", "--port", "8080"]
    assert line["server"]["public_model_id"] == "ninfer-nano"
    assert line["server"]["api_key_configured"] is True
    assert line["engine"]["kv_cache"] == "fp8-e4m3-row256"
    assert line["engine"]["kv_capacity_mode"] == "auto"
    assert line["engine"]["log_stats_interval_ms"] == 2500
    assert line["environment"]["device"] == 1
    assert line["environment"]["gpu_uuid"] == "GPU-1"
    assert line["sampling_defaults"]["server_overrides"]["temperature"] == 0.5
    assert line["sampling_defaults"]["thinking"]["temperature"] == 1.0
    memory = line["memory"]
    assert memory["kv_capacity_increment_bytes"] == 1 << 20
    assert memory["runtime_reservation_bytes"] == (130 + 10 + 1 + 4) << 20
    assert memory["minimum_runtime_reservation_bytes"] == memory["runtime_reservation_bytes"]
    assert memory["available_after_startup_bytes"] == (4 << 30) - (145 << 20)
    assert memory["planned_slack_bytes"] == (4 << 30) - (145 << 20) - (512 << 20)


def test_the_smallest_reservation_has_the_pages_of_one_context(
    written: Callable[..., list[dict[str, Any]]],
) -> None:
    loaded = info(max_context=4096)  # 64 of the 128 pages
    [line] = written(lambda log: log.server_start(loaded, Gpu()))
    assert line["memory"]["minimum_runtime_reservation_bytes"] == (145 - 64) << 20


def test_the_api_key_is_nowhere_in_the_command_line() -> None:
    argv = ("m", "--api-key=sk-hush", "--api-key", "sk-hush", "--model-id", "x-sk-hush-y", "--port", "1")
    assert redacted(options(api_key="sk-hush", argv=argv)) == [
        "m", "--api-key=<redacted>", "--api-key", "<redacted>", "--model-id", "x-<redacted>-y", "--port", "1",
    ]  # fmt: skip
    assert redacted(options(argv=("m", "--api-key"))) == ["m", "--api-key"]
    given_twice = options(api_key="second", argv=("--api-key", "first", "--api-key", "second"))
    assert redacted(given_twice) == ["--api-key", "<redacted>"] * 2


def test_a_request_says_what_was_asked_and_what_was_resolved(
    written: Callable[..., list[dict[str, Any]]],
) -> None:
    asked = record(
        protocol=Protocol.MESSAGES,
        client="bench/x",
        tools=TOOLS,
        tool_choice=ToolChoice("required", ("lookup",)),
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": "x"}]},
            {"role": "tool", "content": "b"},
        ],
        max_output=32_000,
        effort="low",
        thinking=True,
        thinking_budget=32,
        preserve_thinking=False,
    )
    [line] = written(lambda log: log.started(asked), preserve_thinking=True)
    request = line["request"]
    assert request["protocol"] == "anthropic_messages"
    assert request["client"] == "bench/x"
    assert (request["message_count"], request["media_item_count"], request["tool_count"]) == (2, 1, 1)
    assert request["requested_output_tokens_source"] == "client"
    assert request["tool_choice"] == "required"
    assert request["has_tool_history"] is True
    assert request["enable_thinking"] is True
    assert request["thinking_budget"] == 32
    assert request["requested_reasoning_effort"] == "low"
    assert request["preserve_thinking"] is False
    assert request["sampling"]["seed"] == 2**64 - 1
    assert request["sampling"]["temperature"] == 0.7
    # What preparation left to the preset is the preset's.
    assert request["sampling"]["presence_penalty"] == 0.0
    assert line["preparation_seconds"]["total"] == 0.010
    assert line["preparation_seconds"]["tokenize"] == 0.004


def test_options_among_the_templates_arguments(written: Callable[..., list[dict[str, Any]]]) -> None:
    asked = record(template_kwargs={"reasoning_effort": "high", "preserve_thinking": True})
    [line] = written(lambda log: log.started(asked), preserve_thinking=False)
    assert line["request"]["requested_reasoning_effort"] == "high"
    assert line["request"]["preserve_thinking"] is True


def test_a_rejection_has_the_status_that_the_protocol_used(
    written: Callable[..., list[dict[str, Any]]],
) -> None:
    late = ApiError(503, "late", type="server_error", code="request_queue_timeout")

    def use(log: RequestLog) -> None:
        log.rejected(record(1), late)
        log.rejected(record(2, protocol=Protocol.MESSAGES), late)

    chat, messages = (line["error"] for line in written(use))
    assert (chat["status"], chat["type"]) == (503, "server_error")
    assert (messages["status"], messages["type"]) == (504, "timeout_error")


def test_errors_are_told_without_what_they_quote(written: Callable[..., list[dict[str, Any]]]) -> None:
    defect = ApiError(500, "the engine said: my secret", type="internal_error")
    defect.__cause__ = KeyError("my secret")

    def use(log: RequestLog) -> None:
        log.rejected(record(1), invalid("The role 'my secret' isn't known; it can't be used."))
        log.rejected(record(2), invalid(f"It must be one of 1, 2, not {'my secret' * 3!r:.20}"))
        log.rejected(record(3), defect)
        log.failed(record(4), defect)

    messages = [line["error"]["message"] for line in written(use)]
    assert messages == [
        "The role '…' isn't known; it can't be used.",
        "It must be one of 1, 2, not '…'",
        "internal error (KeyError)",
        "internal error (KeyError)",
    ]


def test_done_says_what_the_answer_cost(written: Callable[..., list[dict[str, Any]]]) -> None:
    report = CallReport(True, 2, 1, 3)
    asked = record(thinking=True, thinking_budget=32)
    [line] = written(lambda log: log.done(asked, outcome(THOUGHT, report=report, calls=2)))
    result = line["result"]
    assert result["finish_reason"] == "stop_token"
    assert (result["prompt_tokens"], result["completion_tokens"]) == (100, 41)
    assert (result["computed_prefill_tokens"], result["prefix_cache_hit_tokens"]) == (36, 64)
    assert (result["thinking_budget"], result["model_thinking_tokens"]) == (32, 32)
    assert (result["thinking_control_tokens"], result["thinking_control_applied"]) == (9, True)
    assert result["tool_call_count"] == 2
    assert result["tool_call_parse"] == {
        "marker_seen": True,
        "structured_call_count": 2,
        "empty_arguments_omitted": 1,
        "schema_mismatch_arguments": 3,
        "fallback_reason": "none",
    }
    assert result["prompt_ngram_overlap"] is None
    timings = line["timings_seconds"]
    assert (timings["prepare"], timings["ttft"]) == (0.010, pytest.approx(0.06))
    assert (timings["prefill"], timings["decode"]) == (0.036, 0.4)
    assert timings["total"] == pytest.approx(0.46)
    timing = line["engine_timing"]
    assert timing["host_exposed_seconds"]["total"] == pytest.approx(0.015)
    assert timing["decode"] == {
        "host_exposed_seconds": 0.01,
        "device_wait_exposed_seconds": 0.38,
        "rounds": 40,
    }


def test_several_answers_are_one_record(written: Callable[..., list[dict[str, Any]]]) -> None:
    longer = statistics(
        generated_tokens=80, reused_tokens=99, total_seconds=2.0, decode_seconds=1.5, first_token_seconds=1.2
    )
    [line] = written(lambda log: log.done(record(n=2), outcome(statistics(), longer, calls=1)))
    result, timings = line["result"], line["timings_seconds"]
    assert (result["prompt_tokens"], result["completion_tokens"]) == (100, 121)
    assert (result["computed_prefill_tokens"], result["prefix_cache_hit_tokens"]) == (37, 64)
    assert result["tool_call_count"] == 2
    assert (timings["total"], timings["decode"]) == (pytest.approx(2.01), 1.5)
    assert timings["ttft"] == pytest.approx(0.06)


@pytest.mark.parametrize(
    "told",
    [
        outcome(
            statistics(
                finish_reason=FinishReason.CANCELLED,
                generated_tokens=0,
                prefill_seconds=0.0,
                first_token_seconds=None,
                token_ids=(),
            )
        ),
        Outcome((), ()),
    ],
    ids=["in the queue", "before the engine had it"],
)
def test_a_request_that_never_began(told: Outcome, written: Callable[..., list[dict[str, Any]]]) -> None:
    [line] = written(lambda log: log.done(record(), told))
    assert line["result"]["finish_reason"] == "cancelled"
    assert line["result"]["computed_prefill_tokens"] == 0
    assert line["timings_seconds"]["ttft"] == 0.0


@pytest.mark.parametrize("reason", list(FinishReason))
def test_reasons_are_the_schema_s(reason: FinishReason, written: Callable[..., list[dict[str, Any]]]) -> None:
    [line] = written(lambda log: log.done(record(), outcome(statistics(finish_reason=reason))))
    assert line["result"]["finish_reason"] == reason.value.replace("-", "_")


def test_overlap_is_told_with_speculation_detail(written: Callable[..., list[dict[str, Any]]]) -> None:
    def use(log: RequestLog) -> None:
        log.done(record(prompt=[1, 2, 3, 4, 5]), outcome(statistics(token_ids=(1, 2, 3, 4, 9))))

    [line] = written(use, speculation_detail_max_steps=4096)
    assert line["result"]["prompt_ngram_overlap"] == 0.5


_IDS = st.lists(st.integers(0, 3) | st.just(2**18 - 1), max_size=40)


@given(_IDS, _IDS)
def test_overlap_is_the_share_of_windows_that_occur(prompt: list[int], output: list[int]) -> None:
    def windows(ids: list[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]

    known = set(windows(prompt))
    expected = np.mean([w in known for w in windows(output)]) if len(output) >= 4 else None
    assert ngram_overlap(prompt, tuple(output)) == expected


# What disks do.


def test_lines_are_appended_and_an_unfinished_one_is_ended(tmp_path: Path, qwen: Frontend) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"old": 1}\n{"torn')
    log = RequestLog(path, options(), qwen)
    log.started(record())
    log.close()
    old, torn, new = path.read_bytes().splitlines()
    assert (old, torn) == (b'{"old": 1}', b'{"torn')
    schema.check(orjson.loads(new))


def test_a_log_that_cannot_be_is_refused_at_once(tmp_path: Path, qwen: Frontend) -> None:
    model = tmp_path / "model.ninfer"
    model.write_bytes(b"weights")
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "hard").hardlink_to(model)
    for path, words in (
        (tmp_path / "no" / "log", "folder doesn't exist"),
        (model, "must not be the model's file"),
        (tmp_path / "link", "must not be the model's file"),
        (tmp_path / "hard", "must not be the model's file"),
        (tmp_path / "." / "model.ninfer", "must not be the model's file"),
        (tmp_path, "can't be opened: Is a directory"),
    ):
        with pytest.raises(OptionError, match=words):
            RequestLog(path, options(model_path=model), qwen)
    assert model.read_bytes() == b"weights"
    missing = tmp_path / "missing.ninfer"
    with pytest.raises(OptionError, match="must not be the model's file"):
        RequestLog(missing, options(model_path=missing), qwen)
    assert not missing.exists()


def test_a_failed_write_switches_the_log_off_once(
    tmp_path: Path, qwen: Frontend, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.jsonl"
    log = RequestLog(path, options(), qwen)
    log.started(record(1))
    log._background.submit((written := Event()).set)
    written.wait()
    size = path.stat().st_size
    old, signals = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, old[1]))  # as if the disk were full
        for number in range(2, 6):
            log.started(record(number))
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, signals)
    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert errors == ["request log disabled | File too large"]
    assert path.read_bytes().count(b"\n") == 1


def test_a_disk_that_hangs_holds_up_nobody_and_switches_the_log_off(
    tmp_path: Path, qwen: Frontend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ninfer.serve.observe.request_log._WAITING", 10)
    log = RequestLog(tmp_path / "log.jsonl", options(), qwen)
    go = Event()
    log._background.submit(go.wait)
    for number in range(30):
        log.started(record(number))
    go.set()
    log.close()
    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert errors == ["request log disabled | writing is 10 events behind"]
    ids = [line["request"]["request_id"] for line in lines(tmp_path / "log.jsonl")]
    assert ids == list(range(len(ids)))
    assert 9 <= len(ids) <= 11


def test_nothing_is_lost_or_mixed_at_shutdown(
    tmp_path: Path, qwen: Frontend, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when several threads log at once, and two servers share a file."""
    path = tmp_path / "log.jsonl"
    logs = [RequestLog(path, options(), qwen) for _ in range(2)]

    def use(log: RequestLog, first: int) -> None:
        for number in range(first, first + 200):
            log.done(record(number), outcome())

    threads = [Thread(target=use, args=(logs[i % 2], 1000 * i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.close()
        log.close()
        log.started(record())  # too late: ignored
    assert not caplog.records
    found = lines(path)
    assert len(found) == 800
    for i in range(4):
        ids = [n for line in found if 1000 * i <= (n := line["request"]["request_id"]) < 1000 * i + 1000]
        assert ids == sorted(ids)


def test_statistics_without_the_engine_s_own_are_told_too() -> None:
    bare = Statistics(FinishReason.STOP_TOKEN, 3, 0, 1, 0, 0.1, 0.0, (1,))
    from ninfer.serve.observe.records import completion

    told = completion(record(prompt=[1, 2, 3]), Outcome((), (), (bare,)), detail=None)
    assert told["result"]["completion_tokens"] == 1
    assert told["timings_seconds"]["prefill"] == 0.1
