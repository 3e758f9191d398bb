"""The whole way: a Hugging Face folder, converted, loaded and run, against the model that was saved."""

from pathlib import Path

import pytest
import torch

from ninfer import models
from ninfer.artifact import Artifact
from ninfer.convert import convert
from tests.convert.tiny import write_resources

from .test_transformers import GEOMETRIES, TOKENS, assert_close, checkpoint, teacher_forced
from .tiny import save_folder


@pytest.mark.parametrize("name", ["irregular", "threefold", "llama", "llama-tied"])
def test_converted_folders_match(name: str, tmp_path: Path) -> None:
    hf, tokens, reference = checkpoint(name)
    folder = save_folder(hf, tmp_path / "hf")
    write_resources(folder)
    convert(folder, tmp_path / "out.ninfer", recipe="bf16")
    with Artifact.open(tmp_path / "out.ninfer") as artifact:
        assert artifact.components["text"].config == GEOMETRIES[name].text_config()
        model = models.load(artifact, activation_dtype=torch.float32)
        assert_close(teacher_forced(model, tokens, [TOKENS]), reference, 0.002)
