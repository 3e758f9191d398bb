"""The binder's rules, each broken once in an otherwise valid artifact."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ninfer import models
from ninfer.artifact import Artifact, Binding, Component, Part
from ninfer.errors import ModelError, NInferError
from ninfer.models.binding import component

from .draft import Draft, draft
from .test_transformers import assert_close, teacher_forced
from .tiny import FULL, LINEAR, Qwen35Geometry, build, reference_logits

GEOMETRY = Qwen35Geometry(
    layer_types=(LINEAR, FULL), hidden_size=64, intermediate_size=128, vocab_size=64, heads=2, kv_heads=1
)
KEY = "text/layers/1/attention/key"
OUTPUT = "text/layers/0/gdn/output"
DOWN = "text/layers/0/mlp/down"
TOKENS = tuple(range(40))


@cache
def checkpoint() -> Any:
    return build(GEOMETRY)


def load_edited(path: Path, edit: Callable[[Draft], Any], *, packed: bool = False) -> torch.Tensor:
    """Logits of the edited artifact in float32."""
    out = draft(GEOMETRY, checkpoint(), packed=packed)
    edit(out)
    with Artifact.open(out.write(path / "tiny.ninfer")) as artifact:
        model = models.load(artifact, activation_dtype=torch.float32)
        return teacher_forced(model, TOKENS, [40])


def scalar(d: Draft, id: str, value: float) -> Binding:
    return Binding.to(d.add(id, torch.tensor(value), "fp32"))


def with_divisor(d: Draft, value: float) -> None:
    d.change_use(DOWN, auxiliaries={"activation_input_divisor": scalar(d, "divisor", value)})


def replace_object(d: Draft, name: str, values: torch.Tensor, format: str = "bf16") -> None:
    del d.objects[name], d.data[name]
    d.bindings[name] = Binding.to(d.add(f"{name}/new", values, format))


def nvfp4(d: Draft, divisor: float) -> None:
    """`mlp/down` of layer 0 as an NVFP4 object of zeros: [64, 128] does not fit, [128, 64] of gate does."""
    name = "text/layers/0/mlp/gate"
    rows, columns = 128, 64
    data = bytes(rows * columns // 2 + rows * columns // 16)
    data += torch.tensor([divisor]).numpy().tobytes()
    del d.objects[name], d.data[name]
    d.bindings[name] = Binding.to(
        d.add_encoded("nvfp4", "nvfp4", "block_scale_k16_m128x4_v1", (rows, columns), data)
    )


def head_order(d: Draft, order: list[int], format: str = "int32") -> None:
    tensor = d.add("order", torch.tensor(order), format)
    d.change_use(OUTPUT, auxiliaries={"input_head_order": Binding.to(tensor)})


BROKEN: dict[str, tuple[Callable[[Draft], Any], str]] = {
    "missing matrix": (lambda d: (d.bindings.pop(KEY), d.uses.pop((KEY, "text/layers/1/mixer_input"))), KEY),
    "missing norm": (lambda d: d.bindings.pop("text/final_norm"), "does not bind.*text/final_norm"),
    "missing table": (lambda d: d.bindings.pop("text/token_embedding"), "text/token_embedding"),
    "whole object of another shape": (
        lambda d: replace_object(d, KEY, torch.zeros(64, 32)),
        rf"{KEY}.*\[32, 64\].*\[64, 32\]",
    ),
    "norm of another shape": (
        lambda d: replace_object(d, "text/final_norm", torch.zeros(8, 8)),
        r"text/final_norm.*\[64\].*\[8, 8\]",
    ),
    "parts cover too little": (lambda d: d.bind(KEY, (KEY, 0, 31 * 64)), rf"{KEY}.*2048.*cover 1984"),
    "parts cover too much": (lambda d: d.bind(KEY, (KEY, 0, 32 * 64), (KEY, 0, 64)), rf"{KEY}.*cover 2112"),
    "direct parameter in another format": (
        lambda d: replace_object(d, "text/final_norm", torch.zeros(64), "fp32"),
        "text/final_norm.*'bf16'.*'fp32'",
    ),
    "fp32 parameter in bf16": (
        lambda d: replace_object(d, "text/layers/0/gdn/a_log", torch.zeros(4)),
        "a_log.*'fp32'.*'bf16'",
    ),
    "no Use": (lambda d: d.uses.pop((DOWN, "text/layers/0/mlp/product")), f"{DOWN}.*no Use.*mlp/product"),
    "Use of another input": (lambda d: d.change_use(DOWN, input="text/layers/0/ffn_input"), "no Use"),
    "no policy": (lambda d: d.change_use(DOWN, activation_policy=None), "lacks an activation policy"),
    "unknown auxiliary": (
        lambda d: d.change_use(DOWN, auxiliaries={"hadamard_signs": scalar(d, "signs", 1.0)}),
        f"{DOWN}.*unknown auxiliary 'hadamard_signs'",
    ),
    "head order on another parameter": (
        lambda d: d.change_use(DOWN, auxiliaries={"input_head_order": scalar(d, "signs", 1.0)}),
        "unknown auxiliary 'input_head_order'",
    ),
    "zero divisor": (lambda d: with_divisor(d, 0.0), f"{DOWN}.*positive and finite, not 0"),
    "negative divisor": (lambda d: with_divisor(d, -1.0), "positive and finite, not -1"),
    "infinite divisor": (lambda d: with_divisor(d, float("inf")), "positive and finite, not inf"),
    "NaN divisor": (lambda d: with_divisor(d, float("nan")), "positive and finite, not nan"),
    "divisor of two elements": (
        lambda d: d.change_use(
            DOWN,
            auxiliaries={"activation_input_divisor": Binding.to(d.add("two", torch.ones(2), "fp32"))},
        ),
        "activation_input_divisor",
    ),
    "divisor in bf16": (
        lambda d: d.change_use(
            DOWN,
            auxiliaries={"activation_input_divisor": Binding.to(d.add("half", torch.ones(()), "bf16"))},
        ),
        "'fp32'.*'bf16'",
    ),
    "A4 without divisor": (
        lambda d: (nvfp4(d, 1.0), d.change_use("text/layers/0/mlp/gate", activation_policy="AllowA4")),
        "needs the auxiliary 'activation_input_divisor'",
    ),
    "weight divisor": (lambda d: nvfp4(d, 0.0), "divisor of object 'nvfp4'.*not 0"),
    "broken rows of a quantized parent": (
        lambda d: (
            nvfp4(d, 1.0),
            d.bind("text/layers/0/mlp/gate", ("nvfp4", 32, 128 * 64), ("nvfp4", 0, 32)),
        ),
        "whole rows of 64",
    ),
    "head order that is no permutation": (lambda d: head_order(d, [0, 1, 1, 3]), "permutation of 0..3"),
    "head order of another length": (lambda d: head_order(d, [0, 1, 2]), "input_head_order.*4.*3"),
    "head order in fp32": (lambda d: head_order(d, [0, 1, 2, 3], "fp32"), "'int32'.*'fp32'"),
    "two architectures": (lambda d: d.config.update(architectures=["A", "B"]), "exactly one"),
    "unknown architecture": (lambda d: d.config.update(architectures=["Other"]), "'Other' isn't supported"),
    "unknown config member": (lambda d: d.config.update(hidden_act="silu"), "hidden_act"),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_broken_rules_name_the_parameter(rule: str, tmp_path: Path) -> None:
    edit, message = BROKEN[rule]
    with pytest.raises(ModelError, match=message):
        load_edited(tmp_path, edit)


def test_unknown_formats_are_typed_errors(tmp_path: Path) -> None:
    def edit(d: Draft) -> None:
        id = d.bindings[DOWN][0].object
        d.add_encoded(id, "q3_k", "rows_v1", (64, 128), bytes(100))

    with pytest.raises(NInferError, match="q3_k"):
        load_edited(tmp_path, edit)


def test_public_tokens_beyond_the_vocabulary(tmp_path: Path) -> None:
    path = draft(GEOMETRY, checkpoint()).write(tmp_path / "tiny.ninfer")
    with Artifact.open(path) as artifact, pytest.raises(ModelError, match=r"65 tokens.*64 rows"):
        models.load(artifact, public_tokens=65)


def test_the_component_must_be_there(tmp_path: Path) -> None:
    path = draft(GEOMETRY, checkpoint()).write(tmp_path / "tiny.ninfer")
    with Artifact.open(path) as artifact, pytest.raises(ModelError, match="no component 'vision'"):
        component(artifact, "vision")


def reordered_heads(d: Draft) -> None:
    """Store the output's column blocks of heads in tiled order, as a GGUF with large blocks does."""
    order = [0, 2, 1, 3]
    state = checkpoint().state_dict()["model.layers.0.linear_attn.out_proj.weight"]
    blocks = state.view(64, 4, 24)[:, order].reshape(64, 96)
    replace_object(d, OUTPUT, blocks)
    head_order(d, order)


