"""The same weights as a Hugging Face folder and as GGUF are the same logical parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ninfer.artifact import Artifact
from ninfer.convert import convert

from . import exporter, tiny
from .logical import everything, expected_qwen


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert torch.equal(found[name], values.reshape(-1)), name


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("qwen")
    return folder, tiny.write_qwen(folder, is_sharded=True, has_mtp=True)


@pytest.mark.parametrize("has_mtp", [False, True])
def test_folder_gives_the_logical_parameters(qwen, tmp_path: Path, has_mtp: bool) -> None:
    folder, tensors = qwen
    components = ("text", "mtp") if has_mtp else ("text",)
    convert(folder, tmp_path / "out.ninfer", recipe="bf16", components=components)
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        _same(everything(artifact), expected_qwen(tensors, tiny.SMALL, has_mtp))
        head = [use.input for use in artifact.uses if use.parameter == "text/output_head"]
        assert head == [f"{component}/final_hidden" for component in components]


@pytest.mark.parametrize("has_mtp", [False, True])
@pytest.mark.parametrize("states_layers", [False, True])
def test_gguf_gives_the_logical_parameters(qwen, tmp_path: Path, has_mtp: bool, states_layers: bool) -> None:
    size = (
        tiny.SMALL
        if states_layers
        else tiny.Size(layer_types=("linear", "linear", "linear", "full", "linear"))
    )
    tensors = qwen[1] if states_layers else tiny.write_qwen(tmp_path / "hf", size, has_mtp=True)
    # A file with an MTP block may be converted without it.
    exporter.write_qwen(tmp_path / "m.gguf", tensors, size, has_mtp=True, states_layers=states_layers)
    components = ("text", "mtp") if has_mtp else ("text",)
    convert(tmp_path / "m.gguf", tmp_path / "out.ninfer", recipe="bf16", components=components)
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        _same(everything(artifact), expected_qwen(tensors, size, has_mtp))


def test_configs_agree(qwen, tmp_path: Path) -> None:
    folder, tensors = qwen
    exporter.write_qwen(tmp_path / "m.gguf", tensors, tiny.SMALL, has_mtp=True)
    for source, name in ((folder, "hf"), (tmp_path / "m.gguf", "gguf")):
        convert(source, tmp_path / name, recipe="bf16", components=("text", "mtp"))
    with Artifact.open(tmp_path / "hf") as hf, Artifact.open(tmp_path / "gguf") as gguf:
        assert {k: c.config for k, c in hf.components.items()} == {
            k: c.config for k, c in gguf.components.items()
        }
        assert hf.uses == gguf.uses
        assert list(hf.bindings) == list(gguf.bindings)


def test_text_tower_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    tensors = tiny.write_multimodal(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out.ninfer")
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        _same(everything(artifact), expected_qwen(tensors, tiny.SMALL))


def test_tied_head_is_one_object(tmp_path: Path) -> None:
    size = tiny.Size(is_tied=True)
    tensors = tiny.write_qwen(tmp_path / "hf", size)
    exporter.write_qwen(tmp_path / "m.gguf", tensors, size)
    for source in ("hf", "m.gguf"):
        convert(tmp_path / source, tmp_path / f"{source}.ninfer", recipe="groupwise-int")
        with Artifact.open(tmp_path / f"{source}.ninfer") as artifact:
            assert artifact.components["text"].config["tie_word_embeddings"] is True
            assert artifact.parameter("text/output_head") == artifact.parameter("text/token_embedding")
            assert list(artifact.bindings)[-1] == "text/output_head"


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("head_dim", [32, 48])
def test_llama(tmp_path: Path, is_tied: bool, head_dim: int) -> None:
    tensors = tiny.write_llama(tmp_path / "hf", is_tied=is_tied, head_dim=head_dim)
    exporter.write_llama(tmp_path / "m.gguf", tensors, head_dim=head_dim)
    convert(tmp_path / "hf", tmp_path / "hf.ninfer")
    convert(tmp_path / "m.gguf", tmp_path / "gguf.ninfer")
    with Artifact.open(tmp_path / "hf.ninfer") as hf, Artifact.open(tmp_path / "gguf.ninfer") as gguf:
        assert hf.components["text"].config == gguf.components["text"].config
        _same(everything(gguf), everything(hf))
        query = everything(hf)["text/layers/1/attention/query"]
        assert torch.equal(query, tensors["model.layers.1.self_attn.q_proj.weight"].float().reshape(-1))


def test_llama_blocks_survive_the_row_moves(tmp_path: Path) -> None:
    tensors = tiny.write_llama(tmp_path / "hf")
    exporter.write_llama(tmp_path / "m.gguf", tensors, encode=exporter.quantized("Q4_1"))
    convert(tmp_path / "m.gguf", tmp_path / "kept.ninfer")
    convert(tmp_path / "m.gguf", tmp_path / "decoded.ninfer", recipe="bf16")
    with (
        Artifact.open(tmp_path / "kept.ninfer") as kept,
        Artifact.open(tmp_path / "decoded.ninfer") as decoded,
    ):
        query = kept.parameter("text/layers/0/attention/query")
        assert kept.tensor(query[0].object).format == "ggml_q4_1"
        # Rounded to BF16 the two are the same: a row of blocks decodes to what it decoded to before it moved.
        for name, values in everything(kept).items():
            assert torch.equal(values.bfloat16().float(), everything(decoded)[name]), name
