"""Checkpoints that are damaged, incomplete or of another kind: one clear sentence, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ninfer.convert import convert
from ninfer.convert.gguf_file import GgufFile
from ninfer.convert.safetensors_source import SafetensorsSource
from ninfer.errors import ConversionError

from . import exporter, tiny

REAL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SETTINGS = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    tiny.write_qwen(folder)
    return folder


@pytest.fixture(scope="module")
def llama_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    exporter.write_llama(folder / "m.gguf", tiny.write_llama(folder / "hf"))
    return folder / "m.gguf"


def _refused(source: Path, out: Path, **options: Any) -> str:
    with pytest.raises(ConversionError) as caught:
        convert(source, out / "out.ninfer", **options)
    assert not list(out.glob("*out.ninfer*"))
    text = str(caught.value)
    assert "\n" not in text
    return text


# GGUF container


@pytest.mark.skipif(not REAL.exists(), reason="needs the model that `make demo` fetches")
def test_parses_like_the_gguf_package() -> None:
    _compare(REAL)


def test_parses_tiny_files_like_the_gguf_package(llama_gguf: Path) -> None:
    _compare(llama_gguf)


def _compare(path: Path) -> None:
    ours, theirs = GgufFile.open(path), gguf.GGUFReader(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours.keys[name] == field.contents(), name
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.type, mine.offset, mine.bytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert mine.shape == tuple(int(size) for size in tensor.shape[::-1])
    ours.data.close()


@SETTINGS
@given(st.data())
def test_truncated_gguf(llama_gguf: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = llama_gguf.read_bytes()
    size = data.draw(st.integers(0, len(whole) - 1))
    (tmp_path / "cut.gguf").write_bytes(whole[:size])
    text = _refused(tmp_path / "cut.gguf", tmp_path)
    assert "cut.gguf" in text


@SETTINGS
@given(st.data())
def test_damaged_gguf_header(llama_gguf: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Any bytes in the header: the file opens (a name or a number was changed) or is refused."""
    whole = bytearray(llama_gguf.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, 4000))] = data.draw(st.integers(0, 255))
    (tmp_path / "bad.gguf").write_bytes(whole)
    with contextlib.suppress(ConversionError):
        GgufFile.open(tmp_path / "bad.gguf").data.close()


def test_gguf_lengths_that_would_keep_a_reader_busy(tmp_path: Path) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    for kind in (0, 4, 8, 9):
        (tmp_path / "m.gguf").write_bytes(header + struct.pack("<IQ", kind, 1 << 60) + bytes(64))
        assert "damaged" in _refused(tmp_path / "m.gguf", tmp_path)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"", "cannot be read"),
        (b"GGUX\3\0\0\0", "instead of b'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
    ],
)
def test_not_gguf(tmp_path: Path, start: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(start)
    assert message in _refused(tmp_path / "m.gguf", tmp_path)


def test_missing_source(tmp_path: Path) -> None:
    assert "does not exist" in _refused(tmp_path / "none", tmp_path)
    assert "does not exist" in _refused(tmp_path / "none.gguf", tmp_path)


# GGUF models


def _rewritten(
    path: Path, out: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], None]
) -> Path:
    """The file with its keys and tensors changed; tensors are float32."""
    reader = gguf.GGUFReader(path)
    keys = {
        name: (f.types, f.contents()) for name, f in reader.fields.items() if not name.startswith("GGUF.")
    }
    values = {name: value for name, (_, value) in keys.items()}
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    change(values, tensors)
    writer = gguf.GGUFWriter(out, values["general.architecture"])
    for name, value in values.items():
        if name == "general.architecture":
            continue
        if name in keys and keys[name][0][0] != gguf.GGUFValueType.ARRAY:
            writer.add_key_value(name, value, keys[name][0][0])
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


