"""`ninfer-serve`: one model behind the HTTP APIs of OpenAI and Anthropic, until a signal ends it."""

import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ninfer.cli import options
from ninfer.cli.common import flags, number, program, run, whole
from ninfer.errors import OptionError

app = program()

KEY_VARIABLE = "NINFER_API_KEY"
_LATER = {
    **options.LATER,
    "--media-cache-mib": "vision",
    "--media-live-mib": "vision",
    "--media-preprocess-threads": "vision",
}
_REDACTED = "<redacted>"
_ONE_CACHE = (
    "one prefix cache serves all requests here; --kv-capacity and --device-state-slots say how large it is"
)


def _hidden(flag: str) -> Any:
    """An option that is known, to be refused."""
    return typer.Option(flag, hidden=True, metavar="N")


@app.command()
def serve(
    model: options.Model,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, whole("--port", "Port to listen on; 0 takes a free one.")] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            help=f"Key that clients must send. Others can read it in the list of processes; ${KEY_VARIABLE} "
            "is the discreet way.",
            metavar="KEY",
        ),
    ] = None,
    model_id: Annotated[
        str | None, typer.Option("--model-id", help="Public name (the artifact's).", metavar="ID")
    ] = None,
    model_alias: Annotated[
        list[str] | None,
        typer.Option(
            "--model-alias", help="A further name that requests may use (repeatable).", metavar="ID"
        ),
    ] = None,
    max_concurrency: options.MaxConcurrency = 1,
    max_pending_requests: Annotated[
        int, whole("--max-pending-requests", "Further requests that may wait.")
    ] = 16,
    pending_timeout_ms: Annotated[
        int, whole("--pending-timeout-ms", "How long one may wait for its turn.")
    ] = 30_000,
    default_max_tokens: Annotated[
        int, whole("--default-max-tokens", "Output tokens of a request that names no limit.")
    ] = 8192,
    default_thinking_budget: Annotated[
        int | None, whole("--default-thinking-budget", "Thinking tokens of a request that names no limit.")
    ] = None,
    no_thinking: options.NoThinking = False,
    preserve_thinking: Annotated[
        bool, typer.Option("--preserve-thinking", help="Keep the reasoning of earlier turns in prompts.")
    ] = False,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    top_k: options.TopK = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    seed: Annotated[int | None, whole("--seed", "Seed of requests that name none (random).")] = None,
    greedy: options.Greedy = False,
    max_context: options.MaxContext = None,
    prefill_chunk: options.PrefillChunk = 1024,
    kv_dtype: options.KvDtype = "bf16",
    kv_capacity: options.KvCapacity = None,
    headroom_mib: options.HeadroomMib = None,
    device_state_slots: options.DeviceStateSlots = None,
    turn_anchors: options.TurnAnchors = 1,
    no_prefix_reuse: options.NoPrefixReuse = False,
    host_state_slots: Annotated[int | None, whole("--host-state-slots", "0: none (later work).")] = None,
    host_kv_mib: Annotated[int | None, whole("--host-kv-mib", "0: none (later work).")] = None,
    max_private_continuations: Annotated[str | None, _hidden("--max-private-continuations")] = None,
    max_shared_prefixes: Annotated[str | None, _hidden("--max-shared-prefixes")] = None,
    max_long_anchors: Annotated[str | None, _hidden("--max-long-anchors-per-continuation")] = None,
    context_cost_presets: Annotated[str | None, _hidden("--context-cost-presets")] = None,
    device: options.Device = "auto",
    no_cuda_graph: options.NoCudaGraph = False,
    spec: options.Spec = None,
    draft_tokens: options.DraftTokens = None,
    lm_head_draft: options.LmHeadDraft = False,
    threads: options.Threads = None,
    chat_template: options.Template = None,
    idle_unload: Annotated[
        float | None,
        number(
            "--idle-unload",
            "Without a request, end the engine after this time; the next request loads it again.",
            "SECONDS",
        ),
    ] = None,
    drain_timeout: Annotated[
        float, number("--drain-timeout", "How long answers may take to end when the server stops.", "SECONDS")
    ] = 30.0,
    max_request_mib: Annotated[int, whole("--max-request-mib", "Largest request body.")] = 384,
    response_store_max_records: Annotated[
        int, whole("--response-store-max-records", "Responses that are kept for later requests.")
    ] = 1024,
    response_store_max_mib: Annotated[
        int, whole("--response-store-max-mib", "Memory that they may take.")
    ] = 256,
    cors: Annotated[bool, typer.Option("--cors", help="Let web pages of any origin use the server.")] = False,
    log_stats_interval_ms: Annotated[
        int, whole("--log-stats-interval-ms", "Between lines about throughput; 0: none.")
    ] = 5000,
    request_log_jsonl: Annotated[
        str | None,
        typer.Option("--request-log-jsonl", help="Append a record of every request.", metavar="FILE"),
    ] = None,
    log_speculation_detail: Annotated[
        bool, typer.Option("--log-speculation-detail", help="Accepted drafts of every round in that log.")
    ] = False,
    log_speculation_detail_max_steps: Annotated[
        int | None, whole("--log-speculation-detail-max-steps", "Rounds that are recorded at most (4096).")
    ] = None,
    prefill_miss_dump: Annotated[
        str | None,
        typer.Option(
            "--prefill-miss-dump",
            help="Folder for prompts that had to be computed again, with their text.",
            metavar="DIR",
        ),
    ] = None,
    prefill_miss_min_tokens: Annotated[
        int | None, whole("--prefill-miss-min-tokens", "Tokens that make one worth it (10000).")
    ] = None,
    prefill_miss_min_match: Annotated[
        float | None, number("--prefill-miss-min-match", "Part of the prompt that was known, [0, 1] (0.5).")
    ] = None,
    log_level: options.LogLevel = "info",
) -> int:
    """Serve a model over HTTP: OpenAI Chat Completions and Responses, Anthropic Messages."""
    quiet = options.check_log_level(log_level)
    _check_cache(
        no_prefix_reuse,
        {
            "--device-state-slots": device_state_slots,
            "--host-state-slots": host_state_slots,
            "--host-kv-mib": host_kv_mib,
            "--max-private-continuations": max_private_continuations,
            "--max-shared-prefixes": max_shared_prefixes,
            "--max-long-anchors-per-continuation": max_long_anchors,
        },
    )
    if context_cost_presets is not None:
        raise OptionError(f"--context-cost-presets has no counterpart: {_ONE_CACHE}")
    for flag, value in {
        "--max-pending-requests": max_pending_requests,
        "--pending-timeout-ms": pending_timeout_ms,
        "--default-max-tokens": default_max_tokens,
        "--max-request-mib": max_request_mib,
        "--response-store-max-records": response_store_max_records,
        "--response-store-max-mib": response_store_max_mib,
        "--prefill-miss-min-tokens": prefill_miss_min_tokens,
        "--default-thinking-budget": default_thinking_budget,
        "--log-speculation-detail-max-steps": log_speculation_detail_max_steps,
    }.items():
        _at_least_one(flag, value, 2**20 if flag.startswith("--log-spec") else 2**32 - 1)
    log = _path("--request-log-jsonl", request_log_jsonl)
    dump = _path("--prefill-miss-dump", prefill_miss_dump)
    _requires("--log-speculation-detail", log_speculation_detail, "--request-log-jsonl", log is not None)
    steps = log_speculation_detail_max_steps
    _requires(
        "--log-speculation-detail-max-steps",
        steps is not None,
        "--log-speculation-detail",
        log_speculation_detail,
    )
    _requires(
        "--prefill-miss-min-tokens", prefill_miss_min_tokens is not None, "--prefill-miss-dump", bool(dump)
    )
    _requires(
        "--prefill-miss-min-match", prefill_miss_min_match is not None, "--prefill-miss-dump", bool(dump)
    )
    match = 0.5 if prefill_miss_min_match is None else prefill_miss_min_match
    _within("--prefill-miss-min-match", match, 0, 1)
    _within("--drain-timeout", drain_timeout, 0, 2**31)
    if idle_unload is not None:
        _within("--idle-unload", idle_unload, 0.001, 2**31)
    if no_thinking and default_thinking_budget is not None:
        raise OptionError("--default-thinking-budget cannot be combined with --no-thinking; drop one of them")
    engine = options.engine_options(
        max_context=max_context,
        prefill_chunk=prefill_chunk,
        max_concurrency=max_concurrency,
        kv_dtype=kv_dtype,
        kv_capacity=kv_capacity,
        headroom_mib=headroom_mib,
        state_slots=device_state_slots,
        turn_anchors=turn_anchors,
        no_prefix_reuse=no_prefix_reuse,
        threads=threads,
        device=device,
        no_cuda_graph=no_cuda_graph,
        spec=spec,
        draft_tokens=draft_tokens,
        lm_head_draft=lm_head_draft,
        chat_template=chat_template,
        default_context=8192,
        max_pending=max_pending_requests,
        pending_timeout=pending_timeout_ms / 1000,
    )
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }

    from ninfer.api.options import GenerationOptions
    from ninfer.serve.options import SamplingOverrides, ServeOptions

    with flags():
        GenerationOptions(**sampling, seed=seed or 0)
        chosen = ServeOptions(
            model_path=model,
            engine=engine,
            host=host,
            port=port,
            api_key=_key(api_key),
            model_id=model_id,
            model_aliases=tuple(model_alias or ()),
            sampling=SamplingOverrides(**sampling, seed=seed, greedy=greedy),
            max_request_bytes=max_request_mib << 20,
            default_max_tokens=default_max_tokens,
            default_thinking_budget=default_thinking_budget,
            thinking=False if no_thinking else None,
            preserve_thinking=preserve_thinking or None,
            cors=cors,
            idle_unload=idle_unload,
            drain_timeout=drain_timeout,
            stats_interval=log_stats_interval_ms / 1000,
            request_log=log,
            speculation_detail_max_steps=(steps or 4096) if log_speculation_detail else None,
            response_store_records=response_store_max_records,
            response_store_bytes=response_store_max_mib << 20,
            prefill_miss_dump=dump,
            prefill_miss_min_tokens=prefill_miss_min_tokens or 10_000,
            prefill_miss_min_match=match,
            log_level=log_level,
            argv=_argv(),
        )
    return _serve(chosen, quiet)


