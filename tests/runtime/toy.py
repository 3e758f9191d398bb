"""A model without weights whose next token depends on everything that a real one's would.

The most likely token after a sequence is a hash of all tokens with their positions (read back through the
page table) and of a recurrent state that can't be rolled back. A slip in any of them changes it.
"""

from collections.abc import Sequence

import torch

from ninfer.models import Batch, Cache, KvLayout, StateLayout

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


class ToyModel:
    """Implements `ninfer.models.Model`; feeding position `fail_at` breaks a pass half-way."""

    def __init__(self, recurrent: bool = True, max_position_embeddings: int = 4096) -> None:
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.hidden_size = PUBLIC
        self.public_tokens = PUBLIC
        self.max_position_embeddings = max_position_embeddings
        self.recurrent = recurrent
        self.fail_at: int | None = None
        self.widths: list[int] = []

    def kv_layout(self) -> KvLayout:
        return KvLayout(1, 1, 1, self.dtype)

    def state_layout(self) -> StateLayout:
        return StateLayout(1, 1, 1, 1, 1, 1, self.dtype) if self.recurrent else StateLayout.none(self.dtype)

    def forward(self, batch: Batch, cache: Cache) -> torch.Tensor:
        tokens, positions = batch.tokens.tolist(), batch.positions.tolist()
        self.widths.append(len(tokens))
        pages = batch.page_table[0].tolist()
        keys = cache.kv[0].k.view(-1)
        source, target = int(batch.source_slots), int(batch.target_slots)
        state = int(cache.recurrent[0][source]) if self.recurrent else 0
        hidden = torch.zeros(len(tokens), PUBLIC)
        for column, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            keys[pages[position // 64] * 64 + position % 64] = token + 1
            state = _advanced(state, token)
            if self.recurrent:
                cache.recurrent[0][target] = state
            if position == self.fail_at:
                raise KeyboardInterrupt
            rows = [pages[p // 64] * 64 + p % 64 for p in range(position + 1)]
            total = int((keys[rows] * torch.arange(1, position + 2)).sum())
            hidden[column, (total + state * self.recurrent) % PUBLIC] = 5.0
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float()
