"""A random ninfer-nano for tests that need its shape, not its skills; logits of about unit size."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.frontend.conftest import Documents
from tools.nano import checkpoint, shards


def random_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the Hugging Face folder, in its dtype."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _random(name, torch.randn(shape, generator=generator)).to(checkpoint.dtype_of(name))
        for name, shape in checkpoint.tensor_shapes().items()
    }


def _random(name: str, normal: torch.Tensor) -> torch.Tensor:
    if name.endswith("A_log"):
        return normal.sigmoid().mul(2).add(0.02).log()
    if name.endswith("dt_bias"):
        return normal
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.3 * normal
    if normal.dim() == 1:  # gains around 1, stored without it
        return 0.3 * normal
    return 0.6 * normal if "conv1d" in name else normal * normal.shape[-1] ** -0.5


def write_tokenizer(documents: Documents, folder: Path) -> Path:
    """The four tokenizer files of a small stand-in."""
    folder.mkdir()
    for role, data in documents.resources().items():
        (folder / role).write_bytes(data)
    return folder


def write_shards(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    """The tensors as the training writes them."""
    shards.write(tensors.items(), folder)
    return folder
