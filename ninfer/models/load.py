"""From an open artifact to a model: the architecture's name chooses the package, and nothing else does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch

from ninfer.errors import ModelError
from ninfer.models.binding import component

if TYPE_CHECKING:
    from ninfer.artifact import Contents
    from ninfer.models.model import Model

_PACKAGES = {
    "Qwen3_5ForCausalLM": "ninfer.models.qwen3_5",
    "LlamaForCausalLM": "ninfer.models.llama",
}


def load(
    artifact: Contents,
    device: str | torch.device = "cpu",
    activation_dtype: torch.dtype = torch.bfloat16,
    *,
    public_tokens: int | None = None,
) -> Model:
    """Load the text model of an artifact.

    `activation_dtype` is bf16 unless a test asks for float32. `public_tokens` is the size of the tokenizer's
    id domain (the frontend knows it); vocabulary rows behind it are never scored. None: every row is public.
    On the CPU the weights are views of the mapped file, which stays mapped as long as the model lives.

    Raises `ModelError` if the architecture is unknown or a rule of its config or of its bindings is broken.
    """
    architectures = component(artifact, "text").config.get("architectures")
    if not isinstance(architectures, list | tuple) or len(architectures) != 1:
        raise ModelError(f"'architectures' of the text config must name exactly one, not {architectures!r}")
    package = _PACKAGES.get(str(architectures[0]))
    if package is None:
        raise ModelError(
            f"the architecture {architectures[0]!r} isn't supported; "
            f"this version runs {', '.join(sorted(_PACKAGES))}"
        )
    return importlib.import_module(package).load(
        artifact, torch.device(device), activation_dtype, public_tokens
    )
