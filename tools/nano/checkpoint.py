"""The Hugging Face folder of ninfer-nano: which tensors it has, and how it is read and written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ninfer.errors import ConversionError
from tools.nano import geometry as g

RESOURCES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
TOKENIZER = Path(__file__).parent / "tokenizer"
WEIGHTS = "model.safetensors"
KEY_ROWS, VALUE_ROWS = g.KEY_HEADS * g.DELTA_DIM, g.VALUE_HEADS * g.DELTA_DIM
CHANNELS = 2 * KEY_ROWS + VALUE_ROWS
_FP32 = ("A_log", "dt_bias")  # in the folder; all others are BF16


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the folder by name; the head is tied, so there is no `lm_head.weight`."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (g.VOCAB_ROWS, g.HIDDEN),
        "model.norm.weight": (g.HIDDEN,),
    }
    for index, kind in enumerate(g.layer_types()):
        found |= dict(_layer(f"model.layers.{index}.", kind))
    return found | {
        "mtp.fc.weight": (g.HIDDEN, 2 * g.HIDDEN),
        "mtp.pre_fc_norm_embedding.weight": (g.HIDDEN,),
        "mtp.pre_fc_norm_hidden.weight": (g.HIDDEN,),
        "mtp.norm.weight": (g.HIDDEN,),
        **dict(_layer("mtp.layers.0.", "full_attention")),
    }


def _layer(prefix: str, kind: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}input_layernorm.weight", (g.HIDDEN,)
    yield f"{prefix}post_attention_layernorm.weight", (g.HIDDEN,)
    if kind == "full_attention":
        queries, keys = g.HEADS * g.HEAD_DIM, g.KV_HEADS * g.HEAD_DIM
        yield f"{prefix}self_attn.q_proj.weight", (2 * queries, g.HIDDEN)
        yield f"{prefix}self_attn.k_proj.weight", (keys, g.HIDDEN)
        yield f"{prefix}self_attn.v_proj.weight", (keys, g.HIDDEN)
        yield f"{prefix}self_attn.o_proj.weight", (g.HIDDEN, queries)
        yield f"{prefix}self_attn.q_norm.weight", (g.HEAD_DIM,)
        yield f"{prefix}self_attn.k_norm.weight", (g.HEAD_DIM,)
    else:
        yield f"{prefix}linear_attn.in_proj_qkv.weight", (CHANNELS, g.HIDDEN)
        yield f"{prefix}linear_attn.in_proj_z.weight", (VALUE_ROWS, g.HIDDEN)
        yield f"{prefix}linear_attn.in_proj_a.weight", (g.VALUE_HEADS, g.HIDDEN)
        yield f"{prefix}linear_attn.in_proj_b.weight", (g.VALUE_HEADS, g.HIDDEN)
        yield f"{prefix}linear_attn.conv1d.weight", (CHANNELS, 1, g.TAPS)
        yield f"{prefix}linear_attn.A_log", (g.VALUE_HEADS,)
        yield f"{prefix}linear_attn.dt_bias", (g.VALUE_HEADS,)
        yield f"{prefix}linear_attn.norm.weight", (g.DELTA_DIM,)
        yield f"{prefix}linear_attn.out_proj.weight", (g.HIDDEN, VALUE_ROWS)
    yield f"{prefix}mlp.gate_proj.weight", (g.INTERMEDIATE, g.HIDDEN)
    yield f"{prefix}mlp.up_proj.weight", (g.INTERMEDIATE, g.HIDDEN)
    yield f"{prefix}mlp.down_proj.weight", (g.HIDDEN, g.INTERMEDIATE)


def dtype_of(name: str) -> torch.dtype:
    """How the folder stores a tensor."""
    return torch.float32 if name.endswith(_FP32) else torch.bfloat16


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder that `write_folder` made."""
    return checked(load(folder / WEIGHTS), folder)


def read_resources(folder: Path) -> dict[str, bytes]:
    """The four tokenizer files of a folder."""
    missing = [role for role in RESOURCES if not (folder / role).is_file()]
    if missing:
        raise ConversionError(f"{folder} lacks {', '.join(missing)}; make the tokenizer first")
    return {role: (folder / role).read_bytes() for role in RESOURCES}


def checked(tensors: Mapping[str, torch.Tensor], owner: Path) -> dict[str, torch.Tensor]:
    """All tensors of the geometry in the folder's dtypes; refuses incomplete, foreign and non-finite ones."""
    shapes = tensor_shapes()
    missing, unknown = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing:
        raise ConversionError(
            f"{owner} lacks {len(missing)} of {len(shapes)} tensors, the first is '{missing[0]}'"
        )
    if unknown:
        raise ConversionError(f"{owner} has the tensor '{unknown[0]}', which {g.NAME} does not have")
    found = {}
    for name, shape in shapes.items():
        tensor, dtype = tensors[name], dtype_of(name)
        if tuple(tensor.shape) != shape:
            raise ConversionError(
                f"'{name}' of {owner} has the shape {list(tensor.shape)}; the geometry asks for {list(shape)}"
            )
        if tensor.dtype not in (torch.bfloat16, dtype):
            raise ConversionError(f"'{name}' of {owner} is {tensor.dtype}; save it as {dtype}")
        if not bool(torch.isfinite(tensor).all()):
            raise ConversionError(
                f"'{name}' of {owner} has values that are not finite; the training diverged"
            )
        found[name] = tensor.to(dtype).contiguous()
    return found


def write_folder(folder: Path, tensors: Mapping[str, torch.Tensor], resources: Mapping[str, bytes]) -> None:
    """Write config, weights and tokenizer files; the same input gives the same bytes."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConversionError(f"{folder} exists already; choose another folder or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for role, data in resources.items():
        (folder / role).write_bytes(data)
    (folder / "config.json").write_text(json.dumps(g.config(), indent=2) + "\n")
    save_file(dict(checked(tensors, folder)), folder / WEIGHTS, {"format": "pt"})


def load(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one safetensors file."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConversionError(f"{path} cannot be read: {error}") from None