def scattered_rows(d: Draft) -> None:
    """A parameter in several parts of parents that lie in another order."""
    state = checkpoint().state_dict()["model.layers.1.self_attn.k_proj.weight"]
    d.add("low", state[16:].flip(0))
    d.add("high", state[:16])
    rows = [Part("low", 64 * (15 - i), 64 * (16 - i)) for i in range(16)]
    d.bindings[KEY] = Binding((Part("high", 0, 64 * 16), *rows))


def reshaped_words(d: Draft) -> None:
    """Direct words may lie in a parent of any shape, broken anywhere."""
    state = checkpoint().state_dict()["model.layers.1.self_attn.k_proj.weight"].reshape(-1)
    d.add("words", torch.cat((state[1000:], state[:1000])))
    d.bind(KEY, ("words", 1048, 2048), ("words", 0, 1048))
    norm = checkpoint().state_dict()["model.norm.weight"]
    d.add("norms", torch.cat((torch.ones(5), norm)).view(3, 23))
    d.bind("text/final_norm", ("norms", 5, 69))


def matrix_in_fp32(d: Draft) -> None:
    replace_object(d, DOWN, checkpoint().state_dict()["model.layers.0.mlp.down_proj.weight"], "fp32")


def shared_head(d: Draft) -> None:
    """A part of a vector is as good a divisor as a scalar."""
    d.add("vector", torch.tensor([-1.0, 2.0, 0.0]), "fp32")
    d.change_use(DOWN, auxiliaries={"activation_input_divisor": Binding((Part("vector", 1, 2),))})


