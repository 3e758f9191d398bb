"""Checkpoints that are already quantized: random codes and scales under each scheme's tensor names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
Scheme = Callable[[str, tuple[int, int], torch.Generator], Tensors]


def layer_matrices(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the projections that such checkpoints quantize."""
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj", "mlp.")
    return [
        n for n, t in tensors.items() if t.dim() == 2 and ".layers." in n and any(part in n for part in parts)
    ]


def write(
    folder: Path, tensors: Mapping[str, torch.Tensor], schemes: Mapping[Scheme, Iterable[str]]
) -> Tensors:
    """Replace `folder`'s weights by codes of the given schemes; returns everything written."""
    generator = torch.Generator().manual_seed(4)
    written = dict(tensors)
    for scheme, names in schemes.items():
        for name in names:
            shape = tuple(written.pop(name).shape)
            written |= scheme(name.removesuffix("weight"), (shape[0], shape[1]), generator)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    save_file(written, folder / "model.safetensors")
    return written


def compressed_nvfp4(stem: str, shape: tuple[int, int], generator: torch.Generator) -> Tensors:
    """compressed-tensors NVFP4; the projections of one attention share a divisor."""
    rows, columns = shape
    divisor = 300.0 if "self_attn" in stem else float(torch.rand((), generator=generator)) * 100 + 50
    return {
        f"{stem}weight_packed": _bytes((rows, columns // 2), generator),
        f"{stem}weight_scale": _e4m3((rows, columns // 16), generator),
        f"{stem}weight_global_scale": torch.tensor([divisor]),
        f"{stem}input_global_scale": torch.rand(1, generator=generator) * 1000 + 1,
    }


def modelopt_nvfp4(stem: str, shape: tuple[int, int], generator: torch.Generator) -> Tensors:
    """ModelOpt NVFP4: the scalars multiply."""
    rows, columns = shape
    return {
        f"{stem}weight": _bytes((rows, columns // 2), generator),
        f"{stem}weight_scale": _e4m3((rows, columns // 16), generator),
        f"{stem}weight_scale_2": torch.tensor(0.0037),
        f"{stem}input_scale": torch.tensor(0.0021),
    }


def fp8_rows(stem: str, shape: tuple[int, int], generator: torch.Generator) -> Tensors:
    """FP8 with one BF16 scale a row."""
    scale = (torch.rand((shape[0], 1), generator=generator) * 0.01).bfloat16()
    return {f"{stem}weight": _fp8(shape, generator), f"{stem}weight_scale": scale}


def fp8_whole(stem: str, shape: tuple[int, int], generator: torch.Generator) -> Tensors:
    """FP8 with one FP32 scale for everything (ModelOpt)."""
    return {
        f"{stem}weight": _fp8(shape, generator),
        f"{stem}weight_scale": torch.tensor(0.00312),
        f"{stem}input_scale": torch.tensor(0.5),
    }


def fp8_blocks(stem: str, shape: tuple[int, int], generator: torch.Generator) -> Tensors:
    """FP8 with one BF16 scale for each 128x128 block."""
    scale = torch.rand((shape[0] // 128, shape[1] // 128), generator=generator) * 0.01
    return {f"{stem}weight": _fp8(shape, generator), f"{stem}weight_scale_inv": scale.bfloat16()}


def _bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def _e4m3(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    words = torch.randint(0, 0x7F, shape, generator=generator, dtype=torch.uint8)
    return words.view(torch.float8_e4m3fn)


def _fp8(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    words = _bytes(shape, generator)
    words[(words & 0x7F) == 0x7F] = 0x80
    return words.view(torch.float8_e4m3fn)
