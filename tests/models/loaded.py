"""Tiny random models, loaded; what they hold is never changed, so tests share them."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from ninfer import models
from ninfer.artifact import Artifact
from ninfer.models import Model

from .draft import draft
from .tiny import FULL, LINEAR, Geometry, LlamaGeometry, Qwen35Geometry, build

GEOMETRIES: dict[str, Geometry] = {
    "qwen3.5": Qwen35Geometry(layer_types=(LINEAR, FULL, LINEAR), max_positions=4096),
    "llama": LlamaGeometry(layers=2, max_positions=4096),
}


def write(name: str, folder: Path) -> Path:
    """The artifact of a geometry."""
    return draft(GEOMETRIES[name], build(GEOMETRIES[name])).write(folder / f"{name}.ninfer")


@cache
def loaded(name: str) -> Model:
    """The model of a geometry, in BF16."""
    with TemporaryDirectory() as folder, Artifact.open(write(name, Path(folder))) as artifact:
        return models.load(artifact)
