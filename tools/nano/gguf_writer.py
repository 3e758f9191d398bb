"""ninfer-nano as a GGUF file in the Q4_K_M mix, to test the import of K-quants.

What an exporter to GGUF does to a Qwen3.5 checkpoint: value heads of the recurrent layers are tiled (repeat
by repeat instead of key head by key head), gains of norms are stored as 1 + w, A_log as -exp(A_log), and the
MTP layer is the last block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from ninfer.errors import ConversionError
from tools.nano import checkpoint, kquants
from tools.nano import geometry as g

ARCHITECTURE = "qwen35"
BLOCKS = g.LAYERS + 1
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5
_DIRECT = ("norm.weight", "ssm_a", "ssm_dt.bias", "ssm_conv1d.weight")
_TILED = np.arange(g.VALUE_HEADS).reshape(g.KEY_HEADS, -1).T.reshape(-1)  # position -> value head


def write(folder: Path, out: Path) -> None:
    """Write the Hugging Face folder of ninfer-nano as the GGUF file `out`."""
    writer = gguf.GGUFWriter(out, ARCHITECTURE)
    _add_model(writer)
    _add_tokenizer(writer, checkpoint.read_resources(folder))
    for name, values in _exported(checkpoint.read_folder(folder)):
        kind = tensor_kind(name, values.shape[-1], BLOCKS, is_tied=True)
        writer.add_tensor(name, _encoded(kind, values), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_kind(name: str, columns: int, blocks: int, *, is_tied: bool) -> Kind:
    """The type of a tensor in the Q4_K_M mix of a model with `blocks` blocks.

    Q6_K for the output head, and for the value and down projections of the blocks where errors cost most: the
    first and last eighth and every third between. Q8_0 where rows are not whole blocks of 256.
    """
    if name.endswith(_DIRECT):
        return Kind.F32
    if columns % kquants.BLOCK:
        return Kind.Q8_0
    if name == ("token_embd.weight" if is_tied else "output.weight"):
        return Kind.Q6_K
    found = re.fullmatch(r"blk\.(\d+)\.(?:attn_v|attn_qkv|ffn_down)\.weight", name)
    return Kind.Q6_K if found and _is_sensitive(int(found[1]), blocks) else Kind.Q4_K


def _is_sensitive(index: int, blocks: int) -> bool:
    eighth = blocks // 8
    return index < eighth or index >= 7 * blocks // 8 or (index - eighth) % 3 == 2


def _encoded(kind: Kind, values: np.ndarray) -> np.ndarray:
    if kind == Kind.Q4_K:
        return kquants.encode_q4_k(values)
    if kind == Kind.Q6_K:
        return kquants.encode_q6_k(values)
    return values if kind == Kind.F32 else gguf.quants.quantize(values, kind)


def _add_model(writer: gguf.GGUFWriter) -> None:
    writer.add_name(g.NAME)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(BLOCKS)
    writer.add_nextn_predict_layers(1)
    writer.add_context_length(g.CONTEXT)
    writer.add_embedding_length(g.HIDDEN)
    writer.add_feed_forward_length(g.INTERMEDIATE)
    writer.add_head_count(g.HEADS)
    writer.add_head_count_kv(g.KV_HEADS)
    writer.add_key_length(g.HEAD_DIM)
    writer.add_value_length(g.HEAD_DIM)
    writer.add_layer_norm_rms_eps(g.EPS)
    writer.add_rope_freq_base(g.THETA)
    writer.add_rope_dimension_count(int(g.HEAD_DIM * g.ROTARY_FACTOR))
    writer.add_rope_dimension_sections([*g.SECTIONS, 0])
    writer.add_ssm_group_count(g.KEY_HEADS)
    writer.add_ssm_time_step_rank(g.VALUE_HEADS)
    writer.add_ssm_state_size(g.DELTA_DIM)
    writer.add_ssm_inner_size(checkpoint.VALUE_ROWS)
    writer.add_ssm_conv_kernel(g.TAPS)
    writer.add_full_attention_interval(g.INTERVAL)


def _add_tokenizer(writer: gguf.GGUFWriter, resources: Mapping[str, bytes]) -> None:
    tokenizer = json.loads(resources["tokenizer.json"])
    config = json.loads(resources["tokenizer_config.json"])
    tokens = [f"[PAD{index}]" for index in range(g.VOCAB_ROWS)]
    types = [_UNUSED] * g.VOCAB_ROWS
    ids = dict(tokenizer["model"]["vocab"])
    for text, index in ids.items():
        tokens[index], types[index] = text, _NORMAL
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    added |= {int(index): token for index, token in config.get("added_tokens_decoder", {}).items()}
    for index, token in added.items():
        tokens[index], types[index] = token["content"], _CONTROL if token["special"] else _USER
        ids[token["content"]] = index
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")  # the one that this architecture's tokenizers may have
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(
        [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    )
    ends = _end_ids(json.loads(resources["generation_config.json"]))
    writer.add_eos_token_id(ends[0])
    if len(ends) == 2:
        writer.add_eot_token_id(ends[1])
    writer.add_pad_token_id(ids[config["pad_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template(resources["chat_template.jinja"].decode())


def _end_ids(generation: Mapping[str, Any]) -> list[int]:
    ends = generation["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    if len(ends) > 2:
        raise ConversionError(f"generation_config.json has {len(ends)} end tokens; a GGUF file can state two")
    return ends


def _exported(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """GGUF name and FP32 values of every tensor, in the file's order."""
    values = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    yield "token_embd.weight", values["model.embed_tokens.weight"]
    yield "output_norm.weight", 1 + values["model.norm.weight"]
    for index in range(BLOCKS):
        prefix = "mtp.layers.0." if index == g.LAYERS else f"model.layers.{index}."
        block = {name.removeprefix(prefix): one for name, one in values.items() if name.startswith(prefix)}
        for name, one in _block(block):
            yield f"blk.{index}.{name}", one
    yield f"blk.{g.LAYERS}.nextn.eh_proj.weight", values["mtp.fc.weight"]
    yield f"blk.{g.LAYERS}.nextn.enorm.weight", 1 + values["mtp.pre_fc_norm_embedding.weight"]
    yield f"blk.{g.LAYERS}.nextn.hnorm.weight", 1 + values["mtp.pre_fc_norm_hidden.weight"]
    yield f"blk.{g.LAYERS}.nextn.shared_head_norm.weight", 1 + values["mtp.norm.weight"]


