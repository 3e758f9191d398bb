"""What every model offers to those who load it, wherever its bytes come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ninfer.artifact import strict_json
from ninfer.artifact.records import (
    Binding,
    Component,
    Directory,
    Part,
    ResourceObject,
    TensorObject,
    Use,
)
from ninfer.errors import ArtifactError

if TYPE_CHECKING:
    import torch


class Contents(ABC):
    """A directory, and access to the bytes that it describes. Use as a context manager, or call `close`.

    `path`: the file, or the name that the model was asked for by. `artifact_id`: 16 bytes, the same only for
    the same contents.
    """

    def __init__(self, path: Path, directory: Directory, artifact_id: bytes) -> None:
        self.path = path
        self.artifact_id = artifact_id
        self.directory = directory

    @property
    def components(self) -> Mapping[str, Component]:
        """Component id to record."""
        return self.directory.components

    @property
    def objects(self) -> Mapping[str, TensorObject | ResourceObject]:
        """Object id to record, by rising offset."""
        return self.directory.objects

    @property
    def bindings(self) -> Mapping[str, Binding]:
        """Logical parameter name to binding."""
        return self.directory.bindings

    @property
    def uses(self) -> tuple[Use, ...]:
        """All Uses."""
        return self.directory.uses

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Free members; `name`, if there, is the public model name."""
        return self.directory.metadata

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Where the model came from; free members."""
        return self.directory.provenance

    def parameter(self, name: str) -> tuple[Part, ...]:
        """The parts of a logical parameter."""
        found = self.bindings.get(name)
        if found is None:
            raise ArtifactError(f"{self.path} does not bind the parameter {strict_json.show(name)}")
        return found.parts

    def tensor(self, object_id: str) -> TensorObject:
        """The record of a tensor object."""
        found = self.objects.get(object_id)
        if not isinstance(found, TensorObject):
            raise ArtifactError(f"{self.path} has no tensor object {strict_json.show(object_id)}")
        return found

    @property
    @abstractmethod
    def file_bytes(self) -> int:
        """Size of all files together; of a model without files, what its objects take."""

    @abstractmethod
    def resource(self, component: str, role: str) -> bytes:
        """The bytes of a component's resource."""

    @abstractmethod
    def object_tensor(self, object_id: str, device: torch.device) -> torch.Tensor:
        """All bytes of a tensor object, uint8 `[bytes]`, not to be written to.

        On the host where they come from a file (normally a view of it); on `device` where they are made.
        """

    def forget(self) -> None:  # noqa: B027
        """Give back the memory of what was read so far, where it can be read again."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files; tensors that were handed out stay valid."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
