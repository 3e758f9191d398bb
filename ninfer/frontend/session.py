"""Turning the tokens of one answer into published text.

Token bytes become characters (`detokenizer`), characters go to the reasoning or the content channel, stop
strings end the output (`stops`). What might be the beginning of a marker or of a stop string is held back.
"""

from collections.abc import Iterable, Sequence

from ninfer.events import Channel, Delta, FinishReason, Step
from ninfer.frontend.detokenizer import Detokenizer
from ninfer.frontend.stops import Scanner
from ninfer.frontend.thinking import CLOSE
from ninfer.frontend.tokenizer import Tokenizer

_SPACE = " \t\r\n"


class OutputSession:
    """The output of one request, from its first generated token to its end; single-threaded.

    Offer generated tokens with `push` or `accept`, then call `close` once generation ends for another reason
    than a stop found here. Work per token is amortised O(length of its text), whatever came before.

    Thinking budget: `thinking_remaining` bounds the next round; once it is 0, `closer_due` is true and the
    engine commits `closer` to the sequence unsampled and reports it with `commit_closer`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        starts_in_thinking: bool,
        stop: Sequence[str],
        reasoning_stop: Sequence[str],
        stop_token_ids: Iterable[int],
        raw: bool,
        thinking_budget: int | None,
        closer: tuple[int, ...],
    ) -> None:
        """Arguments are checked by `Frontend.session`; `raw` publishes everything as content, unsplit."""
        self._text = Detokenizer(tokenizer, keep_special=raw)
        self._stop_ids = frozenset(stop_token_ids)
        self._raw = raw
        self._content_scanner = Scanner(stop)
        # A stop declared before the marker wins where both begin at one character.
        self._reasoning_scanner = Scanner((*reasoning_stop, CLOSE))
        self._marker = len(reasoning_stop)
        self._thinking = starts_in_thinking
        self._skip_space = False
        self._closed = False
        self._held = ""
        self._deltas: list[Delta] = []
        self._budget = thinking_budget if starts_in_thinking else None
        self.closer = closer
        self.finish: FinishReason | None = None
        self.reasoning_tokens = 0
        self.thinking_model_tokens = 0
        self.control_tokens = 0

    @property
    def thinking_remaining(self) -> int | None:
        """How many more tokens may be generated inside the open block; None if nothing limits them."""
        if self._budget is None or not self._thinking:
            return None
        return self._budget - self.thinking_model_tokens

    @property
    def closer_due(self) -> bool:
        """Whether the thinking budget is used up and `closer` has to be committed next."""
        return self.finish is None and self.thinking_remaining == 0

    def push(self, token_id: int) -> Step:
        """Take in one generated token. Raises FrontendError if the id is not public."""
        return self.accept((token_id,))

    def accept(self, token_ids: Sequence[int]) -> Step:
        """Take in the tokens of a round, up to a stop: `committed` of them belong to the output.

        The caller keeps to `thinking_remaining`. Raises FrontendError if an id is not public.
        """
        self._require_open()
        committed = 0
        for token_id in token_ids:
            text = self._text.push(token_id) if token_id not in self._stop_ids else ""
            committed += 1
            if self._thinking:
                self.reasoning_tokens += 1
                self.thinking_model_tokens += 1
            if token_id in self._stop_ids:
                self._flush()
                self.finish = FinishReason.STOP_TOKEN
            elif text:
                self._route(text)
            if self.finish is not None:
                break
        return self._step(committed)

    def commit_closer(self) -> Step:
        """Report that `closer` was committed. Its text is published; stop strings do not apply to it."""
        self._require_open()
        if not self._thinking:
            raise RuntimeError("the thinking block is already closed")
        self._flush()
        text = ""
        for token_id in self.closer:
            self.control_tokens += 1
            self.reasoning_tokens += CLOSE not in text
            text += self._text.push(token_id)
        before, marker, after = text.partition(CLOSE)
        self._publish(before)
        self._enter_content(marker)
        self._route(after)
        return self._step(len(self.closer))

    def close(self) -> Step:
        """End the output here and publish what was held back. After a stop nothing is left to publish."""
        if self.finish is None and not self._closed:
            self._flush()
        self._closed = True
        return self._step(0)

    def _require_open(self) -> None:
        if self.finish is not None or self._closed:
            raise RuntimeError("tokens were offered to an output that has ended")

    def _route(self, text: str) -> None:
        """Publish `text` as far as it is decided, following channel changes and stops."""
        while text:
            if self._skip_space:
                bare = text.lstrip(_SPACE)
                if self._raw:
                    self._publish(text[: len(text) - len(bare)])
                if not bare:
                    return
                text, self._skip_space = bare, False
            scanner = self._reasoning_scanner if self._thinking else self._content_scanner
            window = self._held + text
            match = scanner.feed(text)
            if match is None:
                settled = len(window) - scanner.pending
                self._held = window[settled:]
                self._publish(window[:settled])
                return
            self._held = ""
            self._publish(window[: match.begin])
            if not self._thinking or match.pattern != self._marker:
                self.finish = FinishReason.STOP_STRING
                return
            self._enter_content(window[match.begin : match.end])
            text = window[match.end :]

    def _enter_content(self, marker: str) -> None:
        if self._raw:
            self._publish(marker)
        self._thinking = False
        self._skip_space = True

    def _flush(self) -> None:
        """Publish everything held back: nothing follows that could complete it."""
        tail = self._held + self._text.close()
        self._held = ""
        self._publish(tail.lstrip(_SPACE) if self._skip_space and not self._raw else tail)

    def _publish(self, text: str) -> None:
        if not text:
            return
        channel = Channel.REASONING if self._thinking and not self._raw else Channel.CONTENT
        if self._deltas and self._deltas[-1].channel is channel:
            text = self._deltas.pop().text + text
        self._deltas.append(Delta(channel, text))

    def _step(self, committed: int) -> Step:
        deltas, self._deltas = tuple(self._deltas), []
        return Step(deltas, self.finish, committed)
