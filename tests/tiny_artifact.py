"""Whole tiny models on disk: random weights with a working tokenizer, for tests of programs."""

from pathlib import Path

from ninfer.convert import convert
from tests.frontend.conftest import Documents
from tests.models.tiny import Geometry, build, save_folder


def write_folder(geometry: Geometry, documents: Documents, path: Path) -> Path:
    """A complete Hugging Face folder: BF16 weights, config and the four text resources."""
    save_folder(build(geometry), path)
    for role, data in documents.resources().items():
        (path / role).write_bytes(data)
    return path


def write_artifact(geometry: Geometry, documents: Documents, folder: Path) -> Path:
    """The folder's conversion to BF16, `model.ninfer` beside it."""
    source = write_folder(geometry, documents, folder / "checkpoint")
    out = folder / "model.ninfer"
    convert(source, out, recipe="bf16", name="tiny")
    return out
