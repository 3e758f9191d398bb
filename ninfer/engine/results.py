"""What units of work yielded: reading the Program's records, and what it means for each request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ninfer.engine.events import Output
from ninfer.errors import GrammarError, ModelError
from ninfer.events import Channel, Step, TokenLogprob

if TYPE_CHECKING:
    import numpy as np

    from ninfer.engine.request import Ticket

_NO_TOKEN = -3


class Results:
    """The newest egress record; single numbers come through memory views (through NumPy they cost more)."""

    def __init__(self) -> None:
        self._egress: np.ndarray | None = None

    def take(self, egress: np.ndarray) -> float:
        """From now on read this one; its device seconds."""
        if egress is not self._egress:
            self._egress, self._seconds = egress, egress["seconds"].data
            self._tokens, self._produced = egress["tokens"][0].data, egress["produced"][0].data
            self._logprob = egress["logprob"][0].data
            self._top_ids, self._top_logprobs = egress["top_ids"][0], egress["top_logprobs"][0]
            self._drafts = egress["drafts"][0] if "drafts" in (egress.dtype.names or ()) else None
        return self._seconds[0]

    def offers(self, rows: int, width: int) -> list[list[int]]:
        """The tokens of each row of a round that stand."""
        tokens = self._tokens[: rows * width].tolist()
        if width == 1:
            return [[token] for token in tokens]
        produced = self._produced[:rows].tolist()
        return [tokens[row * width : row * width + count] for row, count in enumerate(produced)]

    def drafts(self, rows: int) -> list[list[int]]:
        """What the model's predictor proposes for the next round of each row."""
        if self._drafts is None:
            return [[] for _ in range(rows)]
        proposed = self._drafts[:rows].tolist()
        return [row[: row.index(-1)] if -1 in row else row for row in proposed]

    def collect(self, ticket: Ticket, step: Step | Exception, column: int) -> None:
        """Keep the log-probabilities of the content among a row's tokens, which begin at `column`."""
        wanted = ticket.request.logprobs
        if wanted is None or isinstance(step, Exception):
            return
        for index in step.content_tokens:
            at = column + index
            ids, values = self._top_ids[at, :wanted].tolist(), self._top_logprobs[at, :wanted].tolist()
            top = tuple((id_, value) for id_, value in zip(ids, values, strict=True) if id_ >= 0)
            ticket.logprobs.append(TokenLogprob(self._tokens[at], self._logprob[at], top))


def preview(ticket: Ticket, tokens: list[int]) -> Step | Exception:
    """How many of the tokens belong to the output, and what they mean; an error is the request's own."""
    if min(tokens) < 0:
        # What stands before it may end the output; if not, the next round comes to the same place.
        tokens = tokens[: next(index for index, token in enumerate(tokens) if token < 0)] or tokens
        if tokens[0] == _NO_TOKEN:
            return GrammarError(
                "the grammar allows no token here: what it wants next can't be written with this model's "
                "tokens; simplify the schema or the grammar"
            )
        if tokens[0] < 0:
            return ModelError("the model's scores aren't finite; the weights are damaged")
    try:
        return ticket.session.accept(tokens)
    except Exception as error:
        return error


def publish(ticket: Ticket, step: Step, now: float, *, last: bool = False) -> None:
    """Send a step's text, and with the first content what is known of its tokens; `last`: nothing follows."""
    deltas = step.deltas
    if not deltas:
        return
    first, generated, told = ticket.first_token, len(ticket.output), ()
    seconds = 0.0 if first is None else now - first
    for delta in deltas:
        if ticket.logprobs and (delta.channel is Channel.CONTENT or (last and delta is deltas[-1])):
            told, ticket.logprobs = tuple(ticket.logprobs), []
        ticket.mailbox.put_text(Output(delta.channel, delta.text, told, generated, seconds))
        told = ()
