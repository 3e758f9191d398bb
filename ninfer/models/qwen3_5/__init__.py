"""Dense Qwen3.5, 3.6 and 3.8 text towers: `Qwen3_5ForCausalLM`."""

from __future__ import annotations

import torch

from ninfer.artifact import Contents
from ninfer.models.binding import Binder, component, public_domain
from ninfer.models.qwen3_5.config import parse
from ninfer.models.qwen3_5.forward import Qwen35
from ninfer.models.qwen3_5.parameters import Proposal, bind, bind_predictor, bind_proposal
from ninfer.models.qwen3_5.predictor import MtpPredictor
from ninfer.ops import Upload


def load(
    artifact: Contents,
    device: torch.device,
    dtype: torch.dtype,
    public_tokens: int | None,
    upload: Upload | None = None,
    predictor: bool = False,
    proposal: bool = False,
) -> Qwen35:
    """Check the config and bind the text component and, if wanted, the MTP layer, if
    wanted with the head that only drafts; others stay unread."""
    config = parse(component(artifact, "text").config, has_mtp="mtp" in artifact.components)
    public = public_domain(public_tokens, config.vocab_size)
    binder = Binder(artifact, device, upload)
    parameters = bind(binder, config)
    mtp = None
    if predictor:
        head = Proposal(parameters.output_head, public)
        if proposal:
            record = component(artifact, "text").proposal
            head = bind_proposal(binder, config, record.rows if record else None, public)
        layer = bind_predictor(binder, config)
        mtp = MtpPredictor(config, layer, parameters.token_embedding, head, device, dtype)
    return Qwen35(config, parameters, device, dtype, public, mtp)


__all__ = ["Qwen35", "load"]
