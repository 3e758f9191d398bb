"""Exports of ninfer-nano: shards, folder, shipped artifact, rebuilt folder, and every weight profile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ninfer import models
from ninfer.artifact import Artifact, TensorObject
from ninfer.convert import convert
from ninfer.errors import ConversionError
from ninfer.frontend import Frontend
from tests.frontend.conftest import _QWEN_DOCUMENTS as STAND_IN
from tests.frontend.conftest import QWEN
from tests.models.test_transformers import TOKENS, assert_close, teacher_forced
from tools.nano import checkpoint, export, geometry, gguf_writer, shards
from tools.nano.model import initialize, to_huggingface
from tools.nano.rebuild import COMPONENTS, rebuild, values

from .nano_random import random_tensors, write_shards, write_tokenizer

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return random_tensors()


@pytest.fixture(scope="module")
def folder(tensors: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face folder, made of shards."""
    root = tmp_path_factory.mktemp("nano")
    tokenizer = write_tokenizer(STAND_IN, root / "tokenizer")
    export.write_hf(write_shards(tensors, root / "shards"), root / "trained", tokenizer)
    return root / "trained"


@pytest.fixture(scope="module")
def shipped(folder: Path) -> Path:
    export.write_artifact(folder, folder.parent / "shipped.ninfer")
    return folder.parent / "shipped.ninfer"


@pytest.fixture(scope="module")
def profiles(shipped: Path) -> dict[str, Path]:
    return {"shipped": shipped, **export.write_profiles(shipped, shipped.parent / "profiles")}


def _transformers(weights: Tensors) -> Any:
    """The model that transformers builds from the geometry, with these weights in FP32."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    model = Qwen3_5ForCausalLM._from_config(
        Qwen3_5TextConfig(**geometry.config()), attn_implementation="eager", dtype=torch.float32
    )
    trunk = {name: tensor.float() for name, tensor in weights.items() if not name.startswith("mtp.")}
    missing = model.load_state_dict(trunk, strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    assert not missing.unexpected_keys
    model.tie_weights()
    return model.eval()


def _tokens() -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randint(geometry.VOCAB_ROWS, (TOKENS,), generator=generator).tolist())


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([_tokens()]), use_cache=False).logits[0].float()


def test_the_tensors_are_those_of_transformers() -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**geometry.config()))
    trunk = {name: tuple(one.shape) for name, one in model.named_parameters()}
    ours = checkpoint.tensor_shapes()
    assert trunk == {name: shape for name, shape in ours.items() if not name.startswith("mtp.")}
    assert sum(int(np.prod(shape)) for shape in ours.values()) <= 24_000_000


def test_shards_become_a_folder(tensors: Tensors, folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert json.loads((folder / "config.json").read_text()) == geometry.config()
    for role, data in STAND_IN.resources().items():
        assert (folder / role).read_bytes() == data


def test_the_trainings_own_shards_are_taken(tmp_path: Path) -> None:
    parameters = initialize(4, "cpu")
    paths = shards.save(parameters, tmp_path)
    assert all(path.stat().st_size <= shards.LIMIT for path in paths)
    assert sum(path.stat().st_size for path in paths) <= 60 << 20
    found = shards.read(tmp_path)
    assert found.keys() == checkpoint.tensor_shapes().keys()
    for name, value in to_huggingface(parameters):
        assert torch.equal(found[name], value.to(checkpoint.dtype_of(name))), name


def _spoil(change: Callable[[Tensors], Any]) -> Callable[[Path, Tensors], None]:
    def apply(source: Path, tensors: Tensors) -> None:
        changed = dict(tensors)
        change(changed)
        for path in source.iterdir():
            path.unlink()
        save_file(changed, source / "shard-0.safetensors")

    return apply


NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
FAULTS = {
    "no shards": (lambda s, _: [path.unlink() for path in s.iterdir()], "has no shard-"),
    "twice": (lambda s, t: save_file({NORM: t[NORM]}, s / "shard-9.safetensors"), f"'{NORM}' once more"),
    "cut": (lambda s, _: (s / "shard-1.safetensors").write_bytes(b"\x10" * 40), "shard-1.* cannot be read"),
    "missing": (_spoil(lambda t: t.pop("mtp.fc.weight")), "lacks 1 of .*'mtp.fc.weight'"),
    "unknown": (_spoil(lambda t: t.update({"lm_head.weight": torch.zeros(2)})), "'lm_head.weight', which"),
    "shape": (_spoil(lambda t: t.update({DOWN: t[DOWN].t().contiguous()})), r"\[640, 512\].*\[512, 640\]"),
    "dtype": (
        _spoil(lambda t: t.update({DOWN: t[DOWN].float()})),
        f"'{DOWN}'.*float32; save it as .*bfloat16",
    ),
    "nan": (_spoil(lambda t: t.update({NORM: t[NORM] * torch.nan})), "not finite"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_shards_are_refused(
    fault: str, tensors: Tensors, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, message = FAULTS[fault]
    source = write_shards(tensors, tmp_path / "shards")
    spoil(source, tensors)
    tokenizer = write_tokenizer(STAND_IN, tmp_path / "tokenizer")
    with pytest.raises(ConversionError, match=message):
        export.write_hf(source, tmp_path / "out", tokenizer)
    assert not (tmp_path / "out").exists()
    arguments = ["hf", str(source), str(tmp_path / "out"), "--tokenizer", str(tokenizer)]
    assert export.main(arguments) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_missing_tokenizer_files_and_existing_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"lacks tokenizer\.json, .*make the tokenizer first"):
        checkpoint.read_resources(tmp_path)
    with pytest.raises(ConversionError, match="exists already"):
        checkpoint.write_folder(folder, {}, {})


def test_a_bf16_artifact_gives_the_folder_back(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "m.ninfer", recipe="bf16", components=COMPONENTS)
    rebuild(tmp_path / "m.ninfer", tmp_path / "back")
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == names
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes(), name


def test_the_shipped_artifact(shipped: Path) -> None:
    assert shipped.stat().st_size <= 25 << 20
    with Artifact.open(shipped) as artifact:
        assert artifact.metadata["name"] == "ninfer-nano"
        assert artifact.provenance["sources"] == {"base": {"path": "trained"}}
        assert set(artifact.components) == {"text", "mtp"}
        for name in artifact.bindings:
            tensor = artifact.tensor(artifact.parameter(name)[0].object)
            is_matrix = len(tensor.shape) == 2 and not name.endswith("convolution")
            is_gating = name.endswith(("a_projection", "b_projection"))
            direct = "fp32" if name.endswith(("a_log", "dt_bias")) else "bf16"
            assert tensor.format == ("q8_g32_fp16" if is_matrix and not is_gating else direct), name


def test_a_rebuilt_folder_holds_the_dequantized_values(
    tensors: Tensors, shipped: Path, profiles: dict[str, Path], tmp_path: Path
) -> None:
    found = load_file(shipped.parent / "profiles" / "reference" / "model.safetensors")
    for name, tensor in tensors.items():
        is_kept = tensor.dim() != 2 or name.endswith(("in_proj_a.weight", "in_proj_b.weight"))
        assert torch.equal(found[name], tensor if is_kept else _eight_bit(tensor)), name
    rebuild(shipped, tmp_path / "again")
    for path in (shipped.parent / "profiles" / "reference").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def _eight_bit(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit groups of 32 by their rule, then BF16."""
    groups = tensor.double().numpy().reshape(-1, 32)
    scale = (np.abs(groups).max(1) / 127).astype(np.float32).astype(np.float16).astype(np.float32)
    inverse = (1 / scale.astype(np.float64)).astype(np.float32)[:, None]
    codes = np.rint(groups.astype(np.float32) * inverse).clip(-127, 127)
    return torch.from_numpy(scale[:, None] * codes).reshape(tensor.shape).bfloat16()


