"""A copy of an artifact that knows more positions, for agents whose prompts are longer than its model's.

The weights stay: what the model says past its own limit means nothing, and a scripted answer needs no sense.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ninfer.artifact import Artifact, ArtifactWriter

_FIELD = "max_position_embeddings"


def longer(source: Path, positions: int, folder: Path) -> Path:
    """The copy of `source` in `folder` whose components know `positions`; made if it isn't there."""
    with Artifact.open(source) as artifact:
        target = folder / f"{source.stem}-{positions}-{artifact.artifact_id.hex()[:8]}.ninfer"
        if target.exists():
            return target
        components = {
            name: dataclasses.replace(
                part, config={**part.config, **({_FIELD: positions} if _FIELD in part.config else {})}
            )
            for name, part in artifact.components.items()
        }
        directory = dataclasses.replace(artifact.directory, components=components)
        with ArtifactWriter(target, directory) as writer:
            for name, record in artifact.objects.items():
                writer.write(name, 0, artifact.read_range(record.offset, record.bytes))
            writer.commit()
    return target
