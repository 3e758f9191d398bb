"""The `.ninfer` v3 file: `Artifact` reads one, `ArtifactWriter` makes one.

Nothing here imports PyTorch; `ninfer.artifact.layouts`, which turns planes into an object's bytes, does.
"""

from ninfer.artifact.contents import Contents
from ninfer.artifact.reader import Artifact
from ninfer.artifact.records import (
    Binding,
    Component,
    Directory,
    FileEntry,
    Part,
    Proposal,
    ResourceObject,
    TensorObject,
    Use,
    place,
)
from ninfer.artifact.sizes import default_layout, encoded_bytes
from ninfer.artifact.writer import ArtifactWriter

__all__ = [
    "Artifact",
    "ArtifactWriter",
    "Binding",
    "Component",
    "Contents",
    "Directory",
    "FileEntry",
    "Part",
    "Proposal",
    "ResourceObject",
    "TensorObject",
    "Use",
    "default_layout",
    "encoded_bytes",
    "place",
]