def test_transformers_loads_the_rebuilt_folder(profiles: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    folder = profiles["bf16"].parent / "reference"
    reference = _logits(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    )
    assert 0.3 < reference.std() < 3
    with Artifact.open(profiles["bf16"]) as artifact:
        exact = models.load(artifact, activation_dtype=torch.float32)
        assert_close(teacher_forced(exact, _tokens(), [TOKENS]), reference, 0.002)
        assert_close(teacher_forced(models.load(artifact), _tokens(), [TOKENS]), reference, 0.04)


@pytest.mark.parametrize("profile", ["shipped", "nvfp4-official", "quasar", "groupwise-int", "q4_k_m"])
def test_the_engine_computes_what_a_profile_says(profiles: dict[str, Path], profile: str) -> None:
    """transformers has the profile's dequantized weights; K-quants went through the GGUF file's orders."""
    with Artifact.open(profiles[profile]) as artifact:
        reference = _logits(_transformers(values(artifact)))
        model = models.load(artifact, activation_dtype=torch.float32)
        assert_close(teacher_forced(model, _tokens(), [TOKENS]), reference, 0.002)


# rms of the error over rms of normally distributed weights
LIMITS = {
    "bf16": 0.0,
    "fp32": 0.0,
    "q4_g64_fp16": 0.13,
    "q5_g64_fp16": 0.065,
    "q8_g32_fp16": 0.009,
    "nvfp4": 0.12,
    "fp8_e4m3fn_row_bf16": 0.03,
    "ggml_k": 0.08,
    "ggml_q8_0": 0.009,
}
PROFILE_FORMATS = {
    "bf16": {"bf16", "fp32"},
    "nvfp4-official": {"bf16", "fp32", "q8_g32_fp16", "nvfp4", "fp8_e4m3fn_row_bf16"},
    "quasar": {"bf16", "fp32", "q8_g32_fp16", "nvfp4", "fp8_e4m3fn_row_bf16"},
    "groupwise-int": {"bf16", "fp32", "q4_g64_fp16", "q5_g64_fp16", "q8_g32_fp16"},
    "q4_k_m": {"bf16", "fp32", "ggml_k", "ggml_q8_0"},
}


@pytest.mark.parametrize("profile", PROFILE_FORMATS)
def test_every_profile_is_made_of_the_reference(profiles: dict[str, Path], profile: str) -> None:
    """MTP layer included; no format fell back to another one."""
    reference = load_file(profiles["bf16"].parent / "reference" / "model.safetensors")
    with Artifact.open(profiles[profile]) as artifact:
        formats = {one.format for one in artifact.objects.values() if isinstance(one, TensorObject)} - {
            "int32"
        }
        assert formats == PROFILE_FORMATS[profile]
        for name, found in values(artifact).items():
            expected = reference[name].float()
            limit = max(LIMITS[one] for one in formats)
            if name.endswith("A_log") and profile == "q4_k_m":  # stored as -exp(A_log)
                assert torch.allclose(found, expected, rtol=0, atol=3e-7)
            elif expected.dim() == 2:
                relative = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
                assert relative <= limit, name
            elif profile == "q4_k_m" and name.endswith("norm.weight"):  # stored as 1 + w in FP32
                tiny = expected.abs() < 2**-16
                assert torch.equal(found[~tiny], expected[~tiny]), name
                assert ((found - expected).abs() <= tiny * 2**-23).all(), name
            else:
                assert torch.equal(found, expected), name
    report = json.loads(Path(f"{profiles[profile]}.conversion.json").read_text())
    assert report.get("fallbacks", []) == []


def test_the_gguf_file_has_the_official_mix_of_types() -> None:
    """The 27B's Q4_K_M file with its MTP layer has 360 FP32, 439 Q4_K and 67 Q6_K tensors."""
    shared = ["attn_norm", "post_attention_norm", "ffn_gate", "ffn_up", "ffn_down"]
    full = ["attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"]
    linear = ["attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_conv1d", "ssm_norm", "ssm_out"]
    names = ["token_embd.weight", "output.weight", "output_norm.weight"]
    for index in range(65):
        is_full = index % 4 == 3 or index == 64
        names += [f"blk.{index}.{name}.weight" for name in shared + (full if is_full else linear)]
        names += [] if is_full else [f"blk.{index}.ssm_a", f"blk.{index}.ssm_dt.bias"]
    names += [f"blk.64.nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")]
    kinds = [gguf_writer.tensor_kind(name, 5120, 65, is_tied=False).name for name in names]
    assert {kind: kinds.count(kind) for kind in kinds} == {"F32": 360, "Q4_K": 439, "Q6_K": 67}


