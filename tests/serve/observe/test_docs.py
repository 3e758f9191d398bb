"""docs/request-log.md against what is written: its constants are so, and it names all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from ninfer.api.options import EngineOptions
from ninfer.engine import RuntimeStatistics, Speculation
from ninfer.events import FinishReason
from ninfer.frontend import Frontend
from ninfer.serve.observe.interval import interval_record
from ninfer.serve.observe.records import completion, preparation
from ninfer.serve.observe.startup import Gpu, server_start
from ninfer.serve.observer import CallReport
from ninfer.serve.options import SamplingOverrides
from tests.serve.observe.made import THOUGHT, info, options, outcome, record

PAGE = Path(__file__).parents[3] / "docs" / "request-log.md"


def test_the_page_s_constants_are_those_that_never_change(qwen: Frontend) -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `([a-z0-9_.]+\.[a-z0-9_.]+)` \| ([^|]+) \| ", text, re.MULTILINE))
    assert len(table) > 60
    said = {place: orjson.loads(value) for place, value in table.items()}
    busy = dict(leaves(everything(qwen)))
    for place, value in said.items():
        below = {k: v for k, v in busy.items() if k == place or k.startswith(place + ".")}
        assert below, f"{place} is no member"
        assert all(v == value and (v is None) == (value is None) for v in below.values()), (place, below)
    # All that our busiest records leave empty is on the page.
    silent = {place for place, value in busy.items() if value in (0, None, "", "none", [])}
    listed = {place for place in busy for known in said if place == known or place.startswith(known + ".")}
    assert silent - listed == set()


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, member in value.items():
            yield from leaves(member, f"{place}.{name}" if place else name)
    else:
        yield place, value


def everything(frontend: Frontend) -> dict[str, Any]:
    """Records in which everything that can be counted was counted."""
    flags = options(
        engine=EngineOptions(kv_capacity="auto", spec="mtp", draft_tokens=3),
        host="0.0.0.0", api_key="k", cors=True, thinking=True,
        request_log=Path("x"), speculation_detail_max_steps=9, default_thinking_budget=5,
        preserve_thinking=True, argv=("x",), sampling=SamplingOverrides(*[1] * 7, greedy=True),
    )  # fmt: skip
    loaded = info(device="cuda:1", record_bytes=7, graph_bytes=7, cuda_graph=True, upload_seconds=1.0,
        extra=dict.fromkeys(("cuda_compile_version", "cuda_runtime_version"), "13.0"))  # fmt: skip
    start = server_start(flags, loaded, frontend, Gpu("H200", "GPU-1", 1, 9, 1, "13.0"))
    on_cpu = server_start(flags, info(), frontend, Gpu())["artifact"]
    # Objects are the host's or the device's, and presets without a penalty have none.
    start["artifact"] |= {name: on_cpu[name] for name in ("host_object_count", "host_mapped_bytes")}
    del start["sampling_defaults"]
    report = CallReport(True, 1, 1, 1, "malformed_structure")
    asked = record(thinking=True, thinking_budget=32)
    done = completion(asked, outcome(_drafted(), report=report, calls=1), detail=3)
    numbers = {name: 1 for name in vars(RuntimeStatistics()) if name not in ("finished", "selections")}
    counts = dict.fromkeys(interval()["context_cache"]["selections"], 1)
    busy = RuntimeStatistics(**numbers, finished={FinishReason.STOP_TOKEN: 1}, selections=counts)  # pyright: ignore
    busy.prefill_seconds = busy.decode_seconds = busy.control_seconds = 3.0
    throughput = interval_record(RuntimeStatistics(), busy, 5.0, 130, [{"device": 1}])
    return {
        "server_start": start,
        "request_start": {"preparation_seconds": preparation(asked)},
        "request_done": done,
        "throughput": throughput,
    }


def interval() -> dict[str, Any]:
    return interval_record(RuntimeStatistics(), RuntimeStatistics(), 5.0, 130, None)


def _drafted() -> Any:
    from dataclasses import replace

    drafts = Speculation(3, 3, 9, 6, 1, [3, 2, 1], bytearray([3, 2, 1, 255]))
    host = replace(THOUGHT.host, control_units=1)
    return replace(THOUGHT, speculation=drafts, host=host, token_ids=(0, 1, 2, 3, 4))