def _serve(chosen: Any, quiet: bool) -> int:
    from ninfer.cli.progress import conversion_progress
    from ninfer.serve import run as server

    def announce(text: str) -> None:
        # What is there now stays; the collector need not look through it in the middle of answers.
        gc.collect()
        gc.freeze()
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    return server.run(server.serve(chosen, progress=lambda: conversion_progress(quiet), announce=announce))


def _check_cache(no_prefix_reuse: bool, sizes: dict[str, Any]) -> None:
    """The options of a cache with tiers and private copies, as far as ours has something like it."""
    given = [flag for flag, value in sizes.items() if value is not None]
    if no_prefix_reuse and given:
        raise OptionError(
            f"--no-prefix-reuse cannot be combined with context-cache capacity options; drop {given[0]}"
        )
    for flag in given:
        if flag.startswith("--host-") and sizes[flag]:
            raise OptionError(
                f"{flag} must be 0: the prefix cache has no second tier in the host's memory in this version"
            )
        if flag.startswith("--max-"):
            raise OptionError(f"{flag} has no counterpart: {_ONE_CACHE}")


def _at_least_one(flag: str, value: int | None, most: int) -> None:
    if value is not None and not 1 <= value <= most:
        raise OptionError(f"{flag} must be a whole number between 1 and {most}, not {value}")


def _within(flag: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise OptionError(f"{flag} must be a number between {low:g} and {high:g}, not {value:g}")


def _requires(flag: str, given: bool, other: str, there: bool) -> None:
    if given and not there:
        raise OptionError(f"{flag} requires {other}")


def _path(flag: str, text: str | None) -> Path | None:
    if text == "":
        raise OptionError(f"{flag} must not be empty; leave it out or give a path")
    return None if text is None else Path(text)


def _key(given: str | None) -> str | None:
    """The API key: the option's, or the environment's."""
    key, source = given, "--api-key"
    if key is None:
        key, source = os.environ.get(KEY_VARIABLE), f"${KEY_VARIABLE}"
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise OptionError(f"{source} must be printable ASCII without spaces, as it is sent in a header")
    return key


def _argv() -> tuple[str, ...]:
    """The command line without the key."""
    words = list(sys.argv)
    for index, word in enumerate(words):
        if word.startswith("--api-key="):
            words[index] = f"--api-key={_REDACTED}"
        elif index and words[index - 1] == "--api-key":
            words[index] = _REDACTED
    return tuple(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `ninfer-serve`."""
    return run(app, "ninfer-serve", argv, later=_LATER)


if __name__ == "__main__":
    sys.exit(main())
