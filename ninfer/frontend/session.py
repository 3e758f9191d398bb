"""Turning the tokens of one answer into published text.

Token bytes become characters (`detokenizer`), characters go to the reasoning, content or tool channel, stop
strings end the output (`stops`). What might be the beginning of a marker or of a stop string is held back.

Where calls are looked for, space at the end of content is held back too: with the space behind a call it
belongs to the call, so that content before a call comes trimmed. Stop strings don't apply to calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from ninfer.events import Channel, Delta, FinishReason, Step
from ninfer.frontend.calls import OPEN as CALL
from ninfer.frontend.calls import SPACE, CallRegion
from ninfer.frontend.constraint import Constraint, forbid
from ninfer.frontend.detokenizer import Detokenizer
from ninfer.frontend.stops import Scanner
from ninfer.frontend.thinking import CLOSE
from ninfer.frontend.tokenizer import Tokenizer


class OutputSession:
    """The output of one request, from its first generated token to its end; single-threaded.

    Offer generated tokens with `push` or `accept`, then call `close` once generation ends for another reason
    than a stop found here. Work per token is amortised O(length of its text), whatever came before.

    Thinking budget: `thinking_remaining` bounds the next round; once it is 0, `closer_due` is true and the
    engine commits `closer` to the sequence unsampled and reports it with `commit_closer`.

    A constraint holds outside of the thinking block: `fill_masks` says what may be sampled.
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
        calls: bool,
        thinking_budget: int | None,
        closer: tuple[int, ...],
        constraint: Constraint | None = None,
        single_call: bool = False,
    ) -> None:
        """Arguments are checked by `Frontend.session`; `raw` publishes everything as content, unsplit, else
        `calls` gives tool calls a channel of their own. `single_call` ends the output behind the first."""
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer, keep_special=raw)
        self._stop_ids = frozenset(stop_token_ids)
        self._raw = raw
        self._calls = calls and not raw
        self._plain = not stop and not self._calls
        """Is nothing looked for in the content?"""
        # A stop declared before the marker wins where both begin at one character.
        self._content_scanner = Scanner((*stop, CALL) if self._calls else stop)
        self._reasoning_scanner = Scanner((*reasoning_stop, CLOSE))
        self._stops = {Channel.CONTENT: tuple(stop), Channel.REASONING: tuple(reasoning_stop)}
        self._channel = Channel.REASONING if starts_in_thinking else Channel.CONTENT
        self._call = CallRegion()
        self._space: list[str] = []
        self._skip_space = False
        self._closed = False
        self._held = ""
        self._deltas: list[Delta] = []
        self._budget = thinking_budget if starts_in_thinking else None
        self._constraint = constraint
        self._single_call = single_call
        self._opening = ""
        """What the token that closed the thinking block says behind the marker, less space."""
        self.closer = closer
        self.finish: FinishReason | None = None
        self.stop_string: str | None = None
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
        return self._budget is not None and self.finish is None and self.thinking_remaining == 0

    @property
    def constrained(self) -> bool:
        """Will a mask ever be needed? Fixed for the session's life."""
        return self._constraint is not None

    def fill_masks(self, drafts: Sequence[int], masks: np.ndarray) -> int:
        """Which tokens may come next: row 0 of `masks` (int32 `[1 + len(drafts), words]`, bit i of word w is
        token 32 w + i), and after each draft that is allowed. Returns how many rows are valid: 0 if nothing
        is forbidden at the moment, fewer than all if a draft is not allowed. Changes nothing. Raises
        GrammarError if the constraint can't go on."""
        if self._constraint is None or self.finish is not None:
            return 0
        if not self._thinking:
            return self._constraint.fill(drafts, masks)
        free, closed = self._free(drafts)
        if not (closed or self._must_follow):
            return 0
        # Thinking is free but for its end: where something must follow, the answer may not stop before it.
        masks[:free] = -1
        if self._must_follow:
            masks[:free, : len(self._unstopped)] = self._unstopped
        return free + self._constraint.fill(drafts[free:], masks[free:]) if closed else free

    def _free(self, drafts: Sequence[int]) -> tuple[int, bool]:
        """How many rows of masks stand inside the open thinking block, the one behind the last allowed draft
        included, and whether a draft closes the block."""
        text, marker = self._held.encode(), CLOSE.encode()
        for count, draft in enumerate(drafts, 1):
            if draft in self._stop_ids:
                return count, False
            if self._raw or not self._tokenizer.is_special(draft):
                text = text[-len(marker) :] + self._tokenizer.token_bytes(draft)
            if marker in text:
                return count, True
        return len(drafts) + 1, False

    @cached_property
    def _must_follow(self) -> bool:
        """Is an empty answer against the constraint? Asked for while there is no answer yet."""
        assert self._constraint is not None
        row = np.zeros((1, len(self._unstopped)), np.int32)
        self._constraint.fill((), row)
        return not (row & ~self._unstopped).any()

    @cached_property
    def _unstopped(self) -> np.ndarray:
        """What may come inside the thinking block, int32 `[words]`: all but the stop tokens, if an answer
        must follow."""
        row = np.full((self._tokenizer.public_tokens + 31) // 32, -1, np.int32)
        forbid(row, self._stop_ids)
        return row

    @property
    def _thinking(self) -> bool:
        return self._channel is Channel.REASONING

    def push(self, token_id: int) -> Step:
        """Take in one generated token. Raises FrontendError if the id is not public."""
        return self.accept((token_id,))

    def accept(self, token_ids: Sequence[int]) -> Step:
        """Take in the tokens of a round, up to a stop: `committed` of them belong to the output.

        The caller keeps to `thinking_remaining`. Raises FrontendError if an id is not public.
        """
        self._require_open()
        committed = 0
        content: list[int] = []
        for token_id in token_ids:
            stops = token_id in self._stop_ids
            text = "" if stops else self._text.push(token_id)
            committed += 1
            thought = self._thinking
            if thought:
                self.reasoning_tokens += 1
                self.thinking_model_tokens += 1
            if stops:
                self._flush()
                self.finish = FinishReason.STOP_TOKEN
            elif text:
                self._route(text)
            if self.finish is not None:
                break
            if self._constraint is not None:
                self._follow(token_id, thought)
            if self._raw or (
                self._channel is Channel.CONTENT
                and not (thought or self._skip_space or self._tokenizer.is_special(token_id))
            ):
                content.append(committed - 1)
        return self._step(committed, tuple(content))

    def _follow(self, token_id: int, thought: bool) -> None:
        """Tell the constraint of a token; `thought`: it began inside the thinking block."""
        assert self._constraint is not None
        if not thought:
            self._constraint.accept(token_id)
        elif self._opening:
            # Only a marker that isn't written as one token can be followed by more in the same token.
            all(map(self._constraint.accept, self._tokenizer.encode(self._opening)))

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
        if self._plain and self._channel is Channel.CONTENT and not self._skip_space:
            self._publish(text)
            return
        while text:
            if self._channel is Channel.TOOL:
                size = self._call.feed(text)
                self._publish(text[:size])
                text = text[size:]
                if self._single_call and self._call.closed:
                    self.finish = FinishReason.STOP_TOKEN
                    return
                if text:
                    self._channel = Channel.CONTENT
                continue
            if self._skip_space:
                bare = text.lstrip(SPACE)
                if self._raw:
                    self._publish(text[: len(text) - len(bare)])
                if not bare:
                    return
                text, self._skip_space = bare, False
            scanner = self._reasoning_scanner if self._thinking else self._content_scanner
            window = self._held + text
            match = scanner.feed(text)
            settled = len(window) - scanner.pending if match is None else match.begin
            self._held = window[settled:] if match is None else ""
            self._settle(window[:settled])
            if match is None:
                return
            stops = self._stops[self._channel]
            if match.pattern < len(stops):
                self._release_space()
                self.stop_string = stops[match.pattern]
                self.finish = FinishReason.STOP_STRING
                return
            marker, text = window[match.begin : match.end], window[match.end :]
            if self._thinking:
                self._enter_content(marker)
                self._opening = text.lstrip(SPACE)
            else:
                self._enter_call(marker)

    def _settle(self, text: str) -> None:
        """Publish `text`, in which nothing was found, up to the space that might belong to a call."""
        if not self._calls or self._thinking:
            self._publish(text)
            return
        bare = text.rstrip(SPACE)
        if bare:
            self._release_space()
            self._publish(bare)
        if len(bare) < len(text):
            self._space.append(text[len(bare) :])

    def _release_space(self) -> None:
        self._publish("".join(self._space))
        self._space.clear()

    def _enter_content(self, marker: str) -> None:
        if self._raw:
            self._publish(marker)
        self._channel = Channel.CONTENT
        self._skip_space = True

    def _enter_call(self, marker: str) -> None:
        self._channel = Channel.TOOL
        self._call = CallRegion()
        self._content_scanner.restart()
        self._release_space()
        self._publish(marker)

    def _flush(self) -> None:
        """Publish everything held back: nothing follows that could complete it."""
        tail = self._held + self._text.close()
        self._held = ""
        if self._channel is Channel.TOOL and self._call.feed(tail) < len(tail):
            self._channel = Channel.CONTENT
        self._release_space()
        self._publish(tail.lstrip(SPACE) if self._skip_space and not self._raw else tail)

    def _publish(self, text: str) -> None:
        if not text:
            return
        channel = Channel.CONTENT if self._raw else self._channel
        if self._deltas and self._deltas[-1].channel is channel:
            text = self._deltas.pop().text + text
        self._deltas.append(Delta(channel, text))

    def _step(self, committed: int, content: tuple[int, ...] = ()) -> Step:
        deltas, self._deltas = tuple(self._deltas), []
        return Step(deltas, self.finish, committed, content)
