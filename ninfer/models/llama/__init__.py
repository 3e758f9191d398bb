"""Llama: `LlamaForCausalLM`."""

from __future__ import annotations

import torch

from ninfer.artifact import Contents
from ninfer.errors import ModelError
from ninfer.models.binding import Binder, component, public_domain
from ninfer.models.llama.config import parse
from ninfer.models.llama.forward import Llama
from ninfer.models.llama.parameters import bind
from ninfer.ops import Upload


def load(
    artifact: Contents,
    device: torch.device,
    dtype: torch.dtype,
    public_tokens: int | None,
    upload: Upload | None = None,
    predictor: bool = False,
    proposal: bool = False,
) -> Llama:
    """Check the config and bind the text component."""
    if predictor:
        raise ModelError("Llama checkpoints have no MTP layer; leave out --spec mtp")
    config = parse(component(artifact, "text").config)
    public = public_domain(public_tokens, config.vocab_size)
    return Llama(config, bind(Binder(artifact, device, upload), config), device, dtype, public)


__all__ = ["Llama", "load"]
