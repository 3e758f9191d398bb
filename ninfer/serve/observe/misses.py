"""The prefill-miss dump: prompts that were computed again although most of them had been there before.

It writes conversation text to disk, so it is off unless a folder is named.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ninfer.errors import OptionError
from ninfer.frontend import Frontend
from ninfer.serve.errors import ApiError
from ninfer.serve.observe.background import Background
from ninfer.serve.observe.summary import answers
from ninfer.serve.observe.text import count, groups
from ninfer.serve.observer import Outcome, RequestRecord

CONTEXTS = 16
DUMPS = 64
_AROUND = 96
_WAITING = 256
_logger = logging.getLogger("ninfer.serve.misses")


@dataclass(frozen=True, eq=False)
class Context:
    """What a finished request left: its prompt and output (int32[n]) and the order in which it ended."""

    request: int
    tokens: np.ndarray
    prompt_tokens: int
    ended: int


@dataclass(frozen=True)
class Miss:
    """A prompt of `prompt` tokens of which `reused` needed no computation, beside the context that has most
    in common with it: `common` tokens."""

    request: int
    prompt: int
    reused: int
    old: Context
    common: int

    @property
    def recomputed(self) -> int:
        return self.prompt - self.reused

    @property
    def recomputed_shared(self) -> int:
        return max(self.common - self.reused, 0)

    @property
    def old_after(self) -> int:
        return len(self.old.tokens) - self.common


def find_miss(
    request: int,
    prompt: np.ndarray,
    reused: int,
    contexts: Sequence[Context],
    *,
    min_tokens: int,
    min_match: float,
) -> Miss | None:
    """A miss worth looking at: much was computed again, the best context is really the same conversation, and
    either much of what both share was computed, or much of the old one lies behind the place where they part.
    """
    if len(prompt) - reused < min_tokens or not contexts:
        return None
    best = max(contexts, key=lambda context: (common_prefix(prompt, context.tokens), context.ended))
    miss = Miss(request, len(prompt), reused, best, common_prefix(prompt, best.tokens))
    if miss.common < min_match * len(prompt):
        return None
    return miss if max(miss.recomputed_shared, miss.old_after) >= min_tokens else None


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def reading(miss: Miss) -> list[str]:
    """What the numbers mean, in sentences."""
    lines = []
    if miss.recomputed_shared:
        lines.append(
            f"{count(miss.recomputed_shared)} tokens were computed again although request {miss.old.request} "
            f"had the same ones: its blocks or states were gone, or no state was kept near the end of the "
            f"common part. More --kv-capacity or --device-state-slots helps."
        )
    if miss.common == miss.prompt:
        lines.append("The whole prompt is a beginning of the earlier context.")
    elif miss.common == len(miss.old.tokens):
        lines.append("The prompt continues the earlier context without a change.")
    elif miss.common < miss.old.prompt_tokens:
        lines.append(
            f"The prompts part at token {count(miss.common)} of the old prompt's "
            f"{count(miss.old.prompt_tokens)}: the client changed, moved or removed an earlier message, a "
            f"tool, or a line that changes with each request."
        )
    else:
        lines.append(
            f"The new prompt parts from the old answer {count(miss.common - miss.old.prompt_tokens)} tokens "
            f"after the old prompt: the client sent the answer back changed, or without its reasoning."
        )
    return lines


class MissDump:
    """An `Observer` that keeps the last contexts and writes those that were missed, in a thread."""

    def __init__(self, folder: Path, frontend: Frontend, *, min_tokens: int, min_match: float) -> None:
        """Raises OptionError if the folder is something else."""
        if folder.exists() and not folder.is_dir():
            raise OptionError(f"the prefill-miss dump {folder} is not a folder; name another place")
        self._folder, self._frontend = folder, frontend
        self._min_tokens, self._min_match = min_tokens, min_match
        self._contexts: deque[Context] = deque(maxlen=CONTEXTS)
        self._began: dict[int, int] = {}
        self._ended = 0
        self._dumps = 0
        self._background = Background("prefill-misses", _WAITING)

    def started(self, record: RequestRecord) -> None:
        self._began[record.id] = self._ended

    def rejected(self, record: RequestRecord, error: ApiError) -> None:
        """It computed nothing."""

    def failed(self, record: RequestRecord, error: ApiError) -> None:
        self._began.pop(record.id, None)

    def done(self, record: RequestRecord, outcome: Outcome) -> None:
        began = self._began.pop(record.id, self._ended)
        self._ended += 1
        ended, done = self._ended, answers(outcome)
        begun = [s for s in done if s.prefill_seconds > 0]
        if record.prompt is not None and begun:
            prompt, outputs = record.prompt, [s.token_ids for s in begun]
            # The answer that began first found the cache as it was; those beside it may have used its work.
            reused = begun[0].reused_tokens
            self._background.submit(lambda: self._take(record.id, prompt, outputs, reused, began, ended))

    def response_failed(self, record: RequestRecord, phase: str, error: BaseException) -> None:
        """What was computed is told by `done`."""

    def close(self) -> None:
        self._background.close()

    def _take(
        self,
        request: int,
        prompt: Sequence[int],
        outputs: Sequence[Sequence[int]],
        reused: int,
        began: int,
        ended: int,
    ) -> None:
        tokens = np.array(prompt, np.int32)
        try:
            # What ended after this request began couldn't have been reused.
            earlier = [context for context in self._contexts if context.ended <= began]
            miss = find_miss(
                request, tokens, reused, earlier, min_tokens=self._min_tokens, min_match=self._min_match
            )
            if miss is not None and self._dumps < DUMPS:
                self._dumps += 1
                self._write(miss, tokens)
        except Exception as error:
            words = error.strerror if isinstance(error, OSError) else None
            _logger.warning(groups("prefill miss not written", words or type(error).__name__))
        for output in outputs:
            both = np.concatenate([tokens, np.array(output, np.int32)])
            self._contexts.append(Context(request, both, len(tokens), ended))

    def _write(self, miss: Miss, prompt: np.ndarray) -> None:
        name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{self._dumps:03d}"
        folder = self._folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        files = {
            "new_prompt.txt": self._text(prompt),
            "old_context.txt": self._text(miss.old.tokens),
            "new_prompt.tokens.json": json.dumps(prompt.tolist()),
            "old_context.tokens.json": json.dumps(miss.old.tokens.tolist()),
            "summary.json": json.dumps(self._summary(miss, prompt), indent=2, ensure_ascii=False),
        }
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8", errors="backslashreplace")
        _logger.warning(
            groups(
                f"req#{miss.request} prefill miss",
                f"computed {count(miss.recomputed)} of {count(miss.prompt)}",
                f"common with req#{miss.old.request} {count(miss.common)}",
                f"conversation text in {os.fspath(folder)}",
            )
        )

    def _summary(self, miss: Miss, prompt: np.ndarray) -> dict[str, Any]:
        at, old = miss.common, miss.old
        return {
            "new_request": miss.request,
            "new_prompt_tokens": miss.prompt,
            "reused_tokens": miss.reused,
            "recomputed_tokens": miss.recomputed,
            "old_request": old.request,
            "old_context_tokens": len(old.tokens),
            "old_prompt_tokens": old.prompt_tokens,
            "common_prefix_tokens": at,
            "recomputed_shared_tokens": miss.recomputed_shared,
            "old_tokens_after_divergence": miss.old_after,
            "divergence": {
                "token_index": at,
                "inside_old_prompt": at < old.prompt_tokens,
                "shared_before": self._text(prompt[max(at - _AROUND, 0) : at]),
                "new_after": self._text(prompt[at : at + _AROUND]),
                "old_after": self._text(old.tokens[at : at + _AROUND]),
            },
            "reading": reading(miss),
        }

    def _text(self, tokens: np.ndarray) -> str:
        return self._frontend.decode(tokens.tolist(), keep_special=True)
