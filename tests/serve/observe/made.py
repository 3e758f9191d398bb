"""Requests, outcomes and an engine process, made up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ninfer.api.options import GenerationOptions
from ninfer.engine import RuntimeStatistics, Statistics, ThinkingReport
from ninfer.engine.events import HostWork
from ninfer.events import FinishReason
from ninfer.serve.calls import Finished, GenerationRequest, Protocol, Timings, Tool, Usage
from ninfer.serve.jobs import EngineInfo, Job, JobStream, LinkState
from ninfer.serve.observer import CallReport, Outcome, RequestRecord
from ninfer.serve.options import ServeOptions


def options(**changes: Any) -> ServeOptions:
    return ServeOptions(**{"model_path": Path("models/nano.ninfer"), **changes})


def record(number: int = 7, prompt: Sequence[int] = range(100), **changes: Any) -> RequestRecord:
    """A prepared request; `changes` are those of the `GenerationRequest`."""
    fields: dict[str, Any] = {
        "protocol": Protocol.CHAT,
        "model": "nano",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        **changes,
    }
    return RequestRecord(
        number,
        GenerationRequest(**fields),
        max_output=32_000,
        max_output_from_client=fields.get("max_output") is not None,
        prompt=prompt,
        options=GenerationOptions(
            max_new=32_000, temperature=0.7, top_p=0.8, top_k=20, seed=2**64 - 1,
            thinking_budget=fields.get("thinking_budget"),
        ),
        thinking=fields.get("thinking"),
        prepare_seconds=0.010,
        tokenize_seconds=0.004,
    )  # fmt: skip


def statistics(**changes: Any) -> Statistics:
    fields: dict[str, Any] = {
        "finish_reason": FinishReason.STOP_TOKEN,
        "prompt_tokens": 100,
        "reused_tokens": 64,
        "generated_tokens": 41,
        "reasoning_tokens": 0,
        "prefill_seconds": 0.036,
        "decode_seconds": 0.4,
        "token_ids": tuple(range(1000, 1041)),
        "queue_seconds": 0.002,
        "first_token_seconds": 0.05,
        "total_seconds": 0.45,
        "rounds": 40,
        "reuse_path": "private_endpoint",
        "host": HostWork(0.001, 0.002, 0.003, 0.004, 0.005, 0.4, 0.01, 0.38, 1, 0),
        **changes,
    }
    return Statistics(**fields)


def finished(s: Statistics, calls: int = 0) -> Finished:
    first = s.first_token_seconds
    return Finished(
        s.finish_reason,
        Usage(s.prompt_tokens, s.reused_tokens, s.generated_tokens, s.reasoning_tokens),
        Timings(
            s.prompt_tokens,
            s.reused_tokens,
            s.generated_tokens,
            s.prefill_seconds,
            s.decode_seconds,
            None if first is None else 0.01 + first,
            0.01 + s.total_seconds,
        ),
        s,
        calls=calls,
    )


def outcome(*answers: Statistics, report: CallReport | None = None, calls: int = 0) -> Outcome:
    done = answers or (statistics(),)
    return Outcome(tuple(finished(s, calls) for s in done), tuple(report or CallReport() for _ in done), done)


THOUGHT = statistics(reasoning_tokens=30, thinking=ThinkingReport(32, 32, 9, True))
TOOLS = (Tool("lookup", {"type": "object"}),)


def info(**changes: Any) -> EngineInfo:
    fields: dict[str, Any] = {
        "name": "ninfer-nano",
        "architecture": "Qwen3_5ForCausalLM",
        "device": "cpu",
        "threads": 2,
        "max_context": 8192,
        "kv_dtype": "int8",
        "kv_tokens": 8192,
        "kv_bytes": 130 << 20,
        "weight_bytes": 11 << 20,
        "load_seconds": 2.34,
        "memory": "a table",
        "max_concurrency": 2,
        "pages": 128,
        "snapshots": 6,
        "slots": 10,
        "slot_bytes": 1 << 20,
        "buffer_bytes": 1 << 20,
        "workspace_bytes": 4 << 20,
        "record_bytes": 0,
        "artifact_path": "/models/nano.ninfer",
        "artifact_bytes": 12 << 20,
        "artifact_objects": 150,
        "formats": ("q4_g64",),
        "prefill_signature": "q4",
        "process": 4711,
        "memory_available": 4 << 30,
        **changes,
    }
    return EngineInfo(**fields)


class FakeLink:
    """An engine process whose counters a test sets."""

    def __init__(self, *looks: RuntimeStatistics | Exception | None, **changes: Any) -> None:
        """`looks` are given in turn, the last one again and again."""
        self.state = LinkState.READY
        self.info = info(**changes)
        self.looks = list(looks) or [RuntimeStatistics()]

    async def statistics(self) -> RuntimeStatistics | None:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, Exception):
            raise look
        return look

    async def submit(self, job: Job) -> JobStream:
        raise NotImplementedError
