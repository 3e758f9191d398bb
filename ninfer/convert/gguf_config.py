"""Component configs from the keys of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ninfer.convert import text_config
from ninfer.convert.gguf_file import GgufFile
from ninfer.convert.members import Members
from ninfer.convert.parameters import MTP, TEXT
from ninfer.errors import ConversionError

QWEN = "qwen35"
LLAMA = "llama"


def architecture(file: GgufFile) -> str:
    """`general.architecture`, which must be one that this version converts."""
    name = file.keys.get("general.architecture")
    if name == "qwen35moe":
        raise ConversionError(f"{file.path} holds a mixture of experts (qwen35moe), which is later work")
    if name not in (QWEN, LLAMA):
        raise ConversionError(
            f"{file.path} has the architecture {name!r}; this version converts {LLAMA} and {QWEN}"
        )
    return name


def components(file: GgufFile, wanted: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Configs of the wanted components in the artifact's form, `text` first."""
    name = architecture(file)
    prefix = name + "."
    keys = {key.removeprefix(prefix): value for key, value in file.keys.items() if key.startswith(prefix)}
    members = Members(keys, f"the {name} keys of {file.path}")
    members.require("rope.scaling.type", "none")
    if name == LLAMA:
        if tuple(wanted) != (TEXT,):
            raise ConversionError(f"a Llama checkpoint has the component text only, not {', '.join(wanted)}")
        return {TEXT: _llama(file, members)}
    found = {TEXT: _qwen(file, members, MTP in wanted)}
    for component in wanted:
        if component == MTP:
            if draft_layers(file) != 1:
                raise ConversionError(
                    f"{file.path} has {draft_layers(file)} MTP layers (nextn_predict_layers); the "
                    "component mtp needs one"
                )
            found[MTP] = text_config.mtp()
        elif component != TEXT:
            raise ConversionError(
                f"component '{component}' cannot be converted by this version; use text or text,mtp"
            )
    return found


def draft_layers(file: GgufFile) -> int:
    """Blocks behind the text layers that belong to MTP."""
    return Members(file.keys, str(file.path)).count("qwen35.nextn_predict_layers", 0)


def _vocab(file: GgufFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ConversionError(f"{file.path} has no matrix 'token_embd.weight'")
    return table.shape[0]


def _llama(file: GgufFile, keys: Members) -> dict[str, Any]:
    if keys.count("expert_count", 0):
        raise ConversionError(
            f"{keys.owner} state {keys.get('expert_count')} experts; mixtures of experts are not Llama "
            "models here"
        )
    hidden = keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")
    head_dim = _head_dim(
        keys,
        text_config.head_dim_of(hidden, heads, keys.owner) if "attention.key_length" not in keys else None,
    )
    keys.require("rope.dimension_count", head_dim)
    return text_config.llama(
        hidden=hidden,
        intermediate=keys.integer("feed_forward_length"),
        layers=keys.integer("block_count"),
        heads=heads,
        kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        theta=keys.real("rope.freq_base", 10000.0),
        eps=keys.real("attention.layer_norm_rms_epsilon"),
        vocab=_vocab(file),
        positions=keys.integer("context_length"),
        is_tied="output.weight" not in file.tensors,
        owner=keys.owner,
    )


def _head_dim(keys: Members, default: int | None = None) -> int:
    head_dim = keys.integer("attention.key_length", default)
    keys.require("attention.value_length", head_dim)
    return head_dim


def _qwen(file: GgufFile, keys: Members, with_mtp: bool) -> dict[str, Any]:
    blocks = keys.integer("block_count")
    layers = blocks - draft_layers(file)
    if layers < 1:
        raise ConversionError(
            f"{keys.owner} count {blocks} blocks, {draft_layers(file)} of them MTP: no text layer is left"
        )
    layer_types = _layer_types(keys, blocks)[:layers]
    return text_config.qwen(
        hidden=keys.integer("embedding_length"),
        vocab=_vocab(file),
        layer_types=layer_types,
        positions=keys.integer("context_length"),
        eps=keys.real("attention.layer_norm_rms_epsilon", 1e-6),
        is_tied="output.weight" not in file.tensors,
        intermediate=keys.integer("feed_forward_length"),
        attention=_attention(keys) if with_mtp or text_config.FULL in layer_types else None,
        recurrence=_recurrence(keys) if text_config.LINEAR in layer_types else None,
        owner=keys.owner,
    )


def _layer_types(keys: Members, blocks: int) -> list[str]:
    recurrent = keys.get("attention.recurrent_layers")
    if recurrent is None:
        interval = keys.integer("full_attention_interval", 4)
        recurrent = [bool((i + 1) % interval) for i in range(blocks)]
    elif not isinstance(recurrent, list) or len(recurrent) != blocks:
        raise keys.error("attention.recurrent_layers", recurrent, f"a list of {blocks} booleans")
    return [text_config.LINEAR if flag else text_config.FULL for flag in recurrent]


def _attention(keys: Members) -> text_config.Attention:
    head_dim = _head_dim(keys)
    sections = keys.get("rope.dimension_sections")
    if not isinstance(sections, list) or len(sections) < 3 or any(sections[3:]):
        raise keys.error("rope.dimension_sections", sections, "three numbers of pairs, zeros behind them")
    factor = keys.integer("rope.dimension_count") / head_dim if "rope.dimension_count" in keys else 0.25
    return text_config.Attention(
        heads=keys.integer("attention.head_count"),
        kv_heads=keys.integer("attention.head_count_kv"),
        head_dim=head_dim,
        theta=keys.real("rope.freq_base", 1e7),
        factor=text_config.float32(factor),
        sections=sections[:3],
    )


def _recurrence(keys: Members) -> text_config.Recurrence:
    value_heads = keys.integer("ssm.time_step_rank")
    inner = keys.integer("ssm.inner_size")
    if inner % value_heads:
        raise keys.error("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank = {value_heads}")
    return text_config.Recurrence(
        key_heads=keys.integer("ssm.group_count"),
        key_dim=keys.integer("ssm.state_size"),
        value_heads=value_heads,
        value_dim=inner // value_heads,
        taps=keys.integer("ssm.conv_kernel"),
    )
