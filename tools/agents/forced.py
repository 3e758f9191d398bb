"""An output session that allows exactly one next token: the scripted one.

The model computes and the sampler draws as always; the mask leaves them no choice.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ninfer.events import Step
from ninfer.frontend import Frontend, Prompt
from tools.agents import script

_CONTROLS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>")


class ForcedSession:
    """Wraps the session of one request; `tokens` is its whole output, `content` where it follows thinking."""

    def __init__(self, session: Any, tokens: Sequence[int], content: int) -> None:
        self._session, self._tokens, self._content = session, tokens, content
        self._position = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    @property
    def constrained(self) -> bool:
        return True

    def fill_masks(self, drafts: Sequence[int], masks: np.ndarray) -> int:
        """See `ninfer.engine.output.OutputSession`."""
        valid = 0
        for token in self._tokens[self._position : self._position + 1 + len(drafts)]:
            masks[valid] = 0
            masks.view(np.uint32)[valid, token // 32] = np.uint32(1) << np.uint32(token % 32)
            valid += 1
            if valid > len(drafts) or drafts[valid - 1] != token:
                break
        return valid

    def accept(self, token_ids: Sequence[int]) -> Step:
        step = self._session.accept(token_ids)
        self._position += step.committed
        return step

    def commit_closer(self) -> Step:
        self._position = self._content
        return self._session.commit_closer()


def scripted_session(frontend: Frontend, prompt: Prompt, session: Any) -> ForcedSession:
    """The forced form of `session`: what `script` answers to `prompt`."""
    text = script.answer(_messages(frontend, prompt), thinking=prompt.starts_in_thinking)
    head, mark, tail = text.rpartition("</think>\n\n")
    before = _encode(frontend, head + mark)
    return ForcedSession(session, before + _encode(frontend, tail + "<|im_end|>"), len(before))


def _messages(frontend: Frontend, prompt: Prompt) -> list[str]:
    ends = sorted({0, *prompt.boundaries, len(prompt.tokens)})
    return [frontend.decode(prompt.tokens[a:b], keep_special=True) for a, b in itertools.pairwise(ends)]


def _encode(frontend: Frontend, text: str) -> list[int]:
    """Ids of `text` as the model would write it, markers as its control tokens."""
    controls = _controls(frontend)
    ids: list[int] = []
    while text:
        begin, spelling = min(
            (at, c) for c in (*controls, "") if (at := text.find(c) if c else len(text)) >= 0
        )
        ids += frontend.encode(text[:begin])
        if spelling:
            ids.append(controls[spelling])
        text = text[begin + len(spelling) :]
    return ids


@functools.cache
def _controls(frontend: Frontend) -> dict[str, int]:
    spelled = (
        (frontend.decode((token,), keep_special=True), token) for token in range(frontend.public_tokens)
    )
    return {spelling: token for spelling, token in spelled if spelling in _CONTROLS}
