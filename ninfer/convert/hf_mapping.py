"""Where each logical parameter stands in a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ninfer.convert.parameters import MTP, Geometry, Parameter
from ninfer.convert.source import Source
from ninfer.convert.views import Rows, View, Whole, half_heads, vector
from ninfer.errors import ConversionError

_PREFIXES = ("model.language_model.", "model.", "language_model.", "")
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "k_scale", "v_scale")


def views(
    parameters: Mapping[str, Parameter],
    geometry: Geometry,
    source: Source,
    prefix: str,
    *,
    is_partial: bool = False,
) -> dict[str, View]:
    """Views of all parameters of text and mtp; `prefix` is where the text model is expected.

    A partial source (an additional one) may lack the head and the MTP layer; they get no view then.
    """
    prefix = _prefix(source, prefix)
    found = dict(_globals(geometry, source, prefix, is_partial))
    for index, kind in enumerate(geometry.layers):
        found |= _block(geometry, f"text/layers/{index}/", f"{prefix}layers.{index}.", kind)
    wants_mtp = any(parameter.component == MTP for parameter in parameters.values())
    if wants_mtp and not (is_partial and _mtp_prefix(source) is None):
        found |= _mtp(geometry, source)
    return {name: found[name] for name in parameters if name in found}


def unmapped(views: Mapping[str, View], source: Source, prefix: str) -> list[str]:
    """Tensors of the text blocks that no view reads; converting without them would change the model."""
    prefix = _prefix(source, prefix)
    used = {view.tensor for view in views.values()}
    stems = {name.removesuffix("weight") for name in used if name.endswith(".weight")}
    left = []
    for name in source.tensors:
        if not name.startswith(f"{prefix}layers.") or name in used or name.endswith(_IGNORED_SUFFIXES):
            continue
        stem = name[: name.rfind(".") + 1]
        if name.endswith(".bias") or stem not in stems:
            left.append(name)
    return sorted(left)


def _prefix(source: Source, expected: str) -> str:
    for prefix in (expected, *_PREFIXES):
        if source.has(f"{prefix}embed_tokens.weight"):
            return prefix
    raise ConversionError(
        f"{source.path} has no tensor '{expected}embed_tokens.weight': it holds no text model"
    )


def _globals(g: Geometry, source: Source, prefix: str, is_partial: bool) -> Iterator[tuple[str, View]]:
    embedding = Rows(f"{prefix}embed_tokens.weight", (g.vocab, g.hidden))
    yield "text/token_embedding", embedding
    if g.is_tied:
        yield "text/output_head", embedding
    elif source.has("lm_head.weight") or not is_partial:
        yield "text/output_head", _head(g, source)
    yield "text/final_norm", vector(f"{prefix}norm.weight", g.hidden)


def _head(g: Geometry, source: Source) -> Rows:
    if not source.has("lm_head.weight"):
        raise ConversionError(
            f"{source.path} has no tensor 'lm_head.weight' although its config says tie_word_embeddings = "
            "false"
        )
    return Rows("lm_head.weight", (g.vocab, g.hidden))


def _block(g: Geometry, logical: str, stored: str, kind: str) -> dict[str, View]:
    found: dict[str, View] = {
        "input_norm": vector(f"{stored}input_layernorm.weight", g.hidden),
        "post_attention_norm": vector(f"{stored}post_attention_layernorm.weight", g.hidden),
        "mlp/gate": Rows(f"{stored}mlp.gate_proj.weight", (g.intermediate, g.hidden)),
        "mlp/up": Rows(f"{stored}mlp.up_proj.weight", (g.intermediate, g.hidden)),
        "mlp/down": Rows(f"{stored}mlp.down_proj.weight", (g.hidden, g.intermediate)),
    }
    found |= _attention(g, stored) if kind == "full_attention" else _gdn(g, stored)
    return {logical + name: view for name, view in found.items()}


def _attention(g: Geometry, stored: str) -> dict[str, View]:
    stored += "self_attn."
    found: dict[str, View] = {
        "attention/key": Rows(f"{stored}k_proj.weight", (g.kv_rows, g.hidden)),
        "attention/value": Rows(f"{stored}v_proj.weight", (g.kv_rows, g.hidden)),
        "attention/output": Rows(f"{stored}o_proj.weight", (g.hidden, g.query_rows)),
    }
    if g.is_llama:
        return found | {"attention/query": Rows(f"{stored}q_proj.weight", (g.query_rows, g.hidden))}
    for half, name in enumerate(("attention/query", "attention/gate")):
        index = half_heads(g.heads, g.head_dim, half)
        found[name] = Rows(f"{stored}q_proj.weight", (2 * g.query_rows, g.hidden), index)
    for name in ("query", "key"):
        found[f"attention/{name}_norm"] = vector(f"{stored}{name[0]}_norm.weight", g.head_dim)
    return found


def _gdn(g: Geometry, stored: str) -> dict[str, View]:
    stored += "linear_attn."
    channels = 2 * g.gdn_key_rows + g.gdn_value_rows
    found: dict[str, View] = {
        "gdn/a_log": vector(f"{stored}A_log", g.value_heads),
        "gdn/dt_bias": vector(f"{stored}dt_bias", g.value_heads),
        "gdn/convolution": Whole(
            f"{stored}conv1d.weight",
            (g.taps, channels),
            ((channels, 1, g.taps),),
            lambda stored: stored.reshape(channels, g.taps).t().contiguous(),
        ),
        "gdn/a_projection": Rows(f"{stored}in_proj_a.weight", (g.value_heads, g.hidden)),
        "gdn/b_projection": Rows(f"{stored}in_proj_b.weight", (g.value_heads, g.hidden)),
        "gdn/z": Rows(f"{stored}in_proj_z.weight", (g.gdn_value_rows, g.hidden)),
        "gdn/norm": vector(f"{stored}norm.weight", g.value_dim),
        "gdn/output": Rows(f"{stored}out_proj.weight", (g.hidden, g.gdn_value_rows)),
    }
    index = np.arange(channels)
    thirds = {
        "gdn/query": index[: g.gdn_key_rows],
        "gdn/key": index[g.gdn_key_rows : 2 * g.gdn_key_rows],
        "gdn/value": index[2 * g.gdn_key_rows :],
    }
    for name, rows in thirds.items():
        found[name] = Rows(f"{stored}in_proj_qkv.weight", (channels, g.hidden), rows)
    return found


def _mtp(g: Geometry, source: Source) -> dict[str, View]:
    stored = _mtp_prefix(source)
    if stored is None:
        raise ConversionError(
            f"{source.path} has no MTP layer ('mtp.fc.weight'); leave mtp out of --components"
        )
    found: dict[str, View] = {
        "mtp/input_projection": Rows(f"{stored}fc.weight", (g.hidden, 2 * g.hidden)),
        "mtp/embedding_norm": vector(f"{stored}pre_fc_norm_embedding.weight", g.hidden),
        "mtp/hidden_norm": vector(f"{stored}pre_fc_norm_hidden.weight", g.hidden),
        "mtp/final_norm": vector(f"{stored}norm.weight", g.hidden),
    }
    return found | _block(g, "mtp/layers/0/", f"{stored}layers.0.", "full_attention")


def _mtp_prefix(source: Source) -> str | None:
    return next((prefix for prefix in ("mtp.", "model.mtp.") if source.has(f"{prefix}fc.weight")), None)
