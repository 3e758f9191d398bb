"""The toy of `toy.py` in operations that a CUDA graph can hold."""

import torch

from ninfer.models import Batch, Cache, KvLayout, Predictor, Records, StateLayout

from .toy import PUBLIC


class ToyCudaModel:
    """Implements `ninfer.models.Model`; predicts what `toy.expected_token` says."""

    def __init__(self, recurrent: bool = True, max_position_embeddings: int = 4096) -> None:
        self.device = torch.device("cuda", 0)
        self.dtype = torch.float32
        self.hidden_size = PUBLIC
        self.public_tokens = PUBLIC
        self.max_position_embeddings = max_position_embeddings
        self.predictor: Predictor | None = None
        self.recurrent = recurrent
        self.extents: list[int | None] = []

    def kv_layout(self) -> KvLayout:
        return KvLayout(1, 1, 1, self.dtype)

    def state_layout(self) -> StateLayout:
        none, some = StateLayout.none(self.dtype), StateLayout(1, 1, 1, 1, 1, 1, 1, self.dtype)
        return some if self.recurrent else none

    def workspace_bytes(self, columns: int, context: int) -> int:
        return 4 * PUBLIC * columns

    def round_bytes(self, columns: int, context: int) -> int:
        return 4 * PUBLIC * columns

    def forward(self, batch: Batch, cache: Cache, records: Records | None = None) -> torch.Tensor:
        self.extents.append(batch.extent)
        rows, width = batch.rows, len(batch.tokens) // batch.rows
        tokens, positions = batch.tokens.view(rows, width).long(), batch.positions.view(rows, width).long()
        live, at = positions >= 0, positions.clamp(min=0)
        table = batch.page_table.long()
        # Masked columns write to the last page, which belongs to nobody here.
        keys = cache.kv[0].k.view(-1)
        page = table.gather(1, (at // 64).clamp(max=table.shape[1] - 1))
        places = torch.where(live, page * 64 + at % 64, len(keys) - 1)
        keys.index_put_((places,), (tokens + 1).float())
        rank = torch.arange(table.shape[1] * 64, device=table.device)
        where = (table[:, rank // 64] * 64 + rank % 64).clamp(0, len(keys) - 1)
        terms = keys[where] * (rank + 1)
        seen = (rank[None, None] <= positions[:, :, None]) * terms[:, None]
        total = torch.where(rank[None, None] <= positions[:, :, None], seen, 0.0).sum(2).long()
        if self.recurrent:
            state = self._state(cache, batch.source_slots)
            states = []
            for column in range(width):
                state = torch.where(live[:, column], (state * 31 + tokens[:, column] + 1) % 9973, state)
                states.append(state)
                if records is not None:
                    records.conv[0][torch.arange(rows, device=state.device) * (len(records.conv[0]) // rows)
                                    + column, 0] = tokens[:, column].float()  # fmt: skip
            if records is None:
                cache.recurrent[0].view(-1).index_put_((batch.target_slots.long(),), state.float())
            total = total + torch.stack(states, 1)
        hidden = torch.nn.functional.one_hot(total % PUBLIC, PUBLIC).float() * 5.0
        return hidden.view(-1, PUBLIC)

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
        state, share = self._state(cache, source_slots), len(records.conv[0]) // len(counts)
        tokens = records.conv[0][: share * len(counts), 0].view(len(counts), share).long()
        for column in range(share):
            state = torch.where(column < counts, (state * 31 + tokens[:, column] + 1) % 9973, state)
        kept = cache.recurrent[0].view(-1)[target_slots.long()]
        new = torch.where(counts > 0, state.float(), kept)
        cache.recurrent[0].view(-1).index_put_((target_slots.long(),), new)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float()

    def _state(self, cache: Cache, slots: torch.Tensor) -> torch.Tensor:
        held = cache.recurrent[0].view(-1)[slots.clamp(min=0).long()].long()
        return torch.where(slots >= 0, held, 0)