ONES = np.ones(16, np.float32)
GGUF_FAULTS: list[tuple[Callable[[dict[str, Any], dict[str, np.ndarray]], Any], str]] = [
    (
        lambda k, t: k.update({"general.architecture": "gemma3"}),
        "architecture 'gemma3'; this version converts llama",
    ),
    (lambda k, t: k.update({"general.architecture": "qwen35moe"}), "mixture of experts"),
    (lambda k, t: k.update({"llama.expert_count": 8}), "8 experts"),
    (lambda k, t: k.update({"llama.rope.scaling.type": "yarn"}), "'rope.scaling.type' .* must be 'none'"),
    (lambda k, t: k.update({"llama.rope.dimension_count": 16}), "'rope.dimension_count' .* must be 32"),
    (lambda k, t: k.update({"llama.attention.value_length": 16}), "'attention.value_length'"),
    (lambda k, t: k.pop("llama.block_count"), "lacks? 'block_count'"),
    (lambda k, t: k.update({"llama.block_count": 0}), "positive 32-bit integer"),
    (lambda k, t: k.update({"llama.attention.head_count_kv": 2}), "3 attention heads, not a multiple of 2"),
    (lambda k, t: k.update({"llama.block_count": 3}), "no tensor 'blk.2.attn_"),
    (lambda k, t: t.update({"rope_freqs.weight": 2 * ONES}), "scales its rotary frequencies"),
    (
        lambda k, t: t.update({"blk.0.attn_q.bias": ONES}),
        "the tensor 'blk.0.attn_q.bias', which .* does not use",
    ),
    (lambda k, t: t.pop("blk.1.ffn_up.weight"), "no tensor 'blk.1.ffn_up.weight'"),
    (lambda k, t: t.pop("token_embd.weight"), "no matrix 'token_embd.weight'"),
    (
        lambda k, t: t.update({"blk.1.ffn_up.weight": np.ones((8, 8), np.float32)}),
        r"shape \[8, 8\]; .* \[160, 96\]",
    ),
    (lambda k, t: t.update({"blk.1.attn_norm.weight": ONES}), r"shape \[16\]; .* \[96\]"),
    (lambda k, t: k.update({"split.count": 2}), "merge them first"),
]


@pytest.mark.parametrize(("change", "message"), GGUF_FAULTS)
def test_gguf_models_that_cannot_be_converted(
    llama_gguf: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Any], dict[str, np.ndarray]], Any],
    message: str,
) -> None:
    import re

    assert re.search(message, _refused(_rewritten(llama_gguf, tmp_path / "m.gguf", change), tmp_path))


def test_rope_factors_of_one_are_harmless(llama_gguf: Path, tmp_path: Path) -> None:
    changed = _rewritten(llama_gguf, tmp_path / "m.gguf", lambda k, t: t.update({"rope_freqs.weight": ONES}))
    convert(changed, tmp_path / "out.ninfer")


def test_unsupported_block_types_are_named(tmp_path: Path) -> None:
    tensors = tiny.write_llama(tmp_path / "hf")
    exporter.write_llama(tmp_path / "m.gguf", tensors, encode=exporter.quantized("Q5_0"))
    text = _refused(tmp_path / "m.gguf", tmp_path)
    assert "has the type Q5_0; supported are F32, F16, BF16, Q4_0" in text


QWEN_FAULTS = [
    ({"qwen35.rope.dimension_count": 16}, {}, "mrope_section"),
    ({"qwen35.ssm.inner_size": 100}, {}, "multiple of ssm.time_step_rank"),
    ({"qwen35.ssm.group_count": 4}, {}, "6 linear value heads, not a multiple of 4"),
    ({}, {"components": ("text", "mtp")}, "0 MTP layers"),
    ({}, {"components": ("text", "vision")}, "component 'vision' cannot be converted"),
]


