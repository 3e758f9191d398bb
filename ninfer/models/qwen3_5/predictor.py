"""The MTP layer: one more block that guesses the token after the next one.

    u = W [norm(embedding(x[p + 1])) | norm(h[p])];  u = block(u at position p);  m = norm(u)

`h` is the text model's hidden state after its final norm, and m is scored by the text model's own head or by
one of fewer rows. For a guess further ahead m takes the place of h. Keys and values at position p depend on
x[p + 1], so a prompt's last ones are known only with the first drawn token.
"""

from __future__ import annotations

import torch

from ninfer import ops
from ninfer.models.model import Batch
from ninfer.models.qwen3_5.blocks import append, attention, feed_forward
from ninfer.models.qwen3_5.config import TextConfig
from ninfer.models.qwen3_5.parameters import Attention, PredictorParameters, Proposal


class MtpPredictor:
    """Implements `ninfer.models.Predictor`; `embedding` is the text model's, and `proposal` may be its
    head."""

    def __init__(
        self,
        config: TextConfig,
        parameters: PredictorParameters,
        embedding: ops.Matrix,
        proposal: Proposal,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        assert isinstance(parameters.layer.mixer, Attention)
        self.config = config
        self.parameters = parameters
        self.token_ids = proposal.token_ids
        self._proposal = proposal
        self._mixer = parameters.layer.mixer
        self._embedding, self._device, self._dtype = embedding, device, dtype

    def forward(
        self,
        batch: Batch,
        hidden: torch.Tensor,
        pages: ops.KvPages,
        last: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        p, eps = self.parameters, self.config.rms_norm_eps
        x = attention(p.layer, self._mixer, self._stem(batch, hidden), batch, pages, eps, last)
        return feed_forward(p.layer, x, eps)

    def score(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        norm, eps = self.parameters.final_norm, self.config.rms_norm_eps
        return ops.norm_logits(x, norm, eps, True, self._proposal.head, self._proposal.rows)

    def fill(self, batch: Batch, hidden: torch.Tensor, pages: ops.KvPages) -> None:
        append(
            self.parameters.layer,
            self._mixer,
            self._stem(batch, hidden),
            batch,
            pages,
            self.config.rms_norm_eps,
        )

    def workspace_bytes(self, columns: int, context: int) -> int:
        c, size, w = self._mixer.config, self._dtype.itemsize, ops.workspace(self._device)
        hidden, heads = self.config.hidden_size, 2 * (c.heads + c.kv_heads) * c.head_dim
        stages = [
            3 * columns * hidden * size + w.linear_bytes(columns, 2 * hidden, hidden, size),
            (heads + c.heads * c.head_dim) * columns * size,
            w.linear_bytes(columns, hidden, heads, size),
        ]
        return 2 * columns * hidden * size + max(stages)

    def round_bytes(self, columns: int, context: int, wanted: int) -> int:
        c, size, w = self._mixer.config, self._dtype.itemsize, ops.workspace(self._device)
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        heads, queries = 2 * (c.heads + c.kv_heads) * c.head_dim, c.heads * c.head_dim
        return (
            (5 * columns + 4 * wanted) * hidden * size
            + w.recorded_linear(columns, 2 * hidden, hidden, size)
            + w.recorded_linear(columns, hidden, heads, size)
            + w.recorded_linear(wanted, queries, hidden, size)
            + w.recorded_linear(wanted, hidden, inner, size)
            + w.recorded_linear(wanted, inner, hidden, size)
            + (columns + 2 * wanted) * queries * size
            + w.recorded_attention(wanted, context, c.heads, c.head_dim, size)
        )

    def _stem(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        p = self.parameters
        both = ops.embedding_pair(
            batch.tokens, self._embedding, hidden, p.embedding_norm, p.hidden_norm, self.config.rms_norm_eps
        )
        return ops.linear(both, p.input_projection)