def other_components(d: Draft) -> None:
    """What isn't loaded isn't read: an MTP component whose parameters are missing does no harm."""
    d.components["mtp"] = Component({"architectures": ["Qwen3_5MTP"]}, target="text")


@pytest.mark.parametrize(
    "edit", [reordered_heads, scattered_rows, reshaped_words, matrix_in_fp32, shared_head, other_components]
)
def test_unusual_bindings_give_the_same_logits(edit: Callable[[Draft], None], tmp_path: Path) -> None:
    assert_close(load_edited(tmp_path, edit), reference_logits(checkpoint(), TOKENS), 0.002)


def test_packed_parents_become_one_span(tmp_path: Path) -> None:
    path = draft(GEOMETRY, checkpoint()).write(tmp_path / "tiny.ninfer")
    with Artifact.open(path) as artifact:
        model: Any = models.load(artifact)
        for layer in model.parameters.layers:
            assert len(layer.gate_up.spans) == 1
        delta_net, attention = (layer.mixer for layer in model.parameters.layers)
        assert len(delta_net.query_key_value_z.spans) == 1
        assert len(attention.query_key_gate_value.spans) == 1


def test_a_shared_parent_is_placed_once(tmp_path: Path) -> None:
    out = draft(GEOMETRY, checkpoint())
    out.bindings["text/output_head"] = out.bindings["text/token_embedding"]
    with Artifact.open(out.write(tmp_path / "tiny.ninfer")) as artifact:
        model: Any = models.load(artifact)
        head, table = model.parameters.output_head, model.parameters.token_embedding
        assert head.spans[0].parent is table.spans[0].parent
