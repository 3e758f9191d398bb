"""Records of requests in the request log's schema 27; docs/request-log.md says what its constants mean."""

from __future__ import annotations

from typing import Any

import numpy as np

from ninfer.engine.events import NO_DRAFT, HostWork, Speculation
from ninfer.errors import NInferError
from ninfer.events import FinishReason
from ninfer.frontend import Frontend
from ninfer.serve.calls import Protocol
from ninfer.serve.errors import ApiError, anthropic_body, anthropic_status
from ninfer.serve.observe.summary import Summary, answers, summarize
from ninfer.serve.observe.text import label, unquoted
from ninfer.serve.observer import Outcome, RequestRecord
from ninfer.serve.options import ServeOptions

_MEDIA = frozenset(("image", "image_url", "input_image", "video", "video_url", "input_video"))
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
PHASES = (
    "engine_boundary",
    "program_submit",
    "program_post",
    "engine_commit_output",
    "engine_maintenance",
)
_NO_SEARCH: dict[str, Any] = {
    "predicted_now_ns": 0,
    "predicted_future_loss_ns": 0,
    "predicted_total_ns": 0,
    "targets_evaluated": 0,
    "projection_work": 0,
    "planning_elapsed_ns": 0,
    "search_elapsed_ns": 0,
    "stop_reason": "none",
    "budget_exhausted": False,
    "selected_degradation_units": 0,
    "selected_maximal_fallback": False,
    "initial_predicted_total_ns": 0,
    "first_improvement_ns": None,
    "incumbent_improvements": 0,
    "search_work": 0,
    "search_granted_ns": 0,
    "search_renewals": 0,
    "search_discovery_used": 0,
    "search_overshoot_ns": 0,
    "search_stop_phase": "none",
    "search_boundary_limited": False,
}


def request(record: RequestRecord, options: ServeOptions, frontend: Frontend | None) -> dict[str, Any]:
    """The `request` object; without `frontend` that of a rejected request, of which less is known."""
    asked = record.request
    resolved = record.options if frontend is not None else None
    head = {
        "request_id": record.id,
        "protocol": asked.protocol.value,
        "model": label(asked.model),
        "client": asked.client,
        "stream": asked.stream,
        "message_count": len(asked.messages),
        "media_item_count": sum(map(_media, asked.messages)),
        "requested_output_tokens": record.max_output,
        "requested_output_tokens_source": "client" if record.max_output_from_client else "server_default",
        "tool_count": len(asked.tools),
        "tool_choice": asked.tool_choice.mode,
        "has_tool_history": any(m.get("role") == "tool" or m.get("tool_calls") for m in asked.messages),
    }
    effort = _either(asked.effort, asked.template_kwargs.get("reasoning_effort"), str)
    if frontend is None:
        # It may be why the request is rejected, so it may be any text.
        return {**head, "requested_reasoning_effort": None if effort is None else label(effort)}
    preserve = _either(asked.preserve_thinking, asked.template_kwargs.get("preserve_thinking"), bool)
    preset = frontend.preset(thinking=bool(record.thinking))
    chosen = {name: getattr(resolved, name, None) for name in SAMPLING}
    return {
        **head,
        "enable_thinking": bool(record.thinking),
        "thinking_budget": None if resolved is None else resolved.thinking_budget,
        "requested_reasoning_effort": effort,
        "preserve_thinking": options.preserve_thinking if preserve is None else preserve,
        "preserve_thinking_semantic_change": False,
        "sampling": {
            **{n: getattr(preset, n) if value is None else value for n, value in chosen.items()},
            "seed": 0 if resolved is None else resolved.seed,
        },
    }


def preparation(record: RequestRecord) -> dict[str, Any]:
    return {
        "total": record.prepare_seconds,
        "acquisition": 0.0,
        "media_preprocess": 0.0,
        "media_preprocess_work": 0.0,
        "tokenize": record.tokenize_seconds,
        "media_items": 0,
        "media_bytes": 0,
        "raw_patches": 0,
        "vision_tokens": 0,
        "patch_bytes": 0,
        "cache_hits": 0,
        "cache_misses": 0,
        "singleflight_waits": 0,
        "built_patch_bytes": 0,
        "reused_patch_bytes": 0,
    }


def rejection(record: RequestRecord, error: ApiError) -> dict[str, Any]:
    """The `error` object of a rejected request, with the status and type that its protocol used."""
    status, kind = error.status, error.type
    if record.request.protocol is Protocol.MESSAGES:
        status = anthropic_status(error)
        kind = anthropic_body(error, "")["error"]["type"]
    return {
        "status": status,
        "type": kind,
        "code": error.code,
        "param": error.param,
        "message": error_text(error),
    }


def error_text(error: ApiError) -> str:
    """The sentence of an error, without values of the client; of a defect of ours only its kind."""
    cause = error.__cause__
    if error.status == 500:
        return "internal error" if cause is None else f"internal error ({type(cause).__name__})"
    if cause is not None and not isinstance(cause, (NInferError, ApiError)):
        return f"{error.code or error.type} ({type(cause).__name__})"
    return unquoted(error.message)