def test_the_gguf_files_types(profiles: dict[str, Path]) -> None:
    reader = gguf.GGUFReader(profiles["q4_k_m"].parent / "ninfer-nano.Q4_K_M.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["token_embd.weight"] == "Q6_K"
    assert "output.weight" not in kinds
    assert {kinds[f"blk.{index}.ffn_down.weight"] for index in range(9)} == {"Q8_0"}
    assert [kinds[f"blk.{index}.attn_v.weight"] for index in (3, 7, 8)] == ["Q6_K"] * 3
    assert [kinds[f"blk.{index}.attn_qkv.weight"] for index in (0, 1, 2)] == ["Q6_K", "Q4_K", "Q4_K"]
    assert kinds["blk.8.nextn.eh_proj.weight"] == kinds["blk.0.ssm_alpha.weight"] == "Q4_K"


def test_the_imported_tokenizer_is_the_same(folder: Path, profiles: dict[str, Path]) -> None:
    with Artifact.open(profiles["q4_k_m"]) as artifact:
        rebuilt = {role: artifact.resource("text", role) for role in checkpoint.RESOURCES}
    original = checkpoint.read_resources(folder)
    assert rebuilt["chat_template.jinja"] == original["chat_template.jinja"]
    assert json.loads(rebuilt["generation_config.json"]) == json.loads(original["generation_config.json"])
    ours, theirs = (
        Frontend.from_resources(one, architecture=QWEN, vocab_rows=geometry.VOCAB_ROWS)
        for one in (rebuilt, original)
    )
    text = "I'll sort 1234 naïve e\u0301 foxes:\n\n\tdef f(a):  return 12 <think> いろは 🇩🇪"
    assert ours.encode(text) == theirs.encode(text)
    messages = [{"role": "user", "content": text}]
    assert ours.render(messages).tokens == theirs.render(messages).tokens
    assert ours.public_tokens == theirs.public_tokens
    for token in range(ours.public_tokens):
        assert ours.decode([token], keep_special=True) == theirs.decode([token], keep_special=True)


def test_another_model_is_refused(tmp_path: Path) -> None:
    from tests.convert import tiny

    tiny.write_qwen(tmp_path / "tiny", has_mtp=True)
    convert(tmp_path / "tiny", tmp_path / "tiny.ninfer", recipe="bf16", components=COMPONENTS)
    with pytest.raises(ConversionError, match="is not ninfer-nano"):
        rebuild(tmp_path / "tiny.ninfer", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_profiles_print_their_sizes(profiles: dict[str, Path]) -> None:
    table = export.size_table(profiles)
    assert len(table.splitlines()) == 1 + len(profiles)
    assert f"{profiles['quasar'].stat().st_size:,}" in table
    sizes = [profiles[name].stat().st_size for name in ("q4_k_m", "shipped", "bf16")]
    assert sizes == sorted(sizes)
