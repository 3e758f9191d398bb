"""Safetensors shards small enough to be carried between machines: what a leg of the training leaves."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from ninfer.errors import ConversionError
from tools.nano import checkpoint
from tools.nano.model import Parameters, from_huggingface, to_huggingface

LIMIT = 15 << 20  # bytes of a shard
_HEADER = 65_536  # bytes of it kept for the header
_NAMES = "shard-*.safetensors"


def write(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> list[Path]:
    """Write `shard-N.safetensors`, in the dtypes of the Hugging Face folder; older shards go."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(_NAMES):
        stale.unlink()
    shards: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for name, value in tensors:
        kept = value.to(checkpoint.dtype_of(name))
        if used + kept.nbytes > LIMIT - _HEADER:
            shards.append({})
            used = 0
        shards[-1][name] = kept.contiguous().cpu()
        used += kept.nbytes
    paths = [folder / f"shard-{index}.safetensors" for index in range(len(shards))]
    for shard, path in zip(shards, paths, strict=True):
        save_file(shard, path)
    return paths


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the shards in a folder, complete and as the Hugging Face folder stores them."""
    paths = sorted(folder.glob(_NAMES))
    if not paths:
        raise ConversionError(f"{folder} has no {_NAMES}; name the folder that the training wrote")
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        tensors = checkpoint.load(path)
        for name in tensors.keys() & found.keys():
            raise ConversionError(
                f"{path} has the tensor '{name}' once more; remove stale shards from {folder}"
            )
        found |= tensors
    return checkpoint.checked(found, folder)


def save(parameters: Parameters, folder: Path) -> list[Path]:
    """Write the parameters' values."""
    return write(to_huggingface(parameters), folder)


def restore(folder: Path, parameters: Parameters) -> None:
    """Copy the shards' values into `parameters`."""
    from_huggingface(read(folder), parameters)