@pytest.mark.parametrize(("keys", "options", "message"), QWEN_FAULTS)
def test_qwen_gguf_faults(
    tmp_path: Path, keys: dict[str, int], options: dict[str, Any], message: str
) -> None:
    tensors = tiny.write_qwen(tmp_path / "hf")
    exporter.write_qwen(tmp_path / "a.gguf", tensors, tiny.SMALL)
    changed = _rewritten(tmp_path / "a.gguf", tmp_path / "m.gguf", lambda k, _: k.update(keys))
    assert message in _refused(changed, tmp_path, **options)


def test_positive_decay_rates_are_refused(tmp_path: Path) -> None:
    tensors = tiny.write_qwen(tmp_path / "hf")
    exporter.write_qwen(tmp_path / "a.gguf", tensors, tiny.SMALL)
    changed = _rewritten(tmp_path / "a.gguf", tmp_path / "m.gguf", lambda _, t: t["blk.0.ssm_a"].fill(1.0))
    assert "'blk.0.ssm_a' holds values that are not negative" in _refused(changed, tmp_path)


def test_private_mtp_embedding_is_refused(tmp_path: Path) -> None:
    tensors = tiny.write_qwen(tmp_path / "hf", has_mtp=True)
    exporter.write_qwen(tmp_path / "a.gguf", tensors, tiny.SMALL, has_mtp=True)
    name = "blk.5.nextn.embed_tokens.weight"
    extra = np.ones((80, 64), np.float32)
    changed = _rewritten(tmp_path / "a.gguf", tmp_path / "m.gguf", lambda _, t: t.update({name: extra}))
    assert "an embedding or head of its own" in _refused(changed, tmp_path, components=("text", "mtp"))


def test_a_log_that_is_no_bf16_value_keeps_its_fp32_logarithm() -> None:
    from ninfer.convert.gguf_mapping import _a_log

    exact = torch.tensor([1.0009765625 + 2**-12, -3.25, 2**-14, 0.0])
    found = _a_log(-torch.exp(exact.double()).float(), "ssm_a")
    assert found[1:].tolist() == exact[1:].tolist()
    assert found[0].bfloat16().float() != found[0]
    assert abs(float(found[0] - exact[0])) < 2e-7


# safetensors


def _copy(folder: Path, to: Path) -> Path:
    import shutil

    return Path(shutil.copytree(folder, to))


def test_truncated_safetensors(folder: Path, tmp_path: Path) -> None:
    copied = _copy(folder, tmp_path / "m")
    whole = (copied / "model.safetensors").read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        (copied / "model.safetensors").write_bytes(whole[:size])
        assert "model.safetensors is not a usable safetensors file" in _refused(copied, tmp_path)


def test_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert "neither model.safetensors.index.json nor model.safetensors" in _refused(tmp_path / "m", tmp_path)


