"""What identifies an artifact in reports: the formats of its weights, and a signature of its prefill work."""

import json
from collections.abc import Iterator
from hashlib import sha256

from ninfer.artifact import Contents, TensorObject


def weight_formats(artifact: Contents) -> list[str]:
    """Formats of the text model's matrices, sorted, each once."""
    return sorted({tensor.format for _, tensor in _matrices(artifact)})


def prefill_signature(artifact: Contents) -> str:
    """`<architecture>-<layers>x<hidden size>-<digest>`: equal where prefill is the same work.

    The digest, 8 hexadecimal digits of a SHA-256, covers the shape, format and layout of every matrix of the
    text model by name, and not the values: two checkpoints of one shape and recipe have one signature.
    """
    config = artifact.components["text"].config
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list | tuple) and names else "unknown"
    matrices = sorted(
        (name, list(tensor.shape), tensor.format, tensor.layout) for name, tensor in _matrices(artifact)
    )
    digest = sha256(json.dumps(matrices).encode()).hexdigest()[:8]
    return f"{architecture}-{config.get('num_hidden_layers')}x{config.get('hidden_size')}-{digest}"


def _matrices(artifact: Contents) -> Iterator[tuple[str, TensorObject]]:
    """Each text parameter with every object that holds a part of it, matrices only."""
    for name, binding in artifact.bindings.items():
        if name.startswith("text/"):
            for part in binding:
                tensor = artifact.objects[part.object]
                if isinstance(tensor, TensorObject) and len(tensor.shape) == 2:
                    yield name, tensor
