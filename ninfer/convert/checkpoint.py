"""An opened source with everything architecture-dependent settled: configs, views, resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ninfer.convert import gguf_config, gguf_mapping, hf_mapping, huggingface, resources
from ninfer.convert.gguf_file import MAGIC
from ninfer.convert.gguf_source import GgufSource
from ninfer.convert.parameters import TEXT, Geometry, Parameter
from ninfer.convert.safetensors_source import SafetensorsSource
from ninfer.convert.source import Source
from ninfer.convert.views import View
from ninfer.errors import ConversionError


class Checkpoint(Protocol):
    """A source that the converter knows how to read; `close` it."""

    @property
    def source(self) -> Source: ...

    @property
    def default_recipe(self) -> str: ...

    def components(self, wanted: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Component configs, `text` first."""
        ...

    def views(
        self, parameters: Mapping[str, Parameter], geometry: Geometry, *, is_partial: bool
    ) -> dict[str, View]:
        """Where every parameter stands; an additional source may be partial."""
        ...

    def resources(self, given: Mapping[str, Path]) -> dict[str, bytes]:
        """The text resources, role -> bytes, in the order of the roles."""
        ...


@dataclass(frozen=True)
class HuggingFaceCheckpoint:
    """A safetensors checkpoint with (or, as an additional source, without) its config."""

    source: SafetensorsSource

    @property
    def config(self) -> dict[str, Any]:
        if self.source.config is None:
            raise ConversionError(
                f"{self.source.path} has no config.json beside it; it says nothing about the model"
            )
        return self.source.config

    @property
    def default_recipe(self) -> str:
        return "preserved" if "quantization_config" in self.config else "bf16"

    def components(self, wanted: Sequence[str]) -> dict[str, dict[str, Any]]:
        return huggingface.components(self.config, wanted, f"the config.json of {self.source.path}")

    def views(
        self, parameters: Mapping[str, Parameter], geometry: Geometry, *, is_partial: bool
    ) -> dict[str, View]:
        prefix = huggingface.text_prefix(self.source.config or {})
        found = hf_mapping.views(parameters, geometry, self.source, prefix, is_partial=is_partial)
        left = hf_mapping.unmapped(found, self.source, prefix)
        if left:
            raise ConversionError(
                f"{self.source.path} has the tensor '{left[0]}', which this architecture does not use; it "
                "cannot be converted"
            )
        return found

    def resources(self, given: Mapping[str, Path]) -> dict[str, bytes]:
        path = self.source.path
        return resources.from_folder(path if path.is_dir() else path.parent, self.config, given)


@dataclass(frozen=True)
class GgufCheckpoint:
    """A GGUF file."""

    source: GgufSource

    @property
    def default_recipe(self) -> str:
        return "gguf-preserved"

    def components(self, wanted: Sequence[str]) -> dict[str, dict[str, Any]]:
        return gguf_config.components(self.source.file, wanted)

    def views(
        self, parameters: Mapping[str, Parameter], geometry: Geometry, *, is_partial: bool
    ) -> dict[str, View]:
        del is_partial
        return gguf_mapping.views(parameters, geometry, self.source.file)

    def resources(self, given: Mapping[str, Path]) -> dict[str, bytes]:
        return resources.from_gguf(self.source.file, given)


def open_checkpoint(path: Path) -> HuggingFaceCheckpoint | GgufCheckpoint:
    """A folder, index or file of safetensors, or a GGUF file."""
    if is_gguf(path):
        return GgufCheckpoint(GgufSource(path))
    return HuggingFaceCheckpoint(SafetensorsSource(path))


def is_gguf(path: Path) -> bool:
    """Whether a file is (or calls itself) GGUF."""
    if path.is_dir() or not path.exists():
        return False
    with path.open("rb") as file:
        return file.read(4) == MAGIC or path.suffix == ".gguf"


def check_same_model(
    base: Mapping[str, Mapping[str, Any]], other: HuggingFaceCheckpoint | GgufCheckpoint, name: str
) -> None:
    """Refuse an additional source whose config, if it has one, describes another model."""
    if isinstance(other, HuggingFaceCheckpoint) and other.source.config is None:
        return
    mine, theirs = base[TEXT], other.components(tuple(base))[TEXT]
    for member in mine:
        if member not in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings") and mine[
            member
        ] != theirs.get(member):
            raise ConversionError(
                f"the source '{name}' is of another model: its {member} is {theirs.get(member)}, that of "
                f"the base {mine[member]}"
            )
