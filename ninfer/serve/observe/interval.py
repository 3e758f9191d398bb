"""The difference of two looks at an engine's counters, as the request log's `throughput` members."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ninfer.engine import RuntimeStatistics
from ninfer.engine.reuse import ReusePath
from ninfer.serve.observe.records import phases

_NAMES = [each.name for each in fields(RuntimeStatistics)]
_STANDING = {"last_frontier", *_NAMES[_NAMES.index("waiting") :]}
"""How things stand; all other numbers count up."""
_NO_COPIES = {"count": 0, "bytes": 0, "seconds": 0.0}
_NO_PAGES = {"pages": 0, "bytes": 0, "seconds": 0.0}
_DIRECTIONS = ("d2h", "h2d", "d2d")
_DETAILS = ("admission_policy", "context_progress", "stats_publication")


def busy(before: RuntimeStatistics, now: RuntimeStatistics) -> bool:
    """Was anything done, or is there anything to do?"""
    return bool(
        now.running
        or now.waiting
        or now.finished != before.finished
        or any(
            getattr(now, name) != getattr(before, name)
            for name in ("admitted", "failed", "prefill_tokens", "control_tokens", "rounds")
        )
    )


def difference(before: RuntimeStatistics, now: RuntimeStatistics) -> RuntimeStatistics:
    """What was counted since `before`, never below 0; how things stand is `now`'s."""
    changes = {}
    for name in _NAMES:
        old, new = getattr(before, name), getattr(now, name)
        if name in _STANDING:
            changes[name] = new
        elif isinstance(new, dict):
            changes[name] = {key: max(count - old.get(key, 0), 0) for key, count in new.items()}
        else:
            changes[name] = max(new - old, type(new)())
    return RuntimeStatistics(**changes)


def interval_record(
    before: RuntimeStatistics,
    now: RuntimeStatistics,
    seconds: float,
    pages: int,
    gpus: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    """Members of a `throughput` record but the common ones; `seconds` lie between the two looks, `pages` is
    what the engine has (`startup.page_count`)."""
    d = difference(before, now)
    return {
        "interval_seconds": seconds,
        "tokens": {"computed_prefill": d.prefill_tokens, "committed_decode": d.decode_tokens},
        "throughput_tokens_per_second": {
            "prefill": d.prefill_tokens / seconds,
            "decode": d.decode_tokens / seconds,
        },
        "scheduler": {
            "running": d.running,
            "prefilling": d.prefilling,
            "decode_ready": d.decode_ready,
            "waiting": d.waiting,
            "materializing": 0,
            "capture_pending": 0,
            "terminal_pending": 0,
        },
        "decode_batch": {
            "rounds": d.rounds,
            "row_rounds": d.row_rounds,
            "average_size": _ratio(d.row_rounds, d.rounds),
        },
        "gpus": gpus,
        "host_work": _host_work(d),
        "context_cache": _context_cache(d, max(pages - d.free_pages, 0)),
    }


def _host_work(d: RuntimeStatistics) -> dict[str, Any]:
    work = d.host
    prefill_host = max(d.prefill_seconds - d.prefill_device_seconds, 0.0)
    control_host = max(d.control_seconds - d.control_device_seconds, 0.0)
    decode_host = max(work.decode_host, 0.0)
    micro = 1e6
    return {
        "elapsed_seconds": phases(work),
        "device_wait_seconds": work.device_wait,
        "work_class_seconds": {
            "decode_host": decode_host,
            "decode_device_wait": d.decode_device_seconds,
            "prefill_host": prefill_host,
            "prefill_device_wait": d.prefill_device_seconds,
            "control_host": control_host,
            "control_device_wait": d.control_device_seconds,
        },
        "detail_subset_seconds": dict.fromkeys(_DETAILS, 0.0),
        "detail_invocations": dict.fromkeys(_DETAILS, 0),
        "units": {"prefill": d.prefill_units, "control": d.control_units},
        "decode_host_microseconds_per_round": _ratio(decode_host * micro, d.rounds),
        "decode_host_microseconds_per_row_round": _ratio(decode_host * micro, d.row_rounds),
        "decode_device_wait_microseconds_per_round": _ratio(d.decode_device_seconds * micro, d.rounds),
        "detail_microseconds_per_invocation": dict.fromkeys(_DETAILS),
    }


def _context_cache(d: RuntimeStatistics, used_pages: int) -> dict[str, Any]:
    return {
        "captures": {"completed": d.captures_completed, "aborted": d.captures_aborted},
        "selections": {
            **{path.value: d.selections.get(path, 0) for path in ReusePath},
            "reused_prompt_tokens": d.reused_tokens,
        },
        "last_selection": {"frontier_tokens": d.last_frontier},
        "state_operations": {"moves": 0, "forks": 0, "restores": 0},
        "state_transfers": {way: dict(_NO_COPIES) for way in _DIRECTIONS},
        "main_kv_transfers": {way: dict(_NO_PAGES) for way in _DIRECTIONS},
        "backend_kv_transfers": {way: dict(_NO_PAGES) for way in _DIRECTIONS},
        "pressure": {
            "spill_pages": 0,
            "partial_tail_cow_pages": d.copied_pages,
            "private_owners_degraded": 0,
            "private_owners_evicted": 0,
            "shared_owners_degraded": 0,
            "shared_owners_evicted": d.evicted_blocks,
            "checkpoints_dropped": d.evicted_snapshots,
            "searches": 0,
            "search_budget_exhaustions": 0,
            "maximal_fallback_selections": 0,
            "historical_fork_hits": 0,
        },
        "occupancy": {
            "device_state_slots": d.used_slots,
            "host_state_slots": 0,
            "device_main_kv_pages": used_pages,
            "device_backend_kv_pages": 0,
            "host_kv_bytes": 0,
            "shared_active_references": 0,
        },
        "actual_transfer_seconds": 0.0,
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
