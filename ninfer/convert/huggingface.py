"""Component configs from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ninfer.convert import text_config
from ninfer.convert.members import Members, merged
from ninfer.convert.parameters import MTP, TEXT
from ninfer.errors import ConversionError

_DENSE = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
_MOE = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")
_LLAMA = "LlamaForCausalLM"
_ROPE_FIELDS = ("rope_theta", "partial_rotary_factor", "mrope_section")


def components(config: Mapping[str, Any], wanted: Sequence[str], owner: str) -> dict[str, dict[str, Any]]:
    """Configs of the wanted components in the artifact's form, `text` first."""
    architecture = _architecture(config, owner)
    if architecture == _LLAMA:
        if tuple(wanted) != (TEXT,):
            raise ConversionError(f"a Llama checkpoint has the component text only, not {', '.join(wanted)}")
        return {TEXT: _llama(Members(config, owner))}
    if architecture in _MOE:
        raise ConversionError(f"{owner} describes a mixture of experts ({architecture}), which is later work")
    root = Members(config, owner)
    text = root.object("text_config") if "text_config" in root else root
    found = {TEXT: _qwen(text, root, with_mtp=MTP in wanted)}
    for component in wanted:
        if component == MTP:
            text.require("mtp_num_hidden_layers", 1)
            text.require("mtp_use_dedicated_embeddings", False)
            found[MTP] = text_config.mtp()
        elif component != TEXT:
            raise ConversionError(
                f"component '{component}' cannot be converted by this version; use text or text,mtp"
            )
    return found


def text_prefix(config: Mapping[str, Any]) -> str:
    """Where the text model's tensors stand by default."""
    return "model.language_model." if config.get("text_config") is not None else "model."


def _architecture(config: Mapping[str, Any], owner: str) -> str:
    names = config.get("architectures")
    known = (*_DENSE, *_MOE, _LLAMA)
    if isinstance(names, list) and len(names) == 1 and names[0] in known:
        return names[0]
    raise ConversionError(
        f"{owner} has the architecture {names!r}; this version converts {', '.join((*_DENSE, _LLAMA))}"
    )


def _qwen(text: Members, root: Members, with_mtp: bool) -> dict[str, Any]:
    text.require("hidden_act", "silu")
    text.require("attention_bias", False)
    text.require("attn_output_gate", True)
    text.require("mamba_ssm_dtype", "float32")
    layer_types = _layer_types(text)
    tied = root if "tie_word_embeddings" in root else text  # the outer model owns the head
    has_attention = with_mtp or text_config.FULL in layer_types
    return text_config.qwen(
        hidden=text.integer("hidden_size"),
        vocab=text.integer("vocab_size"),
        layer_types=layer_types,
        positions=text.integer("max_position_embeddings"),
        eps=text.real("rms_norm_eps", 1e-6),
        is_tied=tied.boolean("tie_word_embeddings", False),
        intermediate=text.integer("intermediate_size"),
        attention=_attention(text) if has_attention else None,
        recurrence=_recurrence(text) if text_config.LINEAR in layer_types else None,
        owner=text.owner,
    )


def _layer_types(text: Members) -> list[str]:
    layers = text.integer("num_hidden_layers")
    stated = text.get("layer_types")
    if stated is None:
        interval = text.integer("full_attention_interval", 4)
        return [text_config.LINEAR if (i + 1) % interval else text_config.FULL for i in range(layers)]
    if not isinstance(stated, list) or len(stated) != layers:
        raise text.error("layer_types", stated, f"a list of {layers} layer types")
    return stated


def _attention(text: Members) -> text_config.Attention:
    rope = _rope(text)
    rope.require("mrope_interleaved", True)
    sections = rope.get("mrope_section")
    if not isinstance(sections, list):
        raise ConversionError(f"{rope.owner} lacks 'mrope_section'")
    return text_config.Attention(
        heads=text.integer("num_attention_heads"),
        kv_heads=text.integer("num_key_value_heads"),
        head_dim=text.integer("head_dim"),
        theta=rope.real("rope_theta", 1e7),
        factor=rope.real("partial_rotary_factor", 0.25),
        sections=sections,
    )


def _recurrence(text: Members) -> text_config.Recurrence:
    return text_config.Recurrence(
        key_heads=text.integer("linear_num_key_heads"),
        key_dim=text.integer("linear_key_head_dim"),
        value_heads=text.integer("linear_num_value_heads"),
        value_dim=text.integer("linear_value_head_dim"),
        taps=text.integer("linear_conv_kernel_dim"),
    )


def _rope(text: Members) -> Members:
    level = Members({name: text.get(name) for name in _ROPE_FIELDS}, f"{text.owner} itself")
    owner = f"the rotary embedding of {text.owner}"
    rope = merged(owner, text.object("rope_scaling"), text.object("rope_parameters"), level)
    rope.require("type", "default")
    rope.require("rope_type", "default")
    rope.require("factor", 1, 1.0)
    return rope


def _llama(config: Members) -> dict[str, Any]:
    config.require("hidden_act", "silu")
    config.require("attention_bias", False)
    config.require("mlp_bias", False)
    rope = _rope(config)
    rope.require("partial_rotary_factor", 1, 1.0)
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    stated_dim = config.get("head_dim")
    return text_config.llama(
        hidden=hidden,
        intermediate=config.integer("intermediate_size"),
        layers=config.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=text_config.head_dim_of(hidden, heads, config.owner)
        if stated_dim is None
        else config.integer("head_dim"),
        theta=rope.real("rope_theta", 10000.0),
        eps=config.real("rms_norm_eps", 1e-6),
        vocab=config.integer("vocab_size"),
        positions=config.integer("max_position_embeddings", 2048),
        is_tied=config.boolean("tie_word_embeddings", False),
        owner=config.owner,
    )
