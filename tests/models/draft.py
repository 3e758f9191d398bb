"""A text artifact in the making: build it from a tiny checkpoint, spoil it if the test wants, write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ninfer.artifact import ArtifactWriter, Binding, Component, Directory, Part, TensorObject, Use, place

from .logical import Logical, logical_parameters
from .tiny import Geometry

_WORDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int32": torch.int32}


@dataclass
class Draft:
    """Everything of an artifact before it is written; tests change it freely."""

    config: dict[str, Any]
    objects: dict[str, TensorObject] = field(default_factory=dict)
    data: dict[str, bytes] = field(default_factory=dict)
    bindings: dict[str, Binding] = field(default_factory=dict)
    uses: dict[tuple[str, str], Use] = field(default_factory=dict)
    components: dict[str, Component] = field(default_factory=dict)

    def add(self, id: str, values: torch.Tensor, format: str = "bf16") -> TensorObject:
        """A direct object."""
        data = values.to(_WORDS[format]).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return self.add_encoded(id, format, "contiguous_le_v1", tuple(values.shape), data)

    def add_encoded(
        self, id: str, format: str, layout: str, shape: tuple[int, ...], data: bytes
    ) -> TensorObject:
        """An object of any format from its bytes."""
        self.data[id] = data
        self.objects[id] = TensorObject(id, shape, format, layout, 0, len(data))
        return self.objects[id]

    def bind(self, name: str, *parts: tuple[str, int, int]) -> None:
        self.bindings[name] = Binding(tuple(Part(*part) for part in parts))

    def change_use(self, name: str, **changes: Any) -> None:
        """Replace members of every Use of a parameter."""
        for key, use in self.uses.items():
            if use.parameter == name:
                self.uses[key] = replace(use, **changes)

    def write(self, path: Path) -> Path:
        """Write the file; the only component is `text` unless the test added more."""
        components: Mapping[str, Component] = {"text": Component(self.config), **self.components}
        directory = Directory(
            components, place(list(self.objects.values())), self.bindings, tuple(self.uses.values())
        )
        with ArtifactWriter(path, directory) as writer:
            for id, data in self.data.items():
                writer.write(id, 0, data)
            writer.commit()
        return path


def draft(geometry: Geometry, model: Any, *, packed: bool = True) -> Draft:
    """The text tower in BF16; `packed` puts what a converter would pack into one parent."""
    logical = logical_parameters(geometry, model)
    out = Draft(geometry.text_config())
    groups = logical.groups if packed else []
    for index, group in enumerate(groups):
        _add_group(out, logical, f"parent/{index}", group)
    for name, tensor in logical.tensors.items():
        if name not in out.bindings:
            format = "fp32" if name in logical.direct_fp32 else "bf16"
            out.bindings[name] = Binding.to(out.add(name, tensor, format))
    for name, input in logical.inputs.items():
        out.uses[name, input] = Use(name, input, "A16Only")
    return out


def _add_group(out: Draft, logical: Logical, id: str, names: tuple[str, ...]) -> None:
    out.add(id, torch.cat([logical.tensors[name] for name in names]))
    begin = 0
    for name in names:
        end = begin + logical.tensors[name].numel()
        out.bind(name, (id, begin, end))
        begin = end
