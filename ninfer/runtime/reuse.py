"""How much of a finished sequence the next prompt can keep."""

from __future__ import annotations

from collections.abc import Sequence


def reusable_tokens(committed: Sequence[int], prompt: Sequence[int], *, recurrent: bool) -> int:
    """Tokens of `prompt` that need no computation, given the tokens that the cache holds.

    All of `committed` if the prompt begins with it. Otherwise a pure-attention model is cut back to the
    common prefix, less one token if that is the whole prompt (its hidden state is gone); a recurrent state
    can't be cut back, so nothing is kept.
    """
    common = 0
    for ours, theirs in zip(committed, prompt, strict=False):
        if ours != theirs:
            break
        common += 1
    if common == len(committed):
        return common
    return 0 if recurrent else min(common, len(prompt) - 1)


def output_limit(requested: int | None, *, max_context: int, prompt_tokens: int) -> tuple[int, bool]:
    """`(tokens, limited_by_context)`: the most that may follow; the last one needs no room in memory."""
    room = max_context - prompt_tokens + 1
    if requested is None or requested > room:
        return room, True
    return requested, False
