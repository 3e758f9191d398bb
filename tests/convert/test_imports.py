"""Codes and scales of quantized checkpoints arrive bit for bit, cut and stacked as whole rows."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ninfer.artifact import Artifact
from ninfer.artifact.layouts import unpack_rows
from ninfer.convert import convert
from ninfer.errors import ConversionError
from ninfer.formats import Planes

from . import quantized, tiny
from .logical import read

SIZE = tiny.TILED
Base = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = tmp_path_factory.mktemp("base")
    return folder, tiny.write_qwen(folder, SIZE)


def _quantized(base: Base, folder: Path, scheme: quantized.Scheme) -> dict[str, torch.Tensor]:
    shutil.copytree(base[0], folder)
    return quantized.write(folder, base[1], {scheme: quantized.layer_matrices(base[1])})


def _planes(artifact: Artifact, name: str) -> Planes:
    (part,) = artifact.parameter(name)
    tensor = artifact.tensor(part.object)
    data = artifact.object_bytes(part.object)
    columns = tensor.shape[1]
    return unpack_rows(tensor.format, tensor.shape, data, part.begin // columns, part.end // columns)


def _head_rows(half: int) -> torch.Tensor:
    rows = torch.arange(2 * SIZE.heads * SIZE.head_dim).reshape(SIZE.heads, 2, SIZE.head_dim)
    return rows[:, half].reshape(-1)


KEYS = SIZE.key_heads * SIZE.key_dim
PLACES = {
    "text/layers/1/attention/query": ("model.layers.1.self_attn.q_proj.", _head_rows(0)),
    "text/layers/1/attention/gate": ("model.layers.1.self_attn.q_proj.", _head_rows(1)),
    "text/layers/1/attention/output": ("model.layers.1.self_attn.o_proj.", None),
    "text/layers/0/gdn/key": ("model.layers.0.linear_attn.in_proj_qkv.", torch.arange(KEYS, 2 * KEYS)),
    "text/layers/0/gdn/value": (
        "model.layers.0.linear_attn.in_proj_qkv.",
        torch.arange(2 * KEYS, 2 * KEYS + 256),
    ),
    "text/layers/0/mlp/down": ("model.layers.0.mlp.down_proj.", None),
}


def _rows(values: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    values = values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values
    return values if rows is None else values[rows]


def _divisor(artifact: Artifact, name: str) -> float:
    (use,) = (use for use in artifact.uses if use.parameter == name)
    assert use.activation_policy == "AllowA4"
    (part,) = use.auxiliaries["activation_input_divisor"]
    return float(artifact.object_bytes(part.object).view("<f4")[0])


@pytest.mark.parametrize("recipe", ["quasar", "preserved"])
def test_compressed_tensors_nvfp4(base: Base, tmp_path: Path, recipe: str) -> None:
    stored = _quantized(base, tmp_path / "q", quantized.compressed_nvfp4)
    convert(tmp_path / "q", tmp_path / "out.ninfer", recipe=recipe)
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        for name, (stem, rows) in PLACES.items():
            planes = _planes(artifact, name)
            assert planes.scales is not None
            assert torch.equal(planes.codes, _rows(stored[f"{stem}weight_packed"], rows)), name
            assert torch.equal(planes.scales, _rows(stored[f"{stem}weight_scale"], rows)), name
            assert planes.divisor == float(stored[f"{stem}weight_global_scale"])
            assert _divisor(artifact, name) == float(stored[f"{stem}input_global_scale"])
        query, key, value = (
            artifact.parameter(f"text/layers/1/attention/{n}")[0] for n in ("query", "key", "value")
        )
        assert query.object == key.object == value.object  # equal divisors
        gate, up = (artifact.parameter(f"text/layers/0/mlp/{n}")[0] for n in ("gate", "up"))
        assert gate.object != up.object  # different ones
        assert sum(use.auxiliaries != {} for use in artifact.uses) == 2 * 8


def test_modelopt_nvfp4_scalars_are_inverted(base: Base, tmp_path: Path) -> None:
    stored = _quantized(base, tmp_path / "q", quantized.modelopt_nvfp4)
    convert(tmp_path / "q", tmp_path / "out.ninfer", recipe="quasar")
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        for name, (stem, rows) in PLACES.items():
            planes = _planes(artifact, name)
            assert torch.equal(planes.codes, _rows(stored[f"{stem}weight"], rows))
            assert planes.divisor == float(np.float32(1.0 / np.float64(np.float32(0.0037))))
            assert _divisor(artifact, name) == float(np.float32(1.0 / np.float64(np.float32(0.0021))))


@pytest.mark.parametrize("scheme", [quantized.fp8_rows, quantized.fp8_whole])
def test_fp8_rows(base: Base, tmp_path: Path, scheme: quantized.Scheme) -> None:
    stored = _quantized(base, tmp_path / "q", scheme)
    convert(base[0], tmp_path / "out.ninfer", recipe="nvfp4-official", sources={"quantized": tmp_path / "q"})
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        for name, (stem, rows) in PLACES.items():
            planes = _planes(artifact, name)
            assert planes.scales is not None
            assert torch.equal(planes.codes, _rows(stored[f"{stem}weight"], rows))
            scale = stored[f"{stem}weight_scale"].reshape(-1)
            scale = scale.expand(planes.scales.shape) if scale.numel() == 1 else _rows(scale, rows)
            assert torch.equal(planes.scales, scale.bfloat16())
        assert {use.activation_policy for use in artifact.uses if "mlp" in use.parameter} == {"AllowA8"}
        assert artifact.provenance["sources"]["quantized"]["path"] == str(tmp_path / "q")


def test_fp8_blocks(base: Base, tmp_path: Path) -> None:
    stored = _quantized(base, tmp_path / "q", quantized.fp8_blocks)
    convert(tmp_path / "q", tmp_path / "out.ninfer", recipe="fp8-block")
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        for name, (stem, rows) in PLACES.items():
            planes = _planes(artifact, name)
            assert planes.scales is not None
            assert torch.equal(planes.codes, _rows(stored[f"{stem}weight"], rows)), name
            tiles = None if rows is None else rows[::128] // 128
            assert torch.equal(planes.scales, _rows(stored[f"{stem}weight_scale_inv"], tiles)), name
        head = artifact.tensor(artifact.parameter("text/output_head")[0].object)
        assert head.format == "bf16"


@pytest.mark.parametrize(
    "scheme",
    [quantized.compressed_nvfp4, quantized.modelopt_nvfp4, quantized.fp8_rows, quantized.fp8_blocks],
)
def test_codes_can_be_decoded_instead(base: Base, tmp_path: Path, scheme: quantized.Scheme) -> None:
    stored = _quantized(base, tmp_path / "q", scheme)
    convert(tmp_path / "q", tmp_path / "out.ninfer", recipe="bf16")
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        for name in ("text/layers/1/attention/gate", "text/layers/0/mlp/down"):
            stem, rows = PLACES[name]
            expected = _decoded(stored, stem)
            expected = expected if rows is None else expected[rows]
            assert torch.equal(read(artifact, name), expected.bfloat16().float().reshape(-1)), name


def _decoded(stored: dict[str, torch.Tensor], stem: str) -> torch.Tensor:
    """Numbers of a matrix, by the formulas and in float64."""
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = stored.get(f"{stem}weight_packed", stored.get(f"{stem}weight"))
    assert codes is not None
    if codes.dtype == torch.uint8:
        nibbles = torch.stack((codes & 15, codes >> 4), -1).reshape(codes.shape[0], -1)
        values = e2m1[(nibbles & 7).long()] * (1 - 2 * (nibbles >> 3).double())
        values *= stored[f"{stem}weight_scale"].double().repeat_interleave(16, 1)
        if f"{stem}weight_global_scale" in stored:
            return values / stored[f"{stem}weight_global_scale"].double()
        return values / torch.tensor(1 / stored[f"{stem}weight_scale_2"].item()).float().double()
    values = codes.double()
    if f"{stem}weight_scale_inv" in stored:
        scale = stored[f"{stem}weight_scale_inv"].double()
        return values * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return values * stored[f"{stem}weight_scale"].double().reshape(-1, 1)


def test_official_recipe_with_its_source(base: Base, tmp_path: Path) -> None:
    """FP8 mixers and head, NVFP4 MLPs, endpoints and norms as the recipe says."""
    shutil.copytree(base[0], tmp_path / "q")
    matrices = quantized.layer_matrices(base[1])
    schemes = {
        quantized.fp8_rows: [*(name for name in matrices if "mlp" not in name), "lm_head.weight"],
        quantized.compressed_nvfp4: [name for name in matrices if "mlp" in name],
    }
    moved = {**base[1], "model.norm.weight": base[1]["model.norm.weight"] + 1}
    stored = quantized.write(tmp_path / "q", moved, schemes)
    convert(
        base[0], tmp_path / "out.ninfer", recipe="qwen3_8_27b_nvfp4", sources={"quantized": tmp_path / "q"}
    )
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        head = _planes(artifact, "text/output_head")
        assert torch.equal(head.codes, stored["lm_head.weight"].view(torch.uint8))
        assert _planes(artifact, "text/layers/1/mlp/up").divisor is not None
        assert torch.equal(read(artifact, "text/final_norm"), moved["model.norm.weight"].float())
        policies = {use.parameter: use.activation_policy for use in artifact.uses}
        assert policies["text/output_head"] == policies["text/layers/0/gdn/z"] == "AllowA8"
        assert policies["text/layers/0/mlp/up"] == "AllowA4"
        assert policies["text/layers/0/gdn/a_projection"] == "A16Only"


def _spoil(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _set_word(name: str, word: int) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(torch.uint8).reshape(-1)[5] = word

    return change


def _replace(name: str, value: torch.Tensor | None) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(name)
        if value is not None:
            tensors[name] = value

    return change


DOWN = "model.layers.0.mlp.down_proj.weight"
BAD = [
    (quantized.compressed_nvfp4, _set_word(f"{DOWN}_scale", 0x7F), "negative or non-finite scales"),
    (quantized.compressed_nvfp4, _set_word(f"{DOWN}_scale", 0x90), "negative or non-finite scales"),
    (quantized.compressed_nvfp4, _replace(f"{DOWN}_scale", None), "no tensor"),
    (quantized.compressed_nvfp4, _replace(f"{DOWN}_scale", torch.zeros(4, 4)), "one F8_E4M3 scale"),
    (
        quantized.compressed_nvfp4,
        _replace(f"{DOWN[:-6]}weight_global_scale", torch.tensor(0.0)),
        "positive and finite",
    ),
    (
        quantized.compressed_nvfp4,
        _replace(f"{DOWN[:-6]}weight_global_scale", torch.ones(2)),
        "an F32 scalar is needed",
    ),
    (
        quantized.compressed_nvfp4,
        _replace(f"{DOWN}_packed", torch.zeros(4, 4, dtype=torch.int32)),
        "packed as I32",
    ),
    (
        quantized.modelopt_nvfp4,
        _replace(f"{DOWN[:-6]}input_scale", torch.tensor(-math.inf)),
        "positive and finite",
    ),
    (quantized.fp8_rows, _set_word(DOWN, 0xFF), "codes that are NaN"),
    (
        quantized.fp8_rows,
        _replace(f"{DOWN}_scale", -torch.ones(256).bfloat16()),
        "negative or non-finite scales",
    ),
    (
        quantized.fp8_rows,
        _replace(f"{DOWN}_scale", torch.ones(2, 3).bfloat16()),
        "one BF16 or FP32 scale a row",
    ),
    (quantized.fp8_blocks, _replace(f"{DOWN}_scale_inv", torch.full((2, 3), 0.3)), "not BF16 values"),
    (
        quantized.fp8_blocks,
        _replace(f"{DOWN}_scale_inv", torch.ones(3, 3).bfloat16()),
        "for each 128x128 block",
    ),
]


@pytest.mark.parametrize(("scheme", "change", "message"), BAD)
def test_bad_codes_and_scales(
    base: Base,
    tmp_path: Path,
    scheme: quantized.Scheme,
    change: Callable[[dict[str, torch.Tensor]], None],
    message: str,
) -> None:
    _quantized(base, tmp_path / "q", scheme)
    _spoil(tmp_path / "q", change)
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "q", tmp_path / "out.ninfer", recipe="preserved")
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


def test_block_fp8_whose_rows_cannot_be_cut(tmp_path: Path) -> None:
    """Query and gate of 64-wide heads alternate inside a 128x128 block."""
    size = tiny.Size(256, 384, 128, 4, 2, 64, (3, 3, 2), 1, 128, 2, 128, ("linear", "full"))
    tensors = tiny.write_qwen(tmp_path / "q", size)
    quantized.write(tmp_path / "q", tensors, {quantized.fp8_blocks: quantized.layer_matrices(tensors)})
    with pytest.raises(
        ConversionError, match=r"'text/layers/1/attention/query' cannot be imported .* 128x128"
    ):
        convert(tmp_path / "q", tmp_path / "out.ninfer", recipe="fp8-block")
    report = convert(tmp_path / "q", tmp_path / "out.ninfer", recipe="preserved")
    assert {fallback.parameter for fallback in report.fallbacks} == {
        "text/layers/1/attention/query",
        "text/layers/1/attention/gate",
    }


def test_fp8_block_recipe_refuses_other_checkpoints(base: Base, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="stored as bf16; choose another recipe"):
        convert(base[0], tmp_path / "out.ninfer", recipe="fp8-block")


def test_a_source_of_another_model_is_refused(base: Base, tmp_path: Path) -> None:
    tiny.write_qwen(tmp_path / "other")
    with pytest.raises(
        ConversionError, match="the source 'quantized' is of another model: its hidden_size is 64"
    ):
        convert(base[0], tmp_path / "out.ninfer", recipe="quasar", sources={"quantized": tmp_path / "other"})


def test_a_source_without_config_is_trusted(base: Base, tmp_path: Path) -> None:
    stored = _quantized(base, tmp_path / "q", quantized.compressed_nvfp4)
    for path in (tmp_path / "q").glob("*.json"):
        path.unlink()
    quantized_only = {name: tensor for name, tensor in stored.items() if name != "lm_head.weight"}
    save_file(quantized_only, tmp_path / "q" / "model.safetensors")
    convert(
        base[0],
        tmp_path / "out.ninfer",
        recipe="quasar",
        sources={"quantized": tmp_path / "q" / "model.safetensors"},
    )
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        assert _planes(artifact, "text/layers/0/mlp/up").divisor is not None
