"""GGUF blocks are taken over unchanged, moved only as whole rows or whole column blocks."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from ninfer.artifact import Artifact
from ninfer.convert import convert

from . import exporter, tiny
from .logical import everything, expected_qwen, read


@pytest.fixture(scope="module")
def small() -> dict[str, torch.Tensor]:
    return _random_tensors(tiny.SMALL)


@pytest.fixture(scope="module")
def wide() -> dict[str, torch.Tensor]:
    return _random_tensors(tiny.WIDE)


def _random_tensors(size: tiny.Size) -> dict[str, torch.Tensor]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return tiny.write_qwen(Path(folder), size, has_mtp=True)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_every_matrix_decodes_to_what_the_blocks_say(small, tmp_path: Path, kind: str) -> None:
    exporter.write_qwen(tmp_path / "m.gguf", small, tiny.SMALL, encode=exporter.quantized(kind), has_mtp=True)
    report = convert(tmp_path / "m.gguf", tmp_path / "out.ninfer", components=("text", "mtp"))
    format = kind.lower() if kind in ("F16", "BF16") else f"ggml_{kind.lower()}"
    format = {"f16": "fp16"}.get(format, format)
    target = gguf.GGMLQuantizationType[kind]
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        found = everything(artifact)
        for name, values in expected_qwen(small, tiny.SMALL, has_mtp=True).items():
            is_matrix = values.dim() == 2 and not name.endswith("convolution")
            if is_matrix:
                # Blocks hold 32 values of a row: quantizing before or after the exporter's moves is the same.
                blocks = gguf.quants.quantize(values.contiguous().numpy(), target)
                values = torch.from_numpy(gguf.quants.dequantize(blocks, target))
                assert artifact.tensor(artifact.parameter(name)[0].object).format == format, name
            assert torch.equal(found[name], values.reshape(-1)), name
        assert all(not use.auxiliaries for use in artifact.uses)
    assert report.fallbacks == ()


def test_k_quants_of_both_kinds_share_a_parent(wide, tmp_path: Path) -> None:
    kinds = {"attn_gate": "Q6_K", "ffn_up": "Q6_K", "ssm_alpha": "Q5_K", "ssm_beta": "Q5_K"}
    encode = exporter.random_blocks(kinds, "Q4_K")
    exporter.write_qwen(tmp_path / "m.gguf", wide, tiny.WIDE, encode=encode, has_mtp=True)
    convert(tmp_path / "m.gguf", tmp_path / "out.ninfer", components=("text", "mtp"))
    stored = _stored(tmp_path / "m.gguf")
    order = [
        0,
        3,
        1,
        4,
        2,
        5,
    ]  # head order of the columns: 2 key heads, 3 repeats, head k*3+r stored at r*2+k
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        parents = {
            artifact.parameter(f"text/layers/0/gdn/{name}")[0].object
            for name in ("query", "key", "value", "z")
        }
        assert len(parents) == 1
        assert artifact.tensor(parents.pop()).format == "ggml_k"
        assert (
            artifact.tensor(artifact.parameter("text/layers/0/gdn/a_projection")[0].object).format
            == "ggml_q5_k"
        )
        z = read(artifact, "text/layers/0/gdn/z").reshape(6, 128, 256)
        for head, position in enumerate(_positions()):
            assert torch.equal(
                z[head].reshape(-1), stored["blk.0.attn_gate.weight"][position * 128 :][:128].reshape(-1)
            )
        up = read(artifact, "text/layers/1/mlp/up")
        assert torch.equal(up, stored["blk.1.ffn_up.weight"].reshape(-1))
        query = read(artifact, "text/layers/1/attention/query").reshape(4, 64, 256)
        both = stored["blk.1.attn_q.weight"].reshape(4, 2, 64, 256)
        assert torch.equal(query, both[:, 0])
        # A value head of 128 is half a block: columns stay as stored, and the Use says how.
        output = read(artifact, "text/layers/0/gdn/output")
        assert torch.equal(output, stored["blk.0.ssm_out.weight"].reshape(-1))
        use = next(use for use in artifact.uses if use.parameter == "text/layers/0/gdn/output")
        (part,) = use.auxiliaries["input_head_order"]
        assert artifact.tensor(part.object).format == "int32"
        assert artifact.object_bytes(part.object).view("<i4").tolist() == order
        others = [
            use for use in artifact.uses if use.auxiliaries and use.parameter != "text/layers/0/gdn/output"
        ]
        assert others == []


def test_decoding_reorders_what_preserving_may_not(wide, tmp_path: Path) -> None:
    encode = exporter.random_blocks({}, "Q6_K")
    exporter.write_qwen(tmp_path / "m.gguf", wide, tiny.WIDE, encode=encode)
    convert(tmp_path / "m.gguf", tmp_path / "out.ninfer", recipe="bf16")
    stored = _stored(tmp_path / "m.gguf")["blk.0.ssm_out.weight"]
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        output = read(artifact, "text/layers/0/gdn/output").reshape(256, 6, 128)
        for head, position in enumerate(_positions()):
            assert torch.equal(output[:, head], stored[:, position * 128 :][:, :128].bfloat16().float())
        assert all(not use.auxiliaries for use in artifact.uses)


def test_heads_of_whole_blocks_are_reordered(wide, tmp_path: Path) -> None:
    exporter.write_qwen(tmp_path / "m.gguf", wide, tiny.WIDE, encode=exporter.quantized("Q8_0"))
    convert(tmp_path / "m.gguf", tmp_path / "out.ninfer")
    stored = _stored(tmp_path / "m.gguf")["blk.0.ssm_out.weight"]
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        output = read(artifact, "text/layers/0/gdn/output").reshape(256, 6, 128)
        for head, position in enumerate(_positions()):
            assert torch.equal(output[:, head], stored[:, position * 128 :][:, :128])
        assert all(not use.auxiliaries for use in artifact.uses)


def test_one_order_serves_all_layers(tmp_path: Path) -> None:
    size = tiny.Size(**{**tiny.WIDE.__dict__, "layer_types": ("linear", "full", "linear")})
    tensors = _random_tensors(size)
    exporter.write_qwen(tmp_path / "m.gguf", tensors, size, encode=exporter.random_blocks({}, "Q4_K"))
    convert(tmp_path / "m.gguf", tmp_path / "out.ninfer")
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        orders = [use.auxiliaries["input_head_order"] for use in artifact.uses if use.auxiliaries]
        assert len(orders) == 2
        assert orders[0] == orders[1]


def _positions() -> list[int]:
    """Stored position of each logical value head of WIDE."""
    stored = [key * 3 + repeat for repeat in range(3) for key in range(2)]
    return [stored.index(head) for head in range(6)]


def _stored(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the file as numbers, by the gguf package."""
    return {
        tensor.name: torch.from_numpy(
            np.array(gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type), np.float32)
        )
        for tensor in gguf.GGUFReader(path).tensors
    }
