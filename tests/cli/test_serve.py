"""`ninfer-serve`: what its options become, and a clear sentence for everything that can't be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ninfer.api.options import EngineOptions
from ninfer.cli import serve as program
from ninfer.serve import run as server
from ninfer.serve.options import SamplingOverrides, ServeOptions


class Run:
    """One run in this process, with a server that only notes its options: exit code and both streams."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> None:
        self.options: ServeOptions | None = None
        self.code = program.main([str(argument) for argument in arguments])
        self.out, self.err = capsys.readouterr()

    def refused(self, *words: str) -> None:
        assert (self.code, self.out, self.options) == (1, "", None)
        [sentence] = [line for line in self.err.splitlines() if line.startswith("ninfer-serve: ")]
        for word in words:
            assert word in sentence
        assert "Traceback" not in self.err


@pytest.fixture
def serve(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(program.KEY_VARIABLE, raising=False)
    seen: list[ServeOptions] = []

    async def note(options: ServeOptions, **_: Any) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(server, "serve", note)

    def go(*arguments: object) -> Run:
        seen.clear()
        run = Run(capsys, *arguments)
        run.options = seen[0] if seen else None
        return run

    return go


def test_defaults(serve):
    run = serve("m.ninfer")
    assert run.code == 0
    assert run.options == ServeOptions(
        Path("m.ninfer"), EngineOptions(default_context=8192), argv=tuple(sys.argv)
    )
    assert run.options.port == 8080
    assert run.options.engine.max_concurrency == 1


def test_every_option_arrives(serve, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    run = serve(
        *("m", "--host", "0.0.0.0", "--port", 9, "--api-key", "k", "--model-id", "id"),
        *("--model-alias", "a", "--model-alias", "b", "--max-concurrency", 3, "--max-pending-requests", 5),
        *("--pending-timeout-ms", 1500, "--log-stats-interval-ms", 0, "--max-request-mib", 2),
        *("--request-log-jsonl", "log", "--log-speculation-detail", "--log-speculation-detail-max-steps", 7),
        *("--response-store-max-records", 3, "--response-store-max-mib", 4, "--default-max-tokens", 6),
        *("--default-thinking-budget", 8, "--device-state-slots", 9, "--turn-anchors", 2, "--cors"),
        *("--prefill-miss-dump", "d", "--prefill-miss-min-tokens", 11, "--prefill-miss-min-match", 0.25),
        *("--preserve-thinking", "--idle-unload", 1.5, "--drain-timeout", 0, "--host-state-slots", 0),
        *("--host-kv-mib", 0, "--max-context", 100, "--prefill-chunk", 256, "--kv-dtype", "fp8"),
        *("--kv-capacity", "auto", "--vram-headroom-mib", 1, "--threads", 2, "--chat-template", template),
        *("--temperature", 0.5, "--top-p", 0.6, "--min-p", 0.1, "--top-k", 3, "--presence-penalty", 1),
        *("--frequency-penalty", -1, "--seed", 12, "--greedy", "--log-level", "debug"),
    )
    assert run.code == 0
    assert run.options == ServeOptions(
        model_path=Path("m"),
        engine=EngineOptions(
            max_context=100,
            default_context=8192,
            prefill_chunk=256,
            max_concurrency=3,
            kv_capacity="auto",
            headroom_mib=1,
            kv_dtype="fp8",
            state_slots=9,
            turn_anchors=2,
            max_pending=5,
            pending_timeout=1.5,
            chat_template="{{ messages }}",
            threads=2,
        ),
        host="0.0.0.0",
        port=9,
        api_key="k",
        model_id="id",
        model_aliases=("a", "b"),
        sampling=SamplingOverrides(0.5, 0.6, 3, 0.1, 1.0, -1.0, 12, True),
        max_request_bytes=2 << 20,
        default_max_tokens=6,
        default_thinking_budget=8,
        preserve_thinking=True,
        cors=True,
        idle_unload=1.5,
        drain_timeout=0.0,
        stats_interval=0.0,
        request_log=Path("log"),
        speculation_detail_max_steps=7,
        response_store_records=3,
        response_store_bytes=4 << 20,
        prefill_miss_dump=Path("d"),
        prefill_miss_min_tokens=11,
        prefill_miss_min_match=0.25,
        log_level="debug",
        argv=tuple(sys.argv),
    )
    assert serve("m", "--no-thinking", "--no-prefix-reuse").options.thinking is False


def test_the_key_may_come_from_the_environment_and_is_shown_nowhere(serve, monkeypatch):
    monkeypatch.setenv(program.KEY_VARIABLE, "from-environment")
    assert serve("m").options.api_key == "from-environment"
    monkeypatch.setattr(sys, "argv", ["ninfer-serve", "m", "--api-key", "secret", "--api-key=secret", "x"])
    run = serve("m", "--api-key", "secret")
    assert run.options.api_key == "secret"
    assert run.options.argv == ("ninfer-serve", "m", "--api-key", "<redacted>", "--api-key=<redacted>", "x")
    assert "secret" not in repr(run.options)
    for bad in ("", "a b", "ä", "a\n"):
        serve("m", "--api-key", bad).refused("--api-key must be printable ASCII")
    monkeypatch.setenv(program.KEY_VARIABLE, "")
    serve("m").refused("$NINFER_API_KEY must be printable")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--foo"], ["unknown argument: --foo"]),
        (["--port"], ["--port needs a value"]),
        (["--port", "x"], ["'x' is not a whole number"]),
        (["--port", "65536"], ["--port must be", "65536"]),
        (["--model-id", ""], ["a model id must not be empty"]),
        (["--model-alias", ""], ["a model id must not be empty"]),
        (["--max-concurrency", "9"], ["--max-concurrency must be", "8", "9"]),
        (["--max-pending-requests", "0"], ["--max-pending-requests must be", "not 0"]),
        (["--pending-timeout-ms", "0"], ["--pending-timeout-ms must be", "not 0"]),
        (["--default-max-tokens", "0"], ["--default-max-tokens must be", "not 0"]),
        (["--default-thinking-budget", "0"], ["--default-thinking-budget must be", "not 0"]),
        (["--default-thinking-budget", "5", "--no-thinking"], ["cannot be combined with --no-thinking"]),
        (["--max-request-mib", "0"], ["--max-request-mib must be", "not 0"]),
        (["--response-store-max-records", "0"], ["--response-store-max-records must be"]),
        (["--response-store-max-mib", "0"], ["--response-store-max-mib must be"]),
        (["--temperature", "3"], ["--temperature must be", "2", "3"]),
        (["--seed", "18446744073709551616"], ["--seed must be"]),
        (["--idle-unload", "0"], ["--idle-unload must be", "not 0"]),
        (["--idle-unload", "nan"], ["--idle-unload must be", "not nan"]),
        (["--drain-timeout", "-1"], ["--drain-timeout must be", "not -1"]),
        (["--request-log-jsonl", ""], ["--request-log-jsonl must not be empty"]),
        (["--prefill-miss-dump", ""], ["--prefill-miss-dump must not be empty"]),
        (["--prefill-miss-min-tokens", "5"], ["--prefill-miss-min-tokens requires --prefill-miss-dump"]),
        (["--prefill-miss-min-match", "0.5"], ["--prefill-miss-min-match requires --prefill-miss-dump"]),
        (["--prefill-miss-dump", "d", "--prefill-miss-min-match", "2"], ["--prefill-miss-min-match must be"]),
        (["--log-speculation-detail"], ["--log-speculation-detail requires --request-log-jsonl"]),
        (
            ["--request-log-jsonl", "f", "--log-speculation-detail-max-steps", "5"],
            ["--log-speculation-detail-max-steps requires --log-speculation-detail"],
        ),
        (
            [
                "--request-log-jsonl=f",
                "--log-speculation-detail",
                "--log-speculation-detail-max-steps=1048577",
            ],
            ["--log-speculation-detail-max-steps must be", "1048576"],
        ),
        (["--host-state-slots", "1"], ["--host-state-slots must be 0"]),
        (["--host-kv-mib", "1"], ["--host-kv-mib must be 0"]),
        (["--max-private-continuations", "1"], ["--max-private-continuations has no counterpart"]),
        (["--max-shared-prefixes", "1"], ["--max-shared-prefixes has no counterpart"]),
        (["--max-long-anchors-per-continuation", "1"], ["has no counterpart", "--kv-capacity"]),
        (["--context-cost-presets", "f"], ["--context-cost-presets has no counterpart"]),
        (["--tp", "2"], ["--tp is not available", "several GPUs"]),
        (["--lm-head-draft"], ["--lm-head-draft require --spec mtp"]),
        (["--spec", "mtp"], ["--spec mtp requires --draft-tokens in [1, 5]"]),
        (["--vision"], ["--vision is not available", "vision"]),
        (["--media-live-mib", "1"], ["--media-live-mib is not available", "vision"]),
        (["--device", "tpu"], ["--device must be cpu, cuda", "not 'tpu'"]),
        (["--log-level", "loud"], ["invalid log level: loud"]),
        (["--kv-dtype", "q4"], ["invalid --kv-dtype: q4"]),
        (["--chat-template", "/no/such/file"], ["cannot read the chat template /no/such/file"]),
        *(
            (
                ["--no-prefix-reuse", flag, "0"],
                ["cannot be combined with context-cache capacity options", flag],
            )
            for flag in (
                "--device-state-slots",
                "--host-state-slots",
                "--host-kv-mib",
                "--max-private-continuations",
                "--max-shared-prefixes",
                "--max-long-anchors-per-continuation",
            )
        ),
    ],
)
def test_bad_options(serve, arguments, words):
    serve("m", *arguments).refused(*words)


def test_turn_anchors_go_with_no_prefix_reuse(serve):
    assert serve("m", "--no-prefix-reuse", "--turn-anchors", 2).code == 0


def test_help_and_usage(serve):
    run = serve("--help")
    assert (run.code, run.err) == (0, "")
    for option in ("--host", "--api-key", "--idle-unload", "--drain-timeout", "--model-alias"):
        assert option in run.out
    assert "--max-shared-prefixes" not in run.out, "options that are only refused"
    run = serve()
    assert run.code == 1
    assert "Usage: ninfer-serve" in run.err
    # Usage belongs to words that aren't understood, not to values that can't be.
    assert "Usage" in serve("m", "--foo").err
    assert "Usage" not in serve("m", "--max-request-mib", 0).err
