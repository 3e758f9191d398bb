"""Where the drafts of a round come from, and how many of them a request can use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ninfer.engine.units import penalized

if TYPE_CHECKING:
    from ninfer.engine.request import Ticket
    from ninfer.runtime.plan import Plan


class DraftSource(Protocol):
    """Guesses what comes next; wrong guesses cost time, never correctness."""

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """Up to `limit` tokens that may follow `tokens` (the prompt and all committed output)."""
        ...


def propose(source: DraftSource | None, ticket: Ticket, plan: Plan, public_tokens: int) -> list[int]:
    """Drafts for a request's next round, none beyond what may be committed after it. Without a source they
    are those that the model's own predictor made in the unit before."""
    assert ticket.sequence is not None, "only admitted requests take part in rounds"
    limit = min(
        plan.shape.width - 1,
        ticket.budget.output - len(ticket.output) - 1,
        plan.max_context - ticket.sequence.frontier - 1,
    )
    remaining = ticket.session.thinking_remaining
    if remaining is not None:
        limit = min(limit, remaining - 1)
    if limit < 1:
        return []
    if source is None:
        return ticket.drafts[:limit]
    if penalized(ticket.request.sampling):
        return []
    drafts = source.propose(ticket.sequence.ledger, limit)[:limit]
    return [token for token in drafts if 0 <= token < public_tokens]
