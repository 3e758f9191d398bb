"""What an exporter to GGUF does to a checkpoint, written head by head from the published description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from .tiny import Size

TOKENS = ["<|endoftext|>", "a", "b", "ab", "<|tool|>", "[PAD5]", "[PAD6]"]
TYPES = [3, 1, 1, 1, 4, 5, 5]

Encode = Callable[[str, np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType | None]]


def plain(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType | None]:
    """F32 for everything."""
    del name
    return values, None


def quantized(kind: str) -> Encode:
    """Matrices in a block format that the gguf package can encode; vectors stay F32."""
    target = gguf.GGMLQuantizationType[kind]

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType | None]:
        if values.ndim < 2 or "conv1d" in name:
            return values, None
        return gguf.quants.quantize(values, target), target

    return encode


def random_blocks(kinds: Mapping[str, str], default: str, seed: int = 11) -> Encode:
    """Matrices as random K-quant blocks with moderate scales, since the package has no encoder for them.

    `kinds`: part of a tensor's name -> type.
    """
    generator = np.random.default_rng(seed)

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType | None]:
        if values.ndim < 2 or "conv1d" in name:
            return values, None
        kind = next((kind for part, kind in kinds.items() if part in name), default)
        target = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[target]
        blocks = generator.integers(0, 256, (values.shape[0], values.shape[1] // block, size), np.uint8)
        scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        for offset in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]:
            blocks[:, :, offset : offset + 2] = scale
        return blocks.reshape(values.shape[0], -1), target

    return encode


def write_qwen(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    size: Size,
    *,
    encode: Encode = plain,
    has_mtp: bool = False,
    states_layers: bool = True,
    keys: Mapping[str, Any] | None = None,
) -> None:
    """The checkpoint as qwen35 GGUF. `states_layers`: with `attention.recurrent_layers`."""
    blocks = len(size.layer_types) + has_mtp
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_block_count(blocks)
    writer.add_context_length(512)
    writer.add_embedding_length(size.hidden)
    writer.add_feed_forward_length(size.intermediate)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(size.kv_heads)
    writer.add_key_length(size.head_dim)
    writer.add_value_length(size.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_dimension_count(size.head_dim // 4)
    writer.add_array("qwen35.rope.dimension_sections", [*size.sections, 0])
    writer.add_uint32("qwen35.ssm.group_count", size.key_heads)
    writer.add_uint32("qwen35.ssm.time_step_rank", size.value_heads)
    writer.add_uint32("qwen35.ssm.state_size", size.key_dim)
    writer.add_uint32("qwen35.ssm.inner_size", size.value_heads * size.value_dim)
    writer.add_uint32("qwen35.ssm.conv_kernel", 4)
    writer.add_uint32("qwen35.full_attention_interval", 4)
    if has_mtp:
        writer.add_uint32("qwen35.nextn_predict_layers", 1)
    if states_layers:
        flags = [kind == "linear" for kind in size.layer_types] + [False] * has_mtp
        writer.add_array("qwen35.attention.recurrent_layers", flags)
    for key, value in (keys or {}).items():
        writer.add_uint32(key, value)
    _add_tokenizer(writer, "qwen35")
    stored = export_qwen(tensors, size, has_mtp)
    _finish(writer, stored, encode)


def write_llama(
    path: Path, tensors: Mapping[str, torch.Tensor], *, head_dim: int = 32, encode: Encode = plain
) -> None:
    """The tiny Llama as GGUF: rows of q and k permuted for adjacent rotary pairs."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(96)
    writer.add_feed_forward_length(160)
    writer.add_head_count(3)
    writer.add_head_count_kv(1)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5e5)
    writer.add_rope_dimension_count(head_dim)
    _add_tokenizer(writer, "smollm")
    stored = {"token_embd": tensors["model.embed_tokens.weight"], "output_norm": tensors["model.norm.weight"]}
    if "lm_head.weight" in tensors:
        stored["output"] = tensors["lm_head.weight"]
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(2):
        for short, long in names.items():
            stored[f"blk.{layer}.{short}"] = tensors[f"model.layers.{layer}.{long}.weight"]
        for short in "qk":
            weight = tensors[f"model.layers.{layer}.self_attn.{short}_proj.weight"]
            stored[f"blk.{layer}.attn_{short}"] = _adjacent_pairs(weight, head_dim)
    _finish(writer, {f"{name}.weight": value.float() for name, value in stored.items()}, encode)


