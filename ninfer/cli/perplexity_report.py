"""What `ninfer-perplexity` says: progress on stderr, the report file, the table on stdout."""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from ninfer.api import ScorerDescription
from ninfer.api.corpus import Corpus
from ninfer.api.perplexity import Score, StreamScore, total
from ninfer.cli.common import printable
from ninfer.errors import OptionError
from ninfer.runtime.scoring import CHUNK, TILE

_KV_NAMES = {"int8": "int8-g64", "fp8": "fp8-e4m3-r256"}
_TITLE = "fixed-window truncated-context causal perplexity"
_INTERVAL = 10.0


def check_output(folder: Path) -> None:
    """OptionError unless the folder is absent or empty."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise OptionError(f"the output {folder} is not a folder; choose another --output")
    if any(folder.iterdir()):
        raise OptionError(f"the output folder {folder} is not empty; choose another --output")


def default_output(model: ScorerDescription, corpus: Corpus) -> Path:
    """`profiles/perplexity/<name>/<signature>/<kv>/<corpus>/<mode>/<UTC time>`, odd characters replaced."""
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    parts = (model.name, model.prefill_signature, kv_name(model.kv_dtype), corpus.id, corpus.mode, now)
    return Path("profiles", "perplexity", *(re.sub(r"[^A-Za-z0-9_.-]", "-", part) for part in parts))


def kv_name(kv_dtype: str) -> str:
    """The KV format as reports name it, with its group."""
    return _KV_NAMES.get(kv_dtype, kv_dtype)


def document(
    model: ScorerDescription,
    corpus: Corpus,
    scores: Sequence[StreamScore],
    *,
    stride: int,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """The report, schema 2; `scores` are those of the corpus's streams in order."""
    overall = total(score.score for score in scores)
    domains: dict[str, list[Score]] = {}
    for stream, score in zip(corpus.streams, scores, strict=True):
        domains.setdefault(stream.domain, []).append(score.score)
    return {
        "schema_version": 2,
        "metric": {"name": _TITLE, "log_base": "natural"},
        "artifact": {
            "path": model.path,
            "architecture": model.architecture,
            "name": model.name,
            "prefill_signature": model.prefill_signature,
            "formats": list(model.formats),
        },
        "corpus": {
            "id": corpus.id,
            "mode": corpus.mode,
            "source": corpus.source,
            "stream_count": len(corpus.streams),
        },
        "execution": {
            "purpose": "causal_scoring",
            "device": model.device,
            "context_tokens": model.context,
            "stride_tokens": stride,
            "prefill_chunk_tokens": CHUNK,
            "score_tile_tokens": TILE,
            "kv_dtype": kv_name(model.kv_dtype),
        },
        "timing": {
            **seconds,
            "scored_tokens_per_second": overall.scored_tokens / seconds["score_seconds"],
        },
        "overall": _aggregate(overall),
        "domains": [{"domain": domain, **_aggregate(total(domains[domain]))} for domain in sorted(domains)],
        "streams": [
            {
                "id": stream.id,
                "domain": stream.domain,
                "path": stream.path,
                "input_tokens": score.tokens,
                "unscored_tokens": 1,
                "seconds": score.seconds,
                **_aggregate(score.score),
                "windows": _windows(score),
            }
            for stream, score in zip(corpus.streams, scores, strict=True)
        ],
    }


def write(report: Mapping[str, Any], folder: Path) -> Path:
    """`report.json` in the folder, complete or not there at all; returns its path."""
    path, partial = folder / "report.json", folder / "report.json.tmp"
    text = json.dumps(report, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    partial.write_text(text + "\n", encoding="utf-8", newline="\n")
    partial.replace(path)
    return path


def table(report: Mapping[str, Any], path: Path) -> str:
    """The report for a person."""
    artifact, corpus, run = report["artifact"], report["corpus"], report["execution"]
    lines = [
        _TITLE,
        f"artifact {printable(artifact['name'])} ({artifact['prefill_signature']}): {artifact['path']}",
        f"kv {run['kv_dtype']}, corpus {corpus['id']} ({corpus['mode']}), context {run['context_tokens']}, "
        f"stride {run['stride_tokens']}",
        "",
        _row("domain", "tokens", "mean_nll", "ppl"),
    ]
    for item in (*report["domains"], {"domain": "overall", **report["overall"]}):
        numbers = f"{item['mean_nll']:.6f}", f"{item['perplexity']:.6f}"
        lines.append(_row(item["domain"], str(item["scored_tokens"]), *numbers))
    timing = report["timing"]
    lines += [
        "",
        f"scored {timing['scored_tokens_per_second']:.1f} tokens/s in {timing['score_seconds']:.2f} s",
        f"report {path}",
    ]
    return "\n".join(lines)


class Progress:
    """How far scoring is, in tokens fed: one changing line on a terminal, else a line every 10 seconds."""

    def __init__(self, tokens: int, quiet: bool) -> None:
        self._tokens, self._quiet = tokens, quiet
        self._terminal = sys.stderr.isatty()
        self._done = 0
        self._begin = self._shown = perf_counter()

    def on(self, stream: str) -> Callable[[int], None]:
        """A callback for the tokens fed of a stream."""

        def add(tokens: int) -> None:
            self._done += tokens
            now = perf_counter()
            if self._quiet or (not self._terminal and now - self._shown < _INTERVAL):
                return
            self._shown = now
            rate = self._done / max(now - self._begin, 1e-9)
            line = (
                f"{printable(stream)}: {self._done:,} of {self._tokens:,} tokens, {rate:,.0f} tokens/s, "
                f"{(self._tokens - self._done) / max(rate, 1e-9):,.0f} s left"
            )
            before, after = ("\r\033[K", "") if self._terminal else ("", "\n")
            print(f"{before}{line}", end=after, file=sys.stderr, flush=True)

        return add

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal and not self._quiet:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _row(name: str, *cells: str) -> str:
    return f"{name:<24}" + "".join(f"{cell:>16}" for cell in cells)


def _aggregate(score: Score) -> dict[str, Any]:
    return {
        "scored_tokens": score.scored_tokens,
        "total_nll": score.total_nll,
        "mean_nll": score.mean_nll,
        "perplexity": score.perplexity,
    }


def _windows(score: StreamScore) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "input_begin": item.window.begin,
            "input_end": item.window.end,
            "target_begin": item.window.begin + item.window.first_target,
            "target_end": item.window.end,
            "first_target": item.window.first_target,
            "seconds": item.seconds,
            **_aggregate(item.score),
        }
        for index, item in enumerate(score.windows)
    ]
