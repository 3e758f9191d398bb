"""Where each logical parameter stands in a GGUF file, and how to undo what the exporter did to it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ninfer.convert.gguf_config import draft_layers
from ninfer.convert.gguf_file import GgufFile
from ninfer.convert.parameters import MTP, Geometry, Parameter
from ninfer.convert.source import Blocks
from ninfer.convert.views import Rows, View, Whole, half_heads, half_split_pairs, head_rows, untiled, vector
from ninfer.errors import ConversionError

_PRIVATE_MTP = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")


def views(parameters: Mapping[str, Parameter], geometry: Geometry, file: GgufFile) -> dict[str, View]:
    """Views of every parameter; refuses files with tensors that no view explains."""
    g = geometry
    norm = vector if g.is_llama else _offset_norm
    table = Rows("token_embd.weight", (g.vocab, g.hidden))
    found: dict[str, View] = {
        "text/token_embedding": table,
        "text/output_head": table if g.is_tied else Rows("output.weight", (g.vocab, g.hidden)),
        "text/final_norm": norm("output_norm.weight", g.hidden),
    }
    for index, kind in enumerate(g.layers):
        block = _llama_block(g, f"blk.{index}.") if g.is_llama else _block(g, f"blk.{index}.", kind)
        found |= {f"text/layers/{index}/{name}": view for name, view in block.items()}
    has_mtp = any(parameter.component == MTP for parameter in parameters.values())
    if has_mtp:
        found |= _mtp(g, file, len(g.layers))
    _check_complete(found, file, len(g.layers), has_mtp)
    return {name: found[name] for name in parameters}


def _check_complete(found: Mapping[str, View], file: GgufFile, layers: int, has_mtp: bool) -> None:
    used = {view.tensor for view in found.values()}
    for name, tensor in file.tensors.items():
        if name in used:
            continue
        if name == "rope_freqs.weight":
            _check_rope_factors(file, tensor.type)
            continue
        if draft_layers(file) and not has_mtp and name.startswith(f"blk.{layers}."):
            continue
        raise ConversionError(
            f"{file.path} has the tensor '{name}', which this architecture does not use; it cannot be "
            "converted"
        )


def _check_rope_factors(file: GgufFile, kind: str) -> None:
    tensor = file.tensors["rope_freqs.weight"]
    if kind == "F32":
        factors = np.frombuffer(file.data[tensor.offset : tensor.offset + tensor.bytes], "<f4")
        if (factors == 1).all():
            return
    raise ConversionError(
        f"{file.path} scales its rotary frequencies (rope_freqs.weight), which is not supported"
    )


def _llama_block(g: Geometry, stored: str) -> dict[str, View]:
    def rotary(name: str, heads: int) -> Rows:
        return Rows(
            f"{stored}{name}.weight", (heads * g.head_dim, g.hidden), half_split_pairs(heads, g.head_dim)
        )

    return {
        "input_norm": vector(f"{stored}attn_norm.weight", g.hidden),
        "attention/query": rotary("attn_q", g.heads),
        "attention/key": rotary("attn_k", g.kv_heads),
        "attention/value": Rows(f"{stored}attn_v.weight", (g.kv_rows, g.hidden)),
        "attention/output": Rows(f"{stored}attn_output.weight", (g.hidden, g.query_rows)),
        "post_attention_norm": vector(f"{stored}ffn_norm.weight", g.hidden),
        **_mlp(g, stored),
    }


def _mlp(g: Geometry, stored: str) -> dict[str, View]:
    return {
        "mlp/gate": Rows(f"{stored}ffn_gate.weight", (g.intermediate, g.hidden)),
        "mlp/up": Rows(f"{stored}ffn_up.weight", (g.intermediate, g.hidden)),
        "mlp/down": Rows(f"{stored}ffn_down.weight", (g.hidden, g.intermediate)),
    }


def _block(g: Geometry, stored: str, kind: str) -> dict[str, View]:
    return {
        "input_norm": _offset_norm(f"{stored}attn_norm.weight", g.hidden),
        "post_attention_norm": _offset_norm(f"{stored}post_attention_norm.weight", g.hidden),
        **(_attention(g, stored) if kind == "full_attention" else _gdn(g, stored)),
        **_mlp(g, stored),
    }


def _attention(g: Geometry, stored: str) -> dict[str, View]:
    both = (2 * g.query_rows, g.hidden)
    return {
        "attention/query": Rows(f"{stored}attn_q.weight", both, half_heads(g.heads, g.head_dim, 0)),
        "attention/gate": Rows(f"{stored}attn_q.weight", both, half_heads(g.heads, g.head_dim, 1)),
        "attention/key": Rows(f"{stored}attn_k.weight", (g.kv_rows, g.hidden)),
        "attention/value": Rows(f"{stored}attn_v.weight", (g.kv_rows, g.hidden)),
        "attention/query_norm": _offset_norm(f"{stored}attn_q_norm.weight", g.head_dim),
        "attention/key_norm": _offset_norm(f"{stored}attn_k_norm.weight", g.head_dim),
        "attention/output": Rows(f"{stored}attn_output.weight", (g.hidden, g.query_rows)),
    }


def _gdn(g: Geometry, stored: str) -> dict[str, View]:
    order = untiled(g.key_heads, g.value_heads)
    heads = torch.from_numpy(order)
    keys = g.gdn_key_rows
    channels = 2 * keys + g.gdn_value_rows
    value_rows = head_rows(order, g.value_dim, first=2 * keys)
    all_channels = torch.from_numpy(np.concatenate((np.arange(2 * keys), value_rows)))
    qkv = f"{stored}attn_qkv.weight"
    return {
        "gdn/a_log": vector(f"{stored}ssm_a", g.value_heads, lambda a: _a_log(a[heads], f"{stored}ssm_a")),
        "gdn/dt_bias": vector(f"{stored}ssm_dt.bias", g.value_heads, lambda bias: bias[heads]),
        "gdn/convolution": Whole(
            f"{stored}ssm_conv1d.weight",
            (g.taps, channels),
            ((channels, g.taps), (channels, 1, g.taps)),
            lambda kernel: kernel.reshape(channels, g.taps)[all_channels].t().contiguous(),
        ),
        "gdn/a_projection": Rows(f"{stored}ssm_alpha.weight", (g.value_heads, g.hidden), order),
        "gdn/b_projection": Rows(f"{stored}ssm_beta.weight", (g.value_heads, g.hidden), order),
        "gdn/query": Rows(qkv, (channels, g.hidden), np.arange(keys)),
        "gdn/key": Rows(qkv, (channels, g.hidden), np.arange(keys, 2 * keys)),
        "gdn/value": Rows(qkv, (channels, g.hidden), value_rows),
        "gdn/z": Rows(
            f"{stored}attn_gate.weight", (g.gdn_value_rows, g.hidden), head_rows(order, g.value_dim)
        ),
        "gdn/norm": vector(f"{stored}ssm_norm.weight", g.value_dim),
        "gdn/output": Rows(
            f"{stored}ssm_out.weight", (g.hidden, g.gdn_value_rows), None, Blocks(g.value_dim, order)
        ),
    }


def _mtp(g: Geometry, file: GgufFile, index: int) -> dict[str, View]:
    stored = f"blk.{index}."
    for name in _PRIVATE_MTP:
        if stored + name in file.tensors:
            raise ConversionError(
                f"{file.path} gives its MTP layer an embedding or head of its own ('{stored}{name}'), "
                "which is not supported"
            )
    final = f"{stored}nextn.shared_head_norm.weight"
    found: dict[str, View] = {
        "mtp/input_projection": Rows(f"{stored}nextn.eh_proj.weight", (g.hidden, 2 * g.hidden)),
        "mtp/embedding_norm": _offset_norm(f"{stored}nextn.enorm.weight", g.hidden),
        "mtp/hidden_norm": _offset_norm(f"{stored}nextn.hnorm.weight", g.hidden),
        "mtp/final_norm": _offset_norm(final if final in file.tensors else "output_norm.weight", g.hidden),
    }
    return found | {
        f"mtp/layers/0/{name}": view for name, view in _block(g, stored, "full_attention").items()
    }


def _offset_norm(tensor: str, size: int) -> Whole:
    """A gain that the exporter stored as 1 + w; w comes back by one FP32 subtraction."""
    return vector(tensor, size, lambda gain: gain.float() - 1.0)


def _a_log(negative_rates: torch.Tensor, tensor: str) -> torch.Tensor:
    """A_log from -exp(A_log): the BF16 value that explains the word within 2 ulp, else the FP32 logarithm."""
    rates = -negative_rates.float()
    if not bool(((rates > 0) & torch.isfinite(rates)).all()):
        raise ConversionError(
            f"tensor '{tensor}' holds values that are not negative and finite; it must be -exp(A_log)"
        )
    exact = torch.log(rates.double()).float()
    rounded = exact.bfloat16().float()
    explained = torch.exp(rounded.double()).float()
    distance = (explained.view(torch.int32).long() - rates.view(torch.int32).long()).abs()
    return torch.where(distance <= 2, rounded, exact)
