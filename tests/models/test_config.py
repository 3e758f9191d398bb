from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from ninfer.errors import ModelError
from ninfer.models.llama import config as llama
from ninfer.models.qwen3_5 import config as qwen35
from ninfer.ops import Rope

from .tiny import FULL, LINEAR, LlamaGeometry, Qwen35Geometry

QWEN = Qwen35Geometry().text_config()
LLAMA = LlamaGeometry().text_config()


def edited(config: dict[str, Any], edit: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    copy = deepcopy(config)
    edit(copy)
    return copy


def test_qwen35_config() -> None:
    parsed = qwen35.parse(QWEN, has_mtp=False)
    assert [type(mixer).__name__ for mixer in parsed.mixers] == [
        "DeltaNetConfig",
        "AttentionConfig",
        "DeltaNetConfig",
        "DeltaNetConfig",
        "AttentionConfig",
    ]
    attention, delta_net = parsed.mixers[1], parsed.mixers[0]
    assert attention == qwen35.AttentionConfig(4, 2, 32, Rope(8, 10000.0, (2, 1, 1)))
    assert isinstance(delta_net, qwen35.DeltaNetConfig)
    assert delta_net.channels == 2 * 2 * 16 + 4 * 24


def test_fields_of_unused_layers_may_be_absent() -> None:
    def without(prefix: tuple[str, ...], kind: str) -> dict[str, Any]:
        config = {name: value for name, value in QWEN.items() if not name.startswith(prefix)}
        return config | {"layer_types": [kind], "num_hidden_layers": 1}

    attention = ("num_attention", "num_key", "head_dim", "rope")
    assert len(qwen35.parse(without(("linear_",), FULL), has_mtp=True).mixers) == 1
    assert len(qwen35.parse(without(attention, LINEAR), has_mtp=False).mixers) == 1
    with pytest.raises(ModelError, match="lacks 'num_attention_heads'"):
        qwen35.parse(without(attention, LINEAR), has_mtp=True)
    with pytest.raises(ModelError, match="lacks 'linear_num_key_heads'"):
        qwen35.parse(without(("linear_",), LINEAR), has_mtp=False)


@pytest.mark.parametrize("name", sorted(QWEN))
def test_every_qwen35_field_is_required(name: str) -> None:
    with pytest.raises(ModelError, match=f"lacks '{name}'"):
        qwen35.parse(edited(QWEN, lambda config: config.pop(name)), has_mtp=False)


@pytest.mark.parametrize("name", sorted(LLAMA))
def test_every_llama_field_is_required(name: str) -> None:
    with pytest.raises(ModelError, match=f"lacks '{name}'"):
        llama.parse(edited(LLAMA, lambda config: config.pop(name)))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(bias=True), "members that this version doesn't know: bias"),
        (lambda c: c.update(num_experts=8), "num_experts"),
        (lambda c: c.update(architectures=["Qwen3_5ForCausalLM", "Other"]), "architectures"),
        (lambda c: c.update(model_type="qwen3_5_moe_text"), "model_type"),
        (lambda c: c.update(hidden_size=0), "hidden_size"),
        (lambda c: c.update(hidden_size=96.0), "hidden_size"),
        (lambda c: c.update(hidden_size=True), "hidden_size"),
        (lambda c: c.update(vocab_size=2**32), "vocab_size"),
        (lambda c: c.update(tie_word_embeddings=0), "tie_word_embeddings"),
        (lambda c: c.update(rms_norm_eps=0.0), "rms_norm_eps"),
        (lambda c: c.update(rms_norm_eps=1e-60), "rms_norm_eps"),
        (lambda c: c.update(rms_norm_eps=1e60), "rms_norm_eps"),
        (lambda c: c.update(rms_norm_eps="1e-6"), "rms_norm_eps"),
        (lambda c: c.update(rms_norm_eps=True), "rms_norm_eps"),
        (lambda c: c.update(layer_types=[FULL]), "num_hidden_layers = 5"),
        (lambda c: c.update(layer_types=[FULL] * 4 + ["sliding_attention"]), "sliding_attention"),
        (lambda c: c.update(layer_types="full_attention"), "layer_types"),
        (lambda c: c.update(num_key_value_heads=3), "divisor of num_attention_heads = 4"),
        (lambda c: c.update(linear_num_value_heads=5), "multiple of linear_num_key_heads = 2"),
        (lambda c: c.update(rope_parameters=[]), "must be an object"),
        (lambda c: c["rope_parameters"].update(rope_type="default"), "rope_type"),
        (lambda c: c["rope_parameters"].update(partial_rotary_factor=1.5), "at most 1"),
        (lambda c: c["rope_parameters"].update(partial_rotary_factor=0.1), "even number"),
        (lambda c: c["rope_parameters"].update(partial_rotary_factor=0.01), "even number"),
        (lambda c: c["rope_parameters"].update(mrope_section=[2, 1, 2]), "split of 4 pairs"),
        (lambda c: c["rope_parameters"].update(mrope_section=[0, 3, 1]), "split of 4 pairs"),
        (lambda c: c["rope_parameters"].update(mrope_section=[2, 2]), "3 non-negative integers"),
    ],
)
def test_bad_qwen35_configs(edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        qwen35.parse(edited(QWEN, edit), has_mtp=False)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(rope_parameters={}), "rope_parameters"),
        (lambda c: c.update(model_type="mistral"), "model_type"),
        (lambda c: c.update(num_key_value_heads=4), "divisor of num_attention_heads = 6"),
        (lambda c: c.update(head_dim=33), "head_dim"),
        (lambda c: c.update(rope_theta=-1.0), "rope_theta"),
    ],
)
def test_bad_llama_configs(edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        llama.parse(edited(LLAMA, edit))


def test_rotary_dimension_is_formed_in_fp32() -> None:
    config = edited(QWEN, lambda c: c.update(head_dim=20))
    config["rope_parameters"] = {
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.699999988079071,
        "mrope_section": [3, 2, 2],
    }
    attention = qwen35.parse(config, has_mtp=False).mixers[1]
    assert isinstance(attention, qwen35.AttentionConfig)
    assert attention.rope.rotary_dim == 14
