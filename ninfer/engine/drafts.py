"""Where the drafts of a round come from."""

from collections.abc import Sequence
from typing import Protocol


class DraftSource(Protocol):
    """Guesses what comes next; wrong guesses cost time, never correctness."""

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """Up to `limit` tokens that may follow `tokens` (the prompt and all committed output)."""
        ...
