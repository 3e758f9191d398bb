"""Checkpoints as safetensors shards small enough to be carried between machines."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tools.nano.model import Parameters, from_huggingface, to_huggingface

LIMIT = 15 << 20  # bytes of a shard
_FULL_PRECISION = ("A_log", "dt_bias")


def save(parameters: Parameters, folder: Path) -> list[Path]:
    """Write `shard-N.safetensors`: BF16 under Hugging Face names, `A_log` and `dt_bias` in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for name, value in to_huggingface(parameters):
        kept = value.float() if name.endswith(_FULL_PRECISION) else value.to(torch.bfloat16)
        if used + kept.nbytes > LIMIT - 65_536:  # room for the header
            shards.append({})
            used = 0
        shards[-1][name] = kept.contiguous().cpu()
        used += kept.nbytes
    paths = [folder / f"shard-{index}.safetensors" for index in range(len(shards))]
    for shard, path in zip(shards, paths, strict=True):
        save_file(shard, path)
    return paths


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the shards in a folder."""
    paths = sorted(folder.glob("shard-*.safetensors"))
    if not paths:
        raise SystemExit(f"{folder} has no shard-*.safetensors; train the earlier leg first")
    return {name: value for path in paths for name, value in load_file(path).items()}


def restore(folder: Path, parameters: Parameters) -> None:
    """Copy the shards' values into `parameters`."""
    from_huggingface(read(folder), parameters)
