"""From an open artifact to a model: the architecture's name chooses the package, and nothing else does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ninfer.errors import ModelError
from ninfer.models.binding import component
from ninfer.ops import uploading

if TYPE_CHECKING:
    from ninfer.artifact import Contents
    from ninfer.models.model import Model

_PACKAGES = {
    "Qwen3_5ForCausalLM": "ninfer.models.qwen3_5",
    "LlamaForCausalLM": "ninfer.models.llama",
}
_WITHOUT_MTP = {"LlamaForCausalLM"}
"""Architectures whose checkpoints never have an MTP layer."""


def load(
    artifact: Contents,
    device: str | torch.device = "cpu",
    activation_dtype: torch.dtype = torch.bfloat16,
    *,
    public_tokens: int | None = None,
    predictor: bool = False,
    proposal: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Model:
    """Load the text model of an artifact.

    `activation_dtype` is bf16 unless a test asks for float32. `public_tokens` is the size of the tokenizer's
    id domain (the frontend knows it); vocabulary rows behind it are never scored. None: every row is public.
    On the CPU the weights are views of the mapped file, which stays mapped as long as the model lives;
    another device holds them itself, and while it gets them `progress(stage, done, total)` is called with
    bytes. `predictor`: bind the MTP layer as well, for speculative decoding; `proposal`: with the output head
    of fewer tokens that only drafts.

    Raises `ModelError` if the architecture is unknown, a rule of its config or of its bindings is broken, or
    a predictor is wanted where there is none.
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
    if predictor and "mtp" not in artifact.components:
        again = ", or convert the checkpoint again with --components text,mtp"
        never = architectures[0] in _WITHOUT_MTP
        raise ModelError(f"{artifact.path} has no MTP layer; leave out --spec mtp{'' if never else again}")
    if proposal and artifact.components["text"].proposal is None:
        raise ModelError(
            f"{artifact.path} has no proposal head; leave out --lm-head-draft, or make an artifact with one "
            f"(ninfer-proposal)"
        )
    used = ("text/", *(("mtp/",) if predictor else ()), *(("proposal/",) if proposal else ()))
    device = torch.device(device)
    with uploading(device, _bytes(artifact, used), progress) as upload:
        return importlib.import_module(package).load(
            artifact, device, activation_dtype, public_tokens, upload, predictor, proposal
        )


def _bytes(artifact: Contents, components: tuple[str, ...]) -> int:
    """Encoded bytes of what is bound."""
    used = {
        part.object
        for name, binding in artifact.bindings.items()
        if name.startswith(components)
        for part in binding.parts
    }
    return sum(artifact.objects[name].bytes for name in used)
