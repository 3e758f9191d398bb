"""The request log's schema 27, written down from its specification: names, order and types of all members.

A type, a tuple of types, a list with the type of its elements, a dict of members, or a set of allowed values.
`float` also takes whole numbers, as JSON does.
"""

from __future__ import annotations

from typing import Any

NULL = type(None)
NUMBER = (float, NULL)


def _each(names: str, kind: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


COMMON = {
    "artifact_type": {"ninfer_serve_request_log"},
    "schema_version": {27},
    "event": str,
    "timestamp_unix_ms": int,
    "server_instance_id": str,
}
ARENA = _each("capacity_bytes used_bytes peak_used_bytes", int)
PRESET = _each("temperature top_p", float) | {"top_k": int} | _each("min_p presence_penalty", float)
PRESET |= {"frequency_penalty": float}
SERVER_START = {
    "server": {
        "host": str,
        "port": int,
        "public_model_id": str,
        "api_key_configured": bool,
        "cors_enabled": bool,
        "max_request_bytes": int,
        "media_cache_bytes": int,
        "media_live_bytes": int,
        "media_preprocess_threads": int,
        "request_log_jsonl": str,
        "speculation_detail_max_steps": (int, NULL),
        "default_output_tokens": int,
        "default_thinking": (bool, NULL),
        "default_thinking_budget": (int, NULL),
        "default_preserve_thinking": (bool, NULL),
    },
    "artifact": {
        "path": str,
        "size_bytes": (int, NULL),
        "architecture": str,
        "name": str,
        "formats": [str],
        "prefill_signature": str,
        **_each("bytes_read host_to_device_bytes peak_staging_bytes", int),
        **_each("device_object_count host_object_count host_mapped_bytes", int),
        **_each("load_seconds upload_seconds", float),
    },
    "engine": {
        "device": int,
        "max_context": int,
        "kv_capacity_mode": {"auto", "explicit"},
        **_each("kv_capacity kv_capacity_page_groups kv_capacity_max_page_groups", int),
        **_each("max_concurrency max_pending_requests pending_timeout_ms prefill_chunk", int),
        "log_stats_interval_ms": int,
        "kv_cache": {"bf16", "int8-group64", "fp8-e4m3-row256", "nvfp4", "k8v4"},
        **_each("vision cuda_graph embedding_host prefix_reuse", bool),
        "speculative_backend": {"none", "mtp", "dflash", "dflash2"},
        "speculative_draft_window": int,
        "proposal_head": {"full", "optimized"},
        "context_cost": _each(
            "transfer_source prefill_source hardware_class prefill_signature preset_path", str
        ),
        "context_cache": {
            "enabled": bool,
            **_each("device_state_slots total_device_state_slots host_state_slots", int),
            **_each("host_kv_capacity_bytes max_private_continuations max_shared_prefixes", int),
            "max_long_anchors_per_continuation": int,
        },
    },
    "sampling_defaults": {
        "thinking": PRESET,
        "non_thinking": PRESET,
        "server_overrides": {
            **_each("temperature top_p", NUMBER),
            "top_k": (int, NULL),
            **_each("min_p presence_penalty frequency_penalty", NUMBER),
            "seed": (int, NULL),
        },
        "omitted_seed": {"random"},
        "greedy": bool,
    },
    "memory": {
        "weights": ARENA,
        "sequence": ARENA,
        "workspace": ARENA,
        "vision_workspace": NULL,
        **_each("minimum_runtime_reservation_bytes kv_capacity_increment_bytes", int),
        **_each("runtime_reservation_bytes available_after_weights_bytes", int),
        **_each("available_after_startup_bytes kv_capacity_headroom_bytes", int),
        **_each("planned_slack_bytes cuda_graph_allowance_bytes kv_payload_bytes", int),
        **_each("host_state_capacity_slots host_state_occupied_slots", int),
        **_each("host_kv_capacity_bytes host_kv_occupied_bytes", int),
    },
    "environment": {
        "device": int,
        "gpu_name": str,
        "gpu_uuid": str,
        "total_device_memory_bytes": int,
        **_each("compute_capability_major compute_capability_minor", int),
        **_each("cuda_compile_version cuda_runtime_version cuda_driver_version", str),
    },
    "argv": [str],
}
REQUEST_HEAD = {
    "request_id": int,
    "protocol": {"openai_chat_completions", "openai_responses", "anthropic_messages"},
    "model": str,
    "client": (str, NULL),
    "stream": bool,
    "message_count": int,
    "media_item_count": int,
    "requested_output_tokens": int,
    "requested_output_tokens_source": {"client", "server_default"},
    "tool_count": int,
    "tool_choice": {"auto", "none", "required"},
    "has_tool_history": bool,
}
REQUEST = {
    **REQUEST_HEAD,
    "enable_thinking": bool,
    "thinking_budget": (int, NULL),
    "requested_reasoning_effort": (str, NULL),
    "preserve_thinking": (bool, NULL),
    "preserve_thinking_semantic_change": bool,
    "sampling": {**PRESET, "seed": int},
}
REQUEST_START = {
    "request": REQUEST,
    "preparation_seconds": {
        **_each("total acquisition media_preprocess media_preprocess_work tokenize", float),
        **_each("media_items media_bytes raw_patches vision_tokens patch_bytes cache_hits", int),
        **_each("cache_misses singleflight_waits built_patch_bytes reused_patch_bytes", int),
    },
}
REQUEST_REJECTED = {
    "phase": {"prepare"},
    "request": {**REQUEST_HEAD, "requested_reasoning_effort": (str, NULL)},
    "error": {"status": int, "type": str, "code": (str, NULL), "param": (str, NULL), "message": str},
}
REQUEST_ERROR = {"request": REQUEST, "error": {"message": str}}
PHASES = "engine_boundary program_submit program_post engine_commit_output engine_maintenance total"
REQUEST_DONE = {
    "request": REQUEST,
    "result": {
        "finish_reason": {
            "none", "output_limit", "context_capacity", "stop_token", "stop_string", "cancelled",
        },
        **_each("prompt_tokens completion_tokens computed_prefill_tokens prefix_cache_hit_tokens", int),
        "prefix_reuse_path": {
            "root", "private_endpoint", "private_turn_closure", "private_response_replay",
            "private_long_anchor", "shared_stable_prefix",
        },
        "thinking_budget": (int, NULL),
        **_each("model_thinking_tokens thinking_control_tokens", int),
        "thinking_control_applied": bool,
        "tool_call_count": int,
        "tool_call_parse": {
            "marker_seen": bool,
            **_each("structured_call_count empty_arguments_omitted schema_mismatch_arguments", int),
            "fallback_reason": {
                "none", "malformed_structure", "duplicate_parameter", "invalid_tool_name",
                "undeclared_tool", "trailing_content",
            },
        },
        "prompt_ngram_overlap": NUMBER,
    },
    "timings_seconds": _each("prepare ttft vision prefill decode total", float),
    "engine_timing": {
        "queue_wait_seconds": float,
        "host_exposed_seconds": _each(PHASES, float),
        "device_wait_exposed_seconds": float,
        "decode": {**_each("host_exposed_seconds device_wait_exposed_seconds", float), "rounds": int},
        "units": _each("prefill control", int),
    },
    "speculative": {
        "backend": {"none", "mtp", "dflash", "dflash2"},
        **_each("draft_window rounds drafted_tokens accepted_tokens fallback_steps", int),
        "accepted_per_position": [int],
        "accepted_length_histogram": ([int], NULL),
        "accepted_lengths": (str, NULL),
        "accepted_lengths_truncated": (bool, NULL),
    },
    "materialization": {
        **_each("predicted_now_ns predicted_future_loss_ns predicted_total_ns targets_evaluated", int),
        **_each("projection_work planning_elapsed_ns search_elapsed_ns", int),
        "stop_reason": str,
        "budget_exhausted": bool,
        "selected_degradation_units": int,
        "selected_maximal_fallback": bool,
        "initial_predicted_total_ns": int,
        "first_improvement_ns": (int, NULL),
        **_each("incumbent_improvements search_work search_granted_ns search_renewals", int),
        **_each("search_discovery_used search_overshoot_ns", int),
        "search_stop_phase": str,
        "search_boundary_limited": bool,
    },
}  # fmt: skip
GPU = {
    "device": int,
    **_each("sm_clock_mhz memory_clock_mhz power_watts energy_joules temperature_celsius", NUMBER),
    "clock_event_reasons": ([str], NULL),
}
_DETAILS = "admission_policy context_progress stats_publication"
_COPIES = {"count": int, "bytes": int, "seconds": float}
_PAGES = {"pages": int, "bytes": int, "seconds": float}
THROUGHPUT = {
    "interval_seconds": float,
    "tokens": _each("computed_prefill committed_decode", int),
    "throughput_tokens_per_second": _each("prefill decode", float),
    "scheduler": _each(
        "running prefilling decode_ready waiting materializing capture_pending terminal_pending", int
    ),
    "decode_batch": {"rounds": int, "row_rounds": int, "average_size": NUMBER},
    "gpus": ([GPU], NULL),
    "host_work": {
        "elapsed_seconds": _each(PHASES, float),
        "device_wait_seconds": float,
        "work_class_seconds": _each(
            "decode_host decode_device_wait prefill_host prefill_device_wait control_host "
            "control_device_wait",
            float,
        ),
        "detail_subset_seconds": _each(_DETAILS, float),
        "detail_invocations": _each(_DETAILS, int),
        "units": _each("prefill control", int),
        **_each("decode_host_microseconds_per_round decode_host_microseconds_per_row_round", NUMBER),
        "decode_device_wait_microseconds_per_round": NUMBER,
        "detail_microseconds_per_invocation": _each(_DETAILS, NUMBER),
    },
    "context_cache": {
        "captures": _each("completed aborted", int),
        "selections": _each(
            "root private_endpoint private_turn_closure private_response_replay private_long_anchor "
            "shared_stable_prefix reused_prompt_tokens",
            int,
        ),
        "last_selection": {"frontier_tokens": int},
        "state_operations": _each("moves forks restores", int),
        "state_transfers": _each("d2h h2d d2d", _COPIES),
        "main_kv_transfers": _each("d2h h2d d2d", _PAGES),
        "backend_kv_transfers": _each("d2h h2d d2d", _PAGES),
        "pressure": _each(
            "spill_pages partial_tail_cow_pages private_owners_degraded private_owners_evicted "
            "shared_owners_degraded shared_owners_evicted checkpoints_dropped searches "
            "search_budget_exhaustions maximal_fallback_selections historical_fork_hits",
            int,
        ),
        "occupancy": _each(
            "device_state_slots host_state_slots device_main_kv_pages device_backend_kv_pages "
            "host_kv_bytes shared_active_references",
            int,
        ),
        "actual_transfer_seconds": float,
    },
}
EVENTS = {
    "server_start": SERVER_START,
    "request_start": REQUEST_START,
    "request_rejected": REQUEST_REJECTED,
    "request_error": REQUEST_ERROR,
    "request_done": REQUEST_DONE,
    "throughput": THROUGHPUT,
}


def check(line: dict[str, Any]) -> None:
    """AssertionError with the member's place if a line of the log breaks the schema."""
    _check(line, COMMON | EVENTS[line["event"]], line["event"])


def _check(value: Any, kind: Any, place: str) -> None:
    if isinstance(kind, dict):
        assert list(value) == list(kind), place
        for name, member in kind.items():
            _check(value[name], member, f"{place}.{name}")
    elif isinstance(kind, list):
        assert type(value) is list, place
        for i, element in enumerate(value):
            _check(element, kind[0], f"{place}[{i}]")
    elif isinstance(kind, set):
        assert value in kind, (place, value)
    elif isinstance(kind, tuple):
        assert any(_fits(value, one) for one in kind), (place, value)
    else:
        assert _fits(value, kind), (place, value)


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, list):
        return type(value) is list and all(_members_fit(element, kind[0]) for element in value)
    return type(value) is kind or (kind is float and type(value) is int)


def _members_fit(element: Any, kind: Any) -> bool:
    if isinstance(kind, dict):
        _check(element, kind, "element")
        return True
    return _fits(element, kind)
