"""The request log's first record of a process: what was asked for and what was loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ninfer.frontend import Frontend
from ninfer.serve.jobs import EngineInfo
from ninfer.serve.observe.records import SAMPLING
from ninfer.serve.options import ServeOptions

_PAGE = 64
_KV_NAMES = {"int8": "int8-group64", "fp8": "fp8-e4m3-row256"}
_DEFAULT_HEADROOM = 1 << 30
_STAGING = 128 << 20
"""Pinned buffers through which weights go to a GPU (`ops.cuda.upload`)."""


@dataclass(frozen=True)
class Gpu:
    """What NVML says of the engine's device; all empty for the CPU."""

    name: str = ""
    uuid: str = ""
    memory: int = 0
    major: int = 0
    minor: int = 0
    driver: str = ""


@dataclass(frozen=True)
class Memory:
    """The plan's sums, in bytes. `reservation`: all but the weights; `minimum`: the same with the fewest
    pages that the context allows."""

    page: int
    states: int
    reservation: int
    minimum: int
    headroom: int
    available: int
    slack: int


def page_count(info: EngineInfo) -> int:
    """All KV pages: those of the lanes and one more each, for a copy of a partly filled one."""
    return info.pages + (info.max_concurrency if info.kv_bytes else 0)


def memory(info: EngineInfo, options: ServeOptions) -> Memory:
    page = info.kv_bytes // page_count(info) if info.pages else 0
    states = info.slots * info.slot_bytes
    reservation = info.kv_bytes + states + info.record_bytes + info.buffer_bytes + info.workspace_bytes
    reservation += info.graph_bytes
    least = max(-(-info.max_context // _PAGE), info.max_concurrency)
    headroom = 0
    if options.engine.kv_capacity == "auto":
        mib = options.engine.headroom_mib
        headroom = _DEFAULT_HEADROOM if mib is None else mib << 20
    available = info.memory_available or 0
    return Memory(
        page=page,
        states=states,
        reservation=reservation,
        minimum=reservation - max(info.pages - least, 0) * page,
        headroom=headroom,
        available=available,
        slack=max(available - reservation - headroom, 0),
    )


def server_start(options: ServeOptions, info: EngineInfo, frontend: Frontend, gpu: Gpu) -> dict[str, Any]:
    """All members of `server_start` but the common ones."""
    return {
        "server": _server(options, info),
        "artifact": _artifact(info),
        "engine": _engine(options, info),
        "sampling_defaults": _sampling(options, frontend),
        "memory": _memory(options, info),
        "environment": {
            "device": ordinal(info),
            "gpu_name": gpu.name,
            "gpu_uuid": gpu.uuid,
            "total_device_memory_bytes": gpu.memory,
            "compute_capability_major": gpu.major,
            "compute_capability_minor": gpu.minor,
            "cuda_compile_version": info.extra.get("cuda_compile_version", ""),
            "cuda_runtime_version": info.extra.get("cuda_runtime_version", ""),
            "cuda_driver_version": gpu.driver,
        },
        "argv": redacted(options),
    }


def ordinal(info: EngineInfo) -> int:
    """The number of a device such as `cuda:1`; -1 for the CPU."""
    kind, _, number = info.device.partition(":")
    if kind == "cpu":
        return -1
    return int(number) if number.isdigit() else 0


def redacted(options: ServeOptions) -> list[str]:
    """The command line; whatever holds the API key, and the word after `--api-key`, becomes `<redacted>`."""
    words, hide = [], False
    for word in options.argv:
        option, equals, _ = word.partition("=")
        if hide:
            word = "<redacted>"
        elif option == "--api-key" and equals:
            word = "--api-key=<redacted>"
        elif options.api_key and options.api_key in word:
            word = word.replace(options.api_key, "<redacted>")
        hide = not hide and word == "--api-key"
        words.append(word)
    return words


def _server(options: ServeOptions, info: EngineInfo) -> dict[str, Any]:
    return {
        "host": options.host,
        "port": options.port,
        "public_model_id": options.model_id or info.name,
        "api_key_configured": options.api_key is not None,
        "cors_enabled": options.cors,
        "max_request_bytes": options.max_request_bytes,
        "media_cache_bytes": 0,
        "media_live_bytes": 0,
        "media_preprocess_threads": 0,
        "request_log_jsonl": str(options.request_log or ""),
        "speculation_detail_max_steps": options.speculation_detail_max_steps,
        "default_output_tokens": options.default_max_tokens,
        "default_thinking": options.thinking,
        "default_thinking_budget": options.default_thinking_budget,
        "default_preserve_thinking": options.preserve_thinking,
    }


def _artifact(info: EngineInfo) -> dict[str, Any]:
    return {
        "path": info.artifact_path,
        "size_bytes": info.artifact_bytes or None,
        "architecture": info.architecture,
        "name": info.name,
        "formats": list(info.formats),
        "prefill_signature": info.prefill_signature,
        "bytes_read": info.weight_bytes,
        "host_to_device_bytes": 0 if ordinal(info) < 0 else info.weight_bytes,
        "peak_staging_bytes": 0 if ordinal(info) < 0 else _STAGING,
        "device_object_count": 0 if ordinal(info) < 0 else info.artifact_objects,
        "host_object_count": info.artifact_objects if ordinal(info) < 0 else 0,
        "host_mapped_bytes": info.artifact_bytes if ordinal(info) < 0 else 0,
        "load_seconds": info.load_seconds,
        "upload_seconds": info.upload_seconds,
    }


def _engine(options: ServeOptions, info: EngineInfo) -> dict[str, Any]:
    engine = options.engine
    return {
        "device": ordinal(info),
        "max_context": info.max_context,
        "kv_capacity_mode": "auto" if engine.kv_capacity == "auto" else "explicit",
        "kv_capacity": info.kv_tokens,
        "kv_capacity_page_groups": info.pages,
        "kv_capacity_max_page_groups": info.pages,
        "max_concurrency": info.max_concurrency,
        "max_pending_requests": engine.max_pending,
        "pending_timeout_ms": round((engine.pending_timeout or 0) * 1000),
        "prefill_chunk": info.prefill_chunk,
        "log_stats_interval_ms": round(options.stats_interval * 1000),
        "kv_cache": _KV_NAMES.get(info.kv_dtype, info.kv_dtype),
        "vision": False,
        "cuda_graph": info.cuda_graph,
        "embedding_host": False,
        "prefix_reuse": engine.prefix_reuse,
        "speculative_backend": engine.spec or "none",
        "speculative_draft_window": engine.draft_tokens,
        "proposal_head": "optimized" if engine.lm_head_draft else "full",
        "context_cost": {
            "transfer_source": "none",
            "prefill_source": "none",
            "hardware_class": "none",
            "prefill_signature": info.prefill_signature,
            "preset_path": "",
        },
        "context_cache": {
            "enabled": engine.prefix_reuse,
            "device_state_slots": info.snapshots,
            "total_device_state_slots": info.slots,
            "host_state_slots": 0,
            "host_kv_capacity_bytes": 0,
            "max_private_continuations": 0,
            "max_shared_prefixes": 0,
            "max_long_anchors_per_continuation": 0,
        },
    }


def _sampling(options: ServeOptions, frontend: Frontend) -> dict[str, Any]:
    def preset(thinking: bool) -> dict[str, Any]:
        values = frontend.preset(thinking=thinking)
        return {name: getattr(values, name) for name in SAMPLING}

    return {
        "thinking": preset(True),
        "non_thinking": preset(False),
        "server_overrides": {name: getattr(options.sampling, name) for name in (*SAMPLING, "seed")},
        "omitted_seed": "random",
        "greedy": options.sampling.greedy,
    }


def _memory(options: ServeOptions, info: EngineInfo) -> dict[str, Any]:
    sums = memory(info, options)

    def taken(size: int) -> dict[str, int]:
        return {"capacity_bytes": size, "used_bytes": size, "peak_used_bytes": size}

    return {
        "weights": taken(info.weight_bytes),
        "sequence": taken(info.kv_bytes + sums.states + info.record_bytes),
        "workspace": taken(info.workspace_bytes + info.buffer_bytes),
        "vision_workspace": None,
        "minimum_runtime_reservation_bytes": sums.minimum,
        "kv_capacity_increment_bytes": sums.page,
        "runtime_reservation_bytes": sums.reservation,
        "available_after_weights_bytes": sums.available,
        "available_after_startup_bytes": max(sums.available - sums.reservation, 0),
        "kv_capacity_headroom_bytes": sums.headroom,
        "planned_slack_bytes": sums.slack,
        "cuda_graph_allowance_bytes": info.graph_bytes,
        "kv_payload_bytes": info.kv_bytes,
        "host_state_capacity_slots": 0,
        "host_state_occupied_slots": 0,
        "host_kv_capacity_bytes": 0,
        "host_kv_occupied_bytes": 0,
    }