def _block(block: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    yield "attn_norm.weight", 1 + block["input_layernorm.weight"]
    yield "post_attention_norm.weight", 1 + block["post_attention_layernorm.weight"]
    if "self_attn.q_proj.weight" in block:
        for name in "qkv":
            yield f"attn_{name}.weight", block[f"self_attn.{name}_proj.weight"]
        yield "attn_output.weight", block["self_attn.o_proj.weight"]
        yield "attn_q_norm.weight", 1 + block["self_attn.q_norm.weight"]
        yield "attn_k_norm.weight", 1 + block["self_attn.k_norm.weight"]
    else:
        yield "attn_qkv.weight", _tiled_behind_keys(block["linear_attn.in_proj_qkv.weight"])
        yield "attn_gate.weight", _tiled(block["linear_attn.in_proj_z.weight"])
        yield "ssm_alpha.weight", _tiled(block["linear_attn.in_proj_a.weight"])
        yield "ssm_beta.weight", _tiled(block["linear_attn.in_proj_b.weight"])
        yield "ssm_a", _tiled(-np.exp(block["linear_attn.A_log"].astype(np.float64)).astype(np.float32))
        yield "ssm_dt.bias", _tiled(block["linear_attn.dt_bias"])
        yield "ssm_conv1d.weight", _tiled_behind_keys(block["linear_attn.conv1d.weight"].squeeze(1))
        yield "ssm_norm.weight", block["linear_attn.norm.weight"]
        yield "ssm_out.weight", np.ascontiguousarray(_tiled(block["linear_attn.out_proj.weight"].T).T)
    for name in ("gate", "up", "down"):
        yield f"ffn_{name}.weight", block[f"mlp.{name}_proj.weight"]


def _tiled(values: np.ndarray) -> np.ndarray:
    """Rows of the value heads, an equal number each, from grouped to tiled order."""
    return values.reshape(g.VALUE_HEADS, -1)[_TILED].reshape(values.shape)


def _tiled_behind_keys(values: np.ndarray) -> np.ndarray:
    """The same for rows of queries, keys and values."""
    keys = 2 * checkpoint.KEY_ROWS
    return np.concatenate((values[:keys], _tiled(values[keys:])))
