"""What every architecture offers to the runtime, and the records that cross between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ninfer.formats import KvFormat
from ninfer.ops import PAGE, DeltaRecords, KvPages


@dataclass(frozen=True, eq=False)
class Batch:
    """Columns of one forward pass: `rows` sequences of W columns each, row after row, T = rows * W.

    tokens         int32 [T]
    positions      int32 [T]  cache position of each column; RoPE uses the same number
    page_table     int32 [rows, P]  page that holds positions [64 b, 64 b + 64) of a row
    source_slots   int32 [rows]  state slot that a row continues from, read only; -1: the start of a sequence
    target_slots   int32 [rows]  state slot that receives its new state; may equal the source
    extent         the host's promise that every position is below it, None without one (a recorded round)
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    rows: int
    page_table: torch.Tensor
    source_slots: torch.Tensor
    target_slots: torch.Tensor
    extent: int | None = None


@dataclass(frozen=True)
class KvLayout:
    """Keys and values of `layers` attention layers, of `heads` vectors of `head_dim` each per token;
    `dtype` is the activation type."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    format: KvFormat = KvFormat.BF16

    @classmethod
    def none(cls, dtype: torch.dtype) -> KvLayout:
        """Of a model without attention layers."""
        return cls(0, 0, 0, dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers, keys and values with their scales."""
        sides = (self.format.keys.code, self.format.values.code)
        vectors = sum(code.vector_bytes(self.head_dim, self.dtype.itemsize) for code in sides)
        return self.layers * PAGE * self.heads * vectors


@dataclass(frozen=True)
class StateLayout:
    """Recurrent state of `layers` layers: convolution history `[slots, history, channels]` in `dtype` and
    FP32 states `[slots, value_heads, value_dim, key_dim]`. Unlike KV it can't be cut back to an earlier one.
    `hidden`: elements of the newest hidden state, kept for a predictor; 0 without one.
    """

    layers: int
    history: int
    channels: int
    key_heads: int
    value_heads: int
    value_dim: int
    key_dim: int
    dtype: torch.dtype
    hidden: int = 0

    @classmethod
    def none(cls, dtype: torch.dtype, hidden: int = 0) -> StateLayout:
        """Of a model without recurrent layers."""
        return cls(0, 0, 0, 0, 0, 0, 0, dtype, hidden)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's state in all layers."""
        history = self.history * self.channels * self.dtype.itemsize
        recurrent = self.layers * (history + 4 * self.value_heads * self.value_dim * self.key_dim)
        return recurrent + self.hidden * self.dtype.itemsize

    def record_bytes(self, columns: int) -> int:
        """Bytes of the records of so many columns in all layers."""
        raw = self.channels + self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return self.layers * columns * (raw * self.dtype.itemsize + 8 * self.value_heads)


@dataclass(frozen=True, eq=False)
class Cache:
    """Memory that a forward pass reads and writes, one tensor a layer; the runtime allocates and owns it.

    `kv`: attention layers in order, the predictor's last; `conv`, `recurrent`: recurrent layers in order;
    `hidden` `[slots, hidden_size]`: the newest hidden state, for a predictor.
    """

    kv: tuple[KvPages, ...]
    conv: tuple[torch.Tensor, ...]
    recurrent: tuple[torch.Tensor, ...]
    hidden: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Records:
    """What a pass keeps of its columns instead of advancing states, one entry for each recurrent layer.

    `conv`: raw convolution inputs `[N, channels]`; `delta`: inputs of the recurrence. Column t of row b of B
    stands in record row `b * (N // B) + t`.
    """

    conv: tuple[torch.Tensor, ...]
    delta: tuple[DeltaRecords, ...]


class Predictor(Protocol):
    """Guesses the token after the next one from a hidden state and the next token; wrong guesses cost time
    only.

    Its batches hold, for a column at position p of a sequence x, the token x[p + 1] and position p; `hidden`
    `[T, hidden_size]` has the model's hidden states h[p], or the predictor's own for position p - 1. `pages`
    is the last layer of the cache. Source and target slots of a batch mean nothing here.
    """

    token_ids: torch.Tensor | None
    """int32 `[rows]`: the tokens that `score` scores; None: all public ones."""

    def forward(
        self,
        batch: Batch,
        hidden: torch.Tensor,
        pages: KvPages,
        last: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """`[T, hidden_size]` from which `score` scores x[p + 2]; appends keys and values.

        With `last` = (number, position) int32 `[rows]` each, only that of one column of each row is wanted,
        `[rows, hidden_size]`: of column number - 1, which stands at the position."""
        ...

    def score(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """FP32 `[n, rows]` for what `forward` gave, `[n, hidden_size]`; and as many hidden states."""
        ...

    def fill(self, batch: Batch, hidden: torch.Tensor, pages: KvPages) -> None:
        """Only append keys and values."""
        ...

    def workspace_bytes(self, columns: int, context: int) -> int:
        """As `Model.workspace_bytes`, of `fill`."""
        ...

    def round_bytes(self, columns: int, context: int, wanted: int) -> int:
        """As `Model.round_bytes`, of `forward` for so many columns, of which some are wanted."""
        ...


class Model(Protocol):
    """A loaded text model. It holds weights only: pages, slots and positions come with each call."""

    device: torch.device
    dtype: torch.dtype
    """Of public activations."""
    hidden_size: int
    public_tokens: int
    """Ids [0, public_tokens) may be fed and are scored; further vocabulary rows exist only as padding."""
    max_position_embeddings: int
    predictor: Predictor | None
    """Loaded on request only."""

    def kv_layout(self) -> KvLayout: ...

    def state_layout(self) -> StateLayout: ...

    def workspace_bytes(self, columns: int, context: int) -> int:
        """What a forward pass of so many columns of one row takes for a moment at the end of such a context:
        never less than it does, and not three times as much."""
        ...

    def round_bytes(self, columns: int, context: int) -> int:
        """What a recorded pass of so few columns keeps for its repetitions."""
        ...

    def forward(self, batch: Batch, cache: Cache, records: Records | None = None) -> torch.Tensor:
        """Hidden states `[T, hidden_size]` after the final norm; appends KV and advances states.

        With `records` (up to 16 columns a row) states stay as they are, and `fold` advances them later.
        """
        ...

    def fold(
        self,
        cache: Cache,
        records: Records,
        counts: torch.Tensor,
        source_slots: torch.Tensor,
        target_slots: torch.Tensor,
    ) -> None:
        """Advance states by the first `counts[b]` columns of each row of the pass that made the records.

        All int32 `[rows]`, slots as in that pass's batch; a row whose count is 0 leaves its target as it is.
        The states get the bits that feeding only those columns would have given.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """FP32 `[n, public_tokens]` for `hidden` `[n, hidden_size]`."""
        ...