def test_missing_shard_and_missing_tensor(tmp_path: Path) -> None:
    tiny.write_qwen(tmp_path / "m", is_sharded=True)
    index = tmp_path / "m" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    shard = sorted(set(listed["weight_map"].values()))[0]
    listed["weight_map"]["model.norm.extra"] = shard
    index.write_text(json.dumps(listed))
    assert "lacks the tensor 'model.norm.extra'" in _refused(tmp_path / "m", tmp_path)
    (tmp_path / "m" / shard).unlink()
    assert f"lists the file {shard}, which is missing" in _refused(tmp_path / "m", tmp_path)
    index.write_text("{}")
    assert "has no 'weight_map'" in _refused(tmp_path / "m", tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.norm.weight", None, "no tensor 'model.norm.weight'"),
        ("lm_head.weight", None, "no tensor 'lm_head.weight' although its config says"),
        ("model.embed_tokens.weight", None, "holds no text model"),
        (
            "model.layers.0.mlp.up_proj.weight",
            torch.zeros(3, 64),
            r"shape [3, 64]; the config asks for [96, 64]",
        ),
        ("model.layers.0.mlp.up_proj.bias", torch.zeros(96), "'model.layers.0.mlp.up_proj.bias', which this"),
        ("model.layers.0.other.weight", torch.zeros(96), "'model.layers.0.other.weight', which this"),
        (
            "model.layers.0.mlp.up_proj.weight",
            torch.zeros(96, 64).long(),
            "has the type I64, which is not a weight",
        ),
        (
            "model.layers.0.mlp.up_proj.weight",
            torch.full((96, 64), torch.nan),
            "cannot be stored as q4_g64_fp16",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    folder: Path, tmp_path: Path, name: str, value: torch.Tensor | None, message: str
) -> None:
    copied = _copy(folder, tmp_path / "m")
    tensors = load_file(copied / "model.safetensors")
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    save_file(tensors, copied / "model.safetensors")
    assert message in _refused(copied, tmp_path, recipe="groupwise-int")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_other_number_types(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    from ninfer.artifact import Artifact

    from .logical import everything, expected_qwen

    copied = _copy(folder, tmp_path / "m")
    tensors = load_file(copied / "model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, copied / "model.safetensors")
    convert(copied, tmp_path / "out.ninfer", recipe="bf16")
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        found = everything(artifact)
        for name, values in expected_qwen(tensors, tiny.SMALL).items():
            rounded = (
                values.to(dtype).bfloat16()
                if "a_log" not in name and "dt_bias" not in name
                else values.to(dtype)
            )
            assert torch.equal(found[name], rounded.float().reshape(-1)), name


def test_bf16_words_pass_untouched(folder: Path, tmp_path: Path) -> None:
    """NaN payloads and signed zeros included."""
    from ninfer.artifact import Artifact

    copied = _copy(folder, tmp_path / "m")
    tensors = load_file(copied / "model.safetensors")
    words = torch.arange(-48 * 64, 48 * 64, dtype=torch.int32).reshape(96, 64) * 10
    tensors["model.layers.0.mlp.up_proj.weight"] = words.to(torch.int16).view(torch.bfloat16)
    save_file(tensors, copied / "model.safetensors")
    convert(copied, tmp_path / "out.ninfer", recipe="bf16")
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        (part,) = artifact.parameter("text/layers/0/mlp/up")
        stored = artifact.object_bytes(part.object).view("<i2")[part.begin : part.end]
        assert np.array_equal(stored, words.to(torch.int16).reshape(-1).numpy())


def test_rows_of_a_stack_of_matrices(tmp_path: Path) -> None:
    stack = torch.arange(3 * 4 * 5).reshape(3, 4, 5).float()
    save_file({"bank": stack}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    rows = np.array([2, 3, 4, 5, 6, 7, 8, 0, 11])
    assert torch.equal(source.rows("bank", rows, 12), stack.reshape(12, 5)[torch.from_numpy(rows)])


# config.json

CONFIG_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["MistralForCausalLM"]}, "architecture ['MistralForCausalLM']; this version converts"),
    ({"architectures": None}, "architecture None"),
    ({"architectures": ["Qwen3_5MoeForCausalLM"]}, "mixture of experts"),
    ({"hidden_act": "gelu"}, "'hidden_act'"),
    ({"attention_bias": True}, "'attention_bias'"),
    ({"attn_output_gate": False}, "'attn_output_gate'"),
    ({"mamba_ssm_dtype": "bfloat16"}, "'mamba_ssm_dtype'"),
    ({"hidden_size": None}, "lacks 'hidden_size'"),
    ({"hidden_size": "64"}, "positive 32-bit integer"),
    ({"hidden_size": 64.0}, "positive 32-bit integer"),
    ({"rms_norm_eps": 0}, "positive and finite"),
    ({"rms_norm_eps": 1e60}, "positive and finite"),
    ({"tie_word_embeddings": 1}, "true or false"),
    ({"layer_types": ["full_attention"]}, "a list of 5 layer types"),
    ({"layer_types": ["mamba"] * 5}, "the layer type 'mamba'"),
    ({"num_key_value_heads": 3}, "4 attention heads, not a multiple of 3"),
    ({"linear_num_value_heads": 5}, "not a multiple of 2 key heads"),
    ({"rope_theta": 5.0}, "states 'rope_theta' twice"),
]
ROPE_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "yarn"}, "'rope_type'"),
    ({"type": "linear"}, "'type'"),
    ({"factor": 2.0}, "'factor'"),
    ({"mrope_interleaved": False}, "'mrope_interleaved'"),
    ({"mrope_section": None}, "lacks 'mrope_section'"),
    ({"mrope_section": [2, 2, 1]}, "the sum 4"),
    ({"mrope_section": [0, 2, 2]}, "cannot be interleaved"),
    ({"mrope_section": [1, 1]}, "three integers"),
    ({"partial_rotary_factor": 0.1}, "rotates 3 of 32"),
    ({"partial_rotary_factor": 2.0}, "at most 1"),
]


