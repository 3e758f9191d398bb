"""What the engine asks of the frontend while tokens are made; implemented there without importing us."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ninfer.events import FinishReason, Step

if TYPE_CHECKING:
    import numpy as np


class OutputSession(Protocol):
    """The text side of one request: what may be published, and where the output ends.

    `closer` is the token span that closes a thinking block whose budget is used up (`closer_due`); the engine
    commits it unsampled. Counters cover the tokens seen so far.
    """

    closer: tuple[int, ...]
    finish: FinishReason | None
    stop_string: str | None
    reasoning_tokens: int
    thinking_model_tokens: int
    control_tokens: int

    @property
    def constrained(self) -> bool:
        """Will a mask ever be needed? Fixed for the session's life."""
        ...

    def fill_masks(self, drafts: Sequence[int], masks: np.ndarray) -> int:
        """Which tokens may come next: row 0 of `masks` (int32 `[1 + len(drafts), words]`, bit i of word w is
        token 32 w + i), and after each draft that is allowed. Returns how many rows are valid: 0 if nothing
        is forbidden, neither at the moment nor after any of the drafts, fewer than all if a draft is not
        allowed. Changes nothing."""
        ...

    @property
    def closer_due(self) -> bool: ...

    @property
    def thinking_remaining(self) -> int | None: ...

    def accept(self, token_ids: Sequence[int]) -> Step: ...

    def commit_closer(self) -> Step: ...

    def close(self) -> Step: ...