def _adjacent_pairs(weight: torch.Tensor, dim: int) -> torch.Tensor:
    rows = []
    for head in range(weight.shape[0] // dim):
        for pair in range(dim // 2):
            rows += [weight[head * dim + pair], weight[head * dim + dim // 2 + pair]]
    return torch.stack(rows)


def export_qwen(tensors: Mapping[str, torch.Tensor], size: Size, has_mtp: bool) -> dict[str, torch.Tensor]:
    """GGUF name -> FP32 tensor."""
    stored = {
        "token_embd.weight": tensors["model.embed_tokens.weight"].float(),
        "output_norm.weight": 1 + tensors["model.norm.weight"].float(),
    }
    if "lm_head.weight" in tensors:
        stored["output.weight"] = tensors["lm_head.weight"].float()
    for index, kind in enumerate(size.layer_types):
        prefix = f"model.layers.{index}."
        block = {
            name.removeprefix(prefix): t.float() for name, t in tensors.items() if name.startswith(prefix)
        }
        made = _linear(block, size) if kind == "linear" else _full(block)
        stored |= {f"blk.{index}.{name}": value for name, value in (made | _common(block)).items()}
    if has_mtp:
        prefix = "mtp.layers.0."
        block = {
            name.removeprefix(prefix): t.float() for name, t in tensors.items() if name.startswith(prefix)
        }
        made = _full(block) | _common(block)
        made["nextn.eh_proj.weight"] = tensors["mtp.fc.weight"].float()
        made["nextn.enorm.weight"] = 1 + tensors["mtp.pre_fc_norm_embedding.weight"].float()
        made["nextn.hnorm.weight"] = 1 + tensors["mtp.pre_fc_norm_hidden.weight"].float()
        made["nextn.shared_head_norm.weight"] = 1 + tensors["mtp.norm.weight"].float()
        stored |= {f"blk.{len(size.layer_types)}.{name}": value for name, value in made.items()}
    return stored


def _common(block: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "attn_norm.weight": 1 + block["input_layernorm.weight"],
        "post_attention_norm.weight": 1 + block["post_attention_layernorm.weight"],
        **{f"ffn_{name}.weight": block[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")},
    }


def _full(block: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        **{f"attn_{name}.weight": block[f"self_attn.{name}_proj.weight"] for name in "qkv"},
        "attn_output.weight": block["self_attn.o_proj.weight"],
        "attn_q_norm.weight": 1 + block["self_attn.q_norm.weight"],
        "attn_k_norm.weight": 1 + block["self_attn.k_norm.weight"],
    }


def _linear(block: Mapping[str, torch.Tensor], size: Size) -> dict[str, torch.Tensor]:
    keys = 2 * size.key_heads * size.key_dim
    qkv = block["linear_attn.in_proj_qkv.weight"]
    kernel = block["linear_attn.conv1d.weight"].squeeze(1)
    output = block["linear_attn.out_proj.weight"]
    return {
        "attn_qkv.weight": torch.cat((qkv[:keys], tiled(qkv[keys:], size, size.value_dim))),
        "attn_gate.weight": tiled(block["linear_attn.in_proj_z.weight"], size, size.value_dim),
        "ssm_alpha.weight": tiled(block["linear_attn.in_proj_a.weight"], size, 1),
        "ssm_beta.weight": tiled(block["linear_attn.in_proj_b.weight"], size, 1),
        "ssm_a": tiled(-torch.exp(block["linear_attn.A_log"]), size, 1),
        "ssm_dt.bias": tiled(block["linear_attn.dt_bias"], size, 1),
        "ssm_conv1d.weight": torch.cat((kernel[:keys], tiled(kernel[keys:], size, size.value_dim))),
        "ssm_norm.weight": block["linear_attn.norm.weight"],
        "ssm_out.weight": tiled(output.t(), size, size.value_dim).t().contiguous(),
    }


def tiled(values: torch.Tensor, size: Size, width: int) -> torch.Tensor:
    """Groups of `width` rows from grouped (by key head) to tiled order."""
    repeats = size.value_heads // size.key_heads
    pieces = []
    for repeat in range(repeats):
        for key in range(size.key_heads):
            head = key * repeats + repeat
            pieces.append(values[head * width : (head + 1) * width])
    return torch.cat(pieces)


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages }}")


def _finish(writer: gguf.GGUFWriter, stored: Mapping[str, torch.Tensor], encode: Encode) -> None:
    for name, values in stored.items():
        data, kind = encode(name, values.contiguous().numpy())
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