@pytest.mark.parametrize(("change", "message"), CONFIG_FAULTS)
def test_configs_that_cannot_be_converted(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    copied = _copy(folder, tmp_path / "m")
    config = json.loads((copied / "config.json").read_text()) | change
    (copied / "config.json").write_text(json.dumps(config))
    assert message in _refused(copied, tmp_path)


@pytest.mark.parametrize(("change", "message"), ROPE_FAULTS)
def test_rotary_embeddings_that_cannot_be_converted(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    copied = _copy(folder, tmp_path / "m")
    config = json.loads((copied / "config.json").read_text())
    config.pop("partial_rotary_factor", None)
    config["rope_parameters"] |= change
    (copied / "config.json").write_text(json.dumps(config))
    assert message in _refused(copied, tmp_path)


def test_config_is_json(folder: Path, tmp_path: Path) -> None:
    copied = _copy(folder, tmp_path / "m")
    (copied / "config.json").write_text("[1")
    assert "cannot be read as JSON" in _refused(copied, tmp_path)
    (copied / "config.json").write_text("[1]")
    assert "an object is needed" in _refused(copied, tmp_path)
    (copied / "config.json").unlink()
    assert "has no config.json" in _refused(copied, tmp_path)


def test_mtp_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    text = _refused(folder, tmp_path, components=("text", "mtp"))
    assert "has no MTP layer" in text


@pytest.mark.parametrize(
    ("components", "message"),
    [
        (("mtp",), "must contain text"),
        (("text", "text"), "none twice"),
        (("text", "sound"), "unknown component 'sound'"),
        (("text", "vision"), "component 'vision' cannot be converted by this version"),
        (("text", "dflash2"), "component 'dflash2' cannot be converted by this version"),
    ],
)
def test_components(folder: Path, tmp_path: Path, components: tuple[str, ...], message: str) -> None:
    assert message in _refused(folder, tmp_path, components=components)


LLAMA_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "'rope_type'"),
    ({"mlp_bias": True}, "'mlp_bias'"),
    ({"head_dim": 31}, "odd head dimension 31"),
    ({"head_dim": None, "num_attention_heads": 5}, "no multiple of 5 heads"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'type'"),
]


@pytest.mark.parametrize(("change", "message"), LLAMA_FAULTS)
def test_llama_configs(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tiny.write_llama(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert message in _refused(tmp_path / "m", tmp_path)
    assert "text only" in _refused(tmp_path / "m", tmp_path, components=("text", "mtp"))


def test_llama_defaults(tmp_path: Path) -> None:
    from ninfer.convert.huggingface import components

    minimal = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96}
    minimal |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    config = components(minimal, ("text",), "config.json")["text"]
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == 16
    assert config["rope_theta"] == 10000.0
    assert config["rms_norm_eps"] == float(np.float32(1e-6))
    assert config["max_position_embeddings"] == 2048
    assert config["tie_word_embeddings"] is False
