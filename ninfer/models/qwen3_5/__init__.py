"""Dense Qwen3.5, 3.6 and 3.8 text towers: `Qwen3_5ForCausalLM`."""

from __future__ import annotations

import torch

from ninfer.artifact import Contents
from ninfer.models.binding import Binder, component, public_domain
from ninfer.models.qwen3_5.config import parse
from ninfer.models.qwen3_5.forward import Qwen35
from ninfer.models.qwen3_5.parameters import bind
from ninfer.ops import Upload


def load(
    artifact: Contents,
    device: torch.device,
    dtype: torch.dtype,
    public_tokens: int | None,
    upload: Upload | None = None,
) -> Qwen35:
    """Check the config and bind the text component; other components stay unread."""
    config = parse(component(artifact, "text").config, has_mtp="mtp" in artifact.components)
    public = public_domain(public_tokens, config.vocab_size)
    return Qwen35(config, bind(Binder(artifact, device, upload), config), device, dtype, public)


__all__ = ["Qwen35", "load"]
