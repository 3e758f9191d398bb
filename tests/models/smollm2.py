"""SmolLM2's GGUF as a float32 transformers model, dequantized by the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
GGUF = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = ROOT / "tests" / "data" / "python_reference.txt"

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def reference(path: Path = GGUF) -> Any:
    """`LlamaForCausalLM` in float32 on the dequantized weights; norm gains are BF16 as in an artifact."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        field = reader.fields[f"llama.{key}"]
        return field.parts[field.data[0]][0].item()

    heads, kv_heads = value("attention.head_count"), value("attention.head_count_kv")
    state = {}
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.removesuffix(".weight").split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
            if parts[2] in ("attn_q", "attn_k"):
                array = _half_split(array, heads if parts[2] == "attn_q" else kv_heads)
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}[
                parts[0]
            ]
            name += ".weight"
        weight = torch.from_numpy(np.array(array, dtype=np.float32))
        state[name] = weight.to(torch.bfloat16).float() if weight.dim() == 1 else weight
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    rows, hidden = state["model.embed_tokens.weight"].shape
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=hidden,
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.load_state_dict(state, strict=True)
    rotary = model.model.rotary_emb
    rotary.inv_freq.copy_(rotary.compute_default_rope_parameters(config)[0])
    return model.eval()


def windows(tokens: int, context: int, stride: int) -> list[tuple[int, int, int]]:
    """`(begin, first scored, end)` of every window; each token after the first is scored exactly once."""
    end = min(tokens, context)
    plan = [(0, 1, end)]
    while end < tokens:
        new = min(tokens, end + stride)
        plan.append((max(0, new - context), end, new))
        end = new
    return plan


def _half_split(array: np.ndarray, heads: int) -> np.ndarray:
    """GGUF keeps rotary pairs adjacent; transformers keeps the two halves of a head apart."""
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