def completion(record: RequestRecord, outcome: Outcome, *, detail: int | None) -> dict[str, Any]:
    """What `request_done` has beside the request. `detail`: rounds whose accepted drafts are listed at most,
    if speculation detail was asked for."""
    summary = summarize(record, outcome)
    return {
        "result": _result(record, outcome, summary, detail is not None),
        "timings_seconds": {
            "prepare": record.prepare_seconds,
            "ttft": summary.ttft or 0.0,
            "vision": 0.0,
            "prefill": summary.prefill,
            "decode": summary.decode,
            "total": summary.total,
        },
        "engine_timing": {
            "queue_wait_seconds": summary.queue,
            "host_exposed_seconds": phases(summary.host),
            "device_wait_exposed_seconds": summary.host.device_wait,
            "decode": {
                "host_exposed_seconds": summary.host.decode_host,
                "device_wait_exposed_seconds": summary.host.decode_device_wait,
                "rounds": summary.rounds,
            },
            "units": {"prefill": summary.host.prefill_units, "control": summary.host.control_units},
        },
        "speculative": _speculative(summary.speculation, detail),
        "materialization": _NO_SEARCH,
    }


def _speculative(found: Speculation, most: int | None) -> dict[str, Any]:
    listed = most is not None and found.window > 0
    return {
        "backend": "mtp" if found.window else "none",
        "draft_window": found.window,
        "rounds": found.rounds,
        "drafted_tokens": found.drafted,
        "accepted_tokens": found.accepted,
        "fallback_steps": found.fallback_steps,
        "accepted_per_position": found.per_position,
        "accepted_length_histogram": found.histogram(),
        "accepted_lengths": _lengths(found.lengths[:most]) if listed else None,
        "accepted_lengths_truncated": len(found.lengths) > most if listed and most is not None else None,
    }


def _lengths(lengths: bytearray) -> str:
    """A hexadecimal digit for each round, a dash for one without drafts."""
    return "".join("-" if length == NO_DRAFT else f"{length:x}" for length in lengths)


def phases(work: HostWork) -> dict[str, float]:
    """The host's five phases in seconds, and their sum."""
    each = {name: getattr(work, name) for name in PHASES}
    return {**each, "total": sum(each.values())}


def ngram_overlap(prompt: Any, output: Any, n: int = 4) -> float | None:
    """Share of the windows of `n` output tokens that occur somewhere in the prompt; None without a window."""
    if len(output) < n:
        return None
    if len(prompt) < n:
        return 0.0
    both = np.concatenate([_windows(prompt, n), _windows(output, n)])
    ranks = both[:, 0]
    # A window becomes the rank of (its beginning's rank, its next token): exact, and two ids fit 64 bits.
    for column in range(1, n):
        _, ranks = np.unique(ranks << 32 | both[:, column], return_inverse=True)
        ranks = ranks.astype(np.int64).reshape(-1)
    split = len(prompt) - n + 1
    return float(np.isin(ranks[split:], ranks[:split]).mean())


def _windows(tokens: Any, n: int) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(np.asarray(tokens, np.int64), n)


def _result(record: RequestRecord, outcome: Outcome, summary: Summary, detail: bool) -> dict[str, Any]:
    overlap = None
    first = next(iter(answers(outcome)), None)
    if detail and first is not None and record.prompt is not None:
        overlap = ngram_overlap(record.prompt, first.token_ids)
    return {
        "finish_reason": reason(summary.reason),
        "prompt_tokens": summary.prompt,
        "completion_tokens": summary.generated,
        "computed_prefill_tokens": summary.computed,
        "prefix_cache_hit_tokens": summary.reused,
        "prefix_reuse_path": summary.reuse_path,
        "thinking_budget": summary.budget,
        "model_thinking_tokens": summary.thinking,
        "thinking_control_tokens": summary.control,
        "thinking_control_applied": summary.applied,
        "tool_call_count": summary.call_count,
        "tool_call_parse": {
            "marker_seen": summary.calls.marker_seen,
            "structured_call_count": summary.calls.structured_calls,
            "empty_arguments_omitted": summary.calls.empty_arguments_omitted,
            "schema_mismatch_arguments": summary.calls.schema_mismatches,
            "fallback_reason": summary.calls.fallback,
        },
        "prompt_ngram_overlap": overlap,
    }


def reason(finish: FinishReason) -> str:
    return finish.value.replace("-", "_")


def _either(field: Any, argument: Any, kind: type) -> Any:
    """An option that comes by a field of its own or among the template's arguments."""
    return argument if field is None and isinstance(argument, kind) else field


def _media(message: dict[str, Any]) -> int:
    content = message.get("content")
    if not isinstance(content, list):
        return 0
    return sum(isinstance(part, dict) and part.get("type") in _MEDIA for part in content)
