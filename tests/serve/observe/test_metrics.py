"""Metrics as Prometheus reads them."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import prometheus_client
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from ninfer.api.options import GenerationOptions
from ninfer.engine import RuntimeStatistics, Speculation
from ninfer.events import FinishReason
from ninfer.frontend import Frontend
from ninfer.serve.calls import Protocol
from ninfer.serve.errors import ApiError, invalid
from ninfer.serve.jobs import LinkState
from ninfer.serve.observe import build
from ninfer.serve.observe.metrics import MEDIA_TYPE, Metrics
from ninfer.serve.observer import CallReport, Outcome
from tests.serve.observe.made import FakeLink, info, options, outcome, record, statistics
from tests.serve.observe.test_console import DEAD, DEFECT, FULL, GONE, LATE


def scraped(metrics: Metrics) -> dict[str, float]:
    """Sample with its labels -> value."""
    text = asyncio.run(metrics.scrape()).decode()
    return {
        sample.name + "".join(f" {k}={v}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_requests_by_protocol_and_outcome() -> None:
    metrics = Metrics()
    chat, messages = record(), record(protocol=Protocol.MESSAGES)
    gone = statistics(finish_reason=FinishReason.CANCELLED)
    for told in (chat, messages):
        metrics.started(told)
        metrics.done(told, outcome())
    metrics.started(chat)
    metrics.done(chat, outcome(gone))
    for error in (GONE, FULL, LATE, DEAD, DEFECT, invalid("x")):
        metrics.rejected(chat, error)
        metrics.started(messages)
        metrics.failed(messages, error)
    metrics.response_failed(chat, "stream", ValueError())
    metrics.started(chat)
    found = scraped(metrics)

    def requests(protocol: Protocol) -> dict[str, float]:
        start = "ninfer_requests_total outcome="
        return {
            name.removeprefix(start).split()[0]: value
            for name, value in found.items()
            if name.startswith(start) and name.endswith(f"protocol={protocol.value}")
        }

    assert requests(Protocol.CHAT) == {
        "completed": 1, "cancelled": 2, "overloaded": 1, "timeout": 1, "failed": 2, "rejected": 1,
    }  # fmt: skip
    assert requests(Protocol.MESSAGES) == {
        "completed": 1, "cancelled": 1, "overloaded": 1, "timeout": 1, "failed": 2, "rejected": 1,
    }  # fmt: skip
    assert set(requests(Protocol.RESPONSES).values()) == {0}
    assert found["ninfer_requests_in_progress"] == 1
    assert found["ninfer_answers_total finish_reason=stop_token"] == 2
    assert found["ninfer_answers_total finish_reason=cancelled"] == 1


def test_tokens_and_times_of_answers() -> None:
    metrics = Metrics()
    cold = statistics(
        reused_tokens=0,
        reasoning_tokens=7,
        speculation=Speculation(3, rounds=3, drafted=9, accepted=6),
        queue_seconds=3.0,
    )
    for told in (outcome(), outcome(cold, report=CallReport(True, 2)),
                 outcome(statistics(), report=CallReport(True, fallback="undeclared_tool"))):  # fmt: skip
        metrics.started(record())
        metrics.done(record(), told)
    metrics.started(record())
    metrics.done(record(), Outcome((), ()))  # ended before the engine had it
    never = statistics(prompt_tokens=0, reused_tokens=0, generated_tokens=0, first_token_seconds=None)
    without = record()
    without.options = GenerationOptions(prefix_reuse=False)
    for told, answer in ((record(), never), (without, statistics(prompt_tokens=0, reused_tokens=0))):
        metrics.started(told)
        metrics.done(told, outcome(answer, report=CallReport()))
    found = scraped(metrics)
    assert found["ninfer_prompt_tokens_total"] == 300
    assert found["ninfer_prompt_tokens_cached_total"] == 128
    assert found["ninfer_prompt_tokens_computed_total"] == 172
    assert found["ninfer_generated_tokens_total"] == 164
    assert found["ninfer_reasoning_tokens_total"] == 7
    assert (found["ninfer_drafted_tokens_total"], found["ninfer_accepted_tokens_total"]) == (9, 6)
    assert (found["ninfer_prefix_cache_lookups_total"], found["ninfer_prefix_cache_hits_total"]) == (3, 2)
    assert found["ninfer_tool_calls_total"] == 2
    assert found["ninfer_tool_markup_fallbacks_total reason=undeclared_tool"] == 1
    chat = "protocol=openai_chat_completions"
    assert found[f"ninfer_time_to_first_token_seconds_count {chat}"] == 4
    assert found[f"ninfer_time_to_first_token_seconds_sum {chat}"] == pytest.approx(0.24)
    assert found[f"ninfer_time_to_first_token_seconds_bucket le=0.05 {chat}"] == 0
    assert found[f"ninfer_time_to_first_token_seconds_bucket le=0.1 {chat}"] == 4
    assert found["ninfer_queue_wait_seconds_bucket le=0.005"] == 4
    assert found["ninfer_queue_wait_seconds_bucket le=5.0"] == 5
    assert found[f"ninfer_request_duration_seconds_sum {chat}"] == pytest.approx(2.3)
    assert found["ninfer_time_per_output_token_seconds_sum"] == pytest.approx(0.04)
    assert found["ninfer_decode_tokens_per_second_bucket le=100.0"] == 4


def test_how_the_engine_stands() -> None:
    metrics = Metrics()
    link = FakeLink(
        RuntimeStatistics(
            running=2, waiting=3, prefilling=1, free_pages=30, active_pages=20, reserved_pages=5,
            cached_blocks=90, snapshots=4, used_slots=8,
        )
    )  # fmt: skip
    assert "ninfer_engine_state ninfer_engine_state=starting" in scraped(metrics)
    metrics.start(link, info(), "my-model")
    found = scraped(metrics)
    state = {name.split("=")[1]: v for name, v in found.items() if name.startswith("ninfer_engine_state")}
    assert state == {"starting": 0, "ready": 1, "unloaded": 0, "failed": 0, "stopped": 0}
    gauges = {
        "requests_running": 2, "requests_waiting": 3, "requests_prefilling": 1, "kv_pages_capacity": 130,
        "kv_pages_used": 100, "kv_pages_active": 20, "kv_pages_reserved": 5, "prefix_cache_blocks": 90,
        "prefix_cache_snapshots": 4, "state_slots_used": 8, "server_tasks": 1,
    }  # fmt: skip
    assert {name: found[f"ninfer_{name}"] for name in gauges} == gauges
    [build_info] = [name for name in found if name.startswith("ninfer_build_info")]
    assert "model=my-model" in build_info
    assert "version=" in build_info
    assert found["process_resident_memory_bytes"] > 0


@pytest.mark.parametrize("silence", [None, RuntimeError("gone")])
def test_an_engine_that_says_nothing_leaves_zeros(silence: Any) -> None:
    metrics = Metrics()
    link = FakeLink(RuntimeStatistics(running=2, cached_blocks=9), silence)
    metrics.start(link, info(), "m")
    assert scraped(metrics)["ninfer_requests_running"] == 2
    link.state = LinkState.UNLOADED
    found = scraped(metrics)
    assert found["ninfer_requests_running"] == found["ninfer_kv_pages_capacity"] == 0
    assert found["ninfer_engine_state ninfer_engine_state=unloaded"] == 1


def test_an_engine_that_hangs_does_not_hold_up_the_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(FakeLink):
        async def statistics(self) -> RuntimeStatistics | None:
            await asyncio.Event().wait()

    monkeypatch.setattr("ninfer.serve.observe.metrics._PATIENCE", 0.01)
    metrics = Metrics()
    metrics.start(Hanging(), info(), "m")
    assert scraped(metrics)["ninfer_requests_running"] == 0


def test_two_servers_share_nothing_and_touch_no_global_state() -> None:
    before = prometheus_client.generate_latest(prometheus_client.REGISTRY).count(b"ninfer_")
    one, two = Metrics(), Metrics()
    one.started(record())
    one.done(record(), outcome())
    assert scraped(two)["ninfer_prompt_tokens_total"] == 0
    assert prometheus_client.generate_latest(prometheus_client.REGISTRY).count(b"ninfer_") == before == 0


def test_names_follow_the_conventions() -> None:
    metrics = Metrics()
    for family in text_string_to_metric_families(asyncio.run(metrics.scrape()).decode()):
        assert re.fullmatch(r"(ninfer|process)_[a-z_]+[a-z]", family.name)
        assert family.documentation
        if family.type == "counter":
            # The parser strips what is always there.
            assert all(s.name.endswith(("_total", "_created")) for s in family.samples)
        if family.name.startswith("ninfer") and family.type == "gauge":
            assert not family.name.endswith(("_total", "_count"))


@pytest.mark.parametrize("accept", ["", "*/*", "application/openmetrics-text; version=abc", "text/html"])
def test_the_route(accept: str, qwen: Frontend) -> None:
    app = FastAPI()
    app.include_router(build(options(), qwen).router())
    response = TestClient(app).get("/metrics", headers={"accept": accept})
    assert response.status_code == 200
    assert response.headers["content-type"] == MEDIA_TYPE
    assert "ninfer_requests_total{" in response.text
    assert "/metrics" in app.openapi()["paths"]


def test_labels_are_never_a_client_s_words() -> None:
    metrics = Metrics()
    odd = record(model="evil model", client="evil/client", effort="evil")
    metrics.started(odd)
    metrics.failed(odd, ApiError(503, "evil", code="evil", param="evil"))
    metrics.rejected(odd, invalid("evil", "evil", "evil"))
    assert "evil" not in " ".join(scraped(metrics))
