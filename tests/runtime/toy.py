"""A model without weights whose next token depends on everything that a real one's would.

The most likely token after a sequence is a hash of all tokens with their positions (read back through the
page table) and of a recurrent state that can't be rolled back. A slip in any of them changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ninfer.models import Batch, Cache, KvLayout, Predictor, Records, StateLayout
from ninfer.ops import KvPages

PUBLIC = 97
_MODULUS = 9973


def expected_token(tokens: Sequence[int], recurrent: bool = True) -> int:
    """What the toy predicts after `tokens`."""
    keys = sum((position + 1) * (token + 1) for position, token in enumerate(tokens))
    state = 0
    for token in tokens:
        state = _advanced(state, token)
    return (keys + state * recurrent) % PUBLIC


def expected_answer(prompt: Sequence[int], count: int, recurrent: bool = True) -> list[int]:
    """`count` greedy tokens after `prompt`."""
    ledger = list(prompt)
    for _ in range(count):
        ledger.append(expected_token(ledger, recurrent))
    return ledger[len(prompt) :]


def _advanced(state: int, token: int) -> int:
    return (state * 31 + token + 1) % _MODULUS


class ToyPredictor:
    """Knows what the toy will say, if every token and every hidden state that it needs was given to it.

    It reads the sequence back from its own pages, and the first token from the first hidden state; a hidden
    state that isn't the toy's at that place makes the guess a wrong one. `lies(n)`: it guesses wrong after n
    tokens.
    """

    def __init__(self, recurrent: bool = True, lies: Callable[[int], bool] = lambda count: False) -> None:
        self._recurrent, self._lies = recurrent, lies
        self.token_ids: torch.Tensor | None = None

    def forward(
        self,
        batch: Batch,
        hidden: torch.Tensor,
        pages: KvPages,
        last: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        self.fill(batch, hidden, pages)
        keys, firsts = pages.k.view(-1), pages.v.view(-1)
        out = torch.zeros(len(batch.tokens), PUBLIC)
        width = len(batch.tokens) // batch.rows
        for column, position in enumerate(batch.positions.tolist()):
            if position < 0:
                continue
            table = batch.page_table[column // width].tolist()
            rows = [table[p // 64] * 64 + p % 64 for p in range(position + 1)]
            ledger = [int(firsts[rows[0]]) - 1, *(int(keys[row]) - 1 for row in rows)]
            wrong = self._lies(len(ledger))
            wrong |= int(hidden[column].argmax()) != expected_token(ledger[:-1], self._recurrent)
            out[column, (expected_token(ledger, self._recurrent) + wrong) % PUBLIC] = 5.0
        return out if last is None else out.view(batch.rows, width, -1)[range(batch.rows), last[0] - 1]

    def score(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.float(), x

    def fill(self, batch: Batch, hidden: torch.Tensor, pages: KvPages) -> None:
        width = len(batch.tokens) // batch.rows
        for column, (token, position) in enumerate(
            zip(batch.tokens.tolist(), batch.positions.tolist(), strict=True)
        ):
            if position < 0:
                continue
            place = int(batch.page_table[column // width, position // 64]) * 64 + position % 64
            pages.k.view(-1)[place] = token + 1
            if position == 0:
                inverse = 49 if self._recurrent else 1  # of what the toy multiplies x[0] + 1 with
                pages.v.view(-1)[place] = int(hidden[column].argmax()) * inverse % PUBLIC

    def workspace_bytes(self, columns: int, context: int) -> int:
        return 4 * PUBLIC * columns

    def round_bytes(self, columns: int, context: int, wanted: int) -> int:
        return 4 * PUBLIC * columns


class ToyModel:
    """Implements `ninfer.models.Model`; feeding position `fail_at` breaks a pass half-way."""

    def __init__(
        self,
        recurrent: bool = True,
        max_position_embeddings: int = 4096,
        predictor: ToyPredictor | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.hidden_size = PUBLIC
        self.public_tokens = PUBLIC
        self.max_position_embeddings = max_position_embeddings
        self.predictor: Predictor | None = predictor
        self.recurrent = recurrent
        self.fail_at: int | None = None
        self.widths: list[int] = []

    def kv_layout(self) -> KvLayout:
        return KvLayout(1 + (self.predictor is not None), 1, 1, self.dtype)

    def state_layout(self) -> StateLayout:
        hidden = 0 if self.predictor is None else PUBLIC
        if not self.recurrent:
            return StateLayout.none(self.dtype, hidden)
        return StateLayout(1, 1, 1, 1, 1, 1, 1, self.dtype, hidden)

    def workspace_bytes(self, columns: int, context: int) -> int:
        return 4 * PUBLIC * columns

    def round_bytes(self, columns: int, context: int) -> int:
        return 4 * PUBLIC * columns

    def forward(self, batch: Batch, cache: Cache, records: Records | None = None) -> torch.Tensor:
        tokens, positions = batch.tokens.tolist(), batch.positions.tolist()
        self.widths.append(len(tokens))
        keys = cache.kv[0].k.view(-1)
        hidden = torch.zeros(len(tokens), PUBLIC)
        width = len(tokens) // batch.rows
        for row in range(batch.rows):
            pages = batch.page_table[row].tolist()
            state = self._state(cache, int(batch.source_slots[row]))
            for column in range(row * width, (row + 1) * width):
                token, position = tokens[column], positions[column]
                if position < 0:
                    continue
                keys[pages[position // 64] * 64 + position % 64] = token + 1
                state = _advanced(state, token)
                if self.recurrent and records is None:
                    cache.recurrent[0][int(batch.target_slots[row])] = state
                elif self.recurrent and records is not None:
                    share = len(records.conv[0]) // batch.rows
                    records.conv[0][row * share + column - row * width] = token
                if position == self.fail_at:
                    raise KeyboardInterrupt
                rows = [pages[p // 64] * 64 + p % 64 for p in range(position + 1)]
                total = int((keys[rows] * torch.arange(1, position + 2)).sum())
                hidden[column, (total + state * self.recurrent) % PUBLIC] = 5.0
        return hidden

    def fold(
        self,
        cache: Cache,
        records: Records,
        counts: torch.Tensor,
        source_slots: torch.Tensor,
        target_slots: torch.Tensor,
    ) -> None:
        if not self.recurrent:
            return
        share = len(records.conv[0]) // len(counts)
        for row, count in enumerate(counts.tolist()):
            state = self._state(cache, int(source_slots[row]))
            for token in records.conv[0][row * share : row * share + count, 0].tolist():
                state = _advanced(state, int(token))
            if count:
                cache.recurrent[0][int(target_slots[row])] = state

    def _state(self, cache: Cache, slot: int) -> int:
        return int(cache.recurrent[0][slot]) if self.recurrent and slot >= 0 else 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float()
