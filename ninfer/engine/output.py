"""What the engine asks of the frontend while tokens are made; implemented there without importing us."""

from collections.abc import Sequence
from typing import Protocol

from ninfer.events import FinishReason, Step


class OutputSession(Protocol):
    """The text side of one request: what may be published, and where the output ends.

    `closer` is the token span that closes a thinking block whose budget is used up (`closer_due`); the engine
    commits it unsampled. Counters cover the tokens seen so far.
    """

    closer: tuple[int, ...]
    finish: FinishReason | None
    reasoning_tokens: int
    thinking_model_tokens: int
    control_tokens: int

    @property
    def closer_due(self) -> bool: ...

    @property
    def thinking_remaining(self) -> int | None: ...

    def accept(self, token_ids: Sequence[int]) -> Step: ...

    def commit_closer(self) -> Step: ...

    def close(self) -> Step: ...
